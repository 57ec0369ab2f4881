"""Encoders that leave byov: the same features where they arrive."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import byov
from byov import export as exporting
from byov._core.errors import BadInput
from byov.backbones import build_encoder
from byov.backbones._torchvision import import_torchvision
from byov.config import Config, Model, Monitor, Optim
from byov.data.sources import open_source
from byov.export import export
from byov.inference.run import features_of
from byov.pruning.criteria import Pruning
from byov.pruning.prune import prune
from byov.scoring.one_pass import FastScorer
from byov.scoring.scores import Scorer
from byov.training.prepare import prepare

SMALL = Config(
    images=32,
    threads=1,
    device="cpu",
    model=Model(width=16, depth=2, heads=2, head_hidden=16, head_output=8),
    optim=Optim(epochs=1, batch_size=16),
    monitor=Monitor(tensorboard=False),
)
RESNET = Model(backbone="resnet-18", stem="imagenet", head_hidden=16, head_output=8)


def trained(folder: Path, **changes: object):
    prepare(replace(SMALL, **changes), folder).run()
    return byov.load(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """With a class token and learned positions."""
    return trained(tmp_path_factory.mktemp("runs") / "cls", model=replace(SMALL.model, pool="cls", positions="learned"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory):
    return trained(tmp_path_factory.mktemp("runs") / "mean", method="byol")


@pytest.fixture
def images() -> torch.Tensor:
    return open_source("digits").load("test").images[:7] / 255


def header_of(path: Path) -> dict:
    with safe_open(str(path), framework="pt") as file:
        return json.loads(file.metadata()["byov"])


def test_safetensors_tell_all_that_is_needed(run, plain, images: torch.Tensor, tmp_path: Path) -> None:
    for one in (run, plain):
        path = export(one, "safetensors")
        assert path == one.folder / "export" / "encoder.safetensors"
        header, tensors = header_of(path), load_file(str(path))
        assert "backbone.positions" in tensors  # fixed ones too
        fresh = build_encoder(Model(**header["model"]), header["image_shape"]).eval()
        missing, unknown = fresh.load_state_dict(tensors, strict=False)
        assert not missing and set(unknown) <= {"backbone.positions"}
        assert torch.equal(features_of(fresh, images), one.features(images))
        assert header["pixel_mean"] == pytest.approx(one.encoder.module.pixel_mean.flatten().tolist())
        assert header["features"] == 16
    prepare(replace(SMALL, init=str(path), method="byol"), tmp_path / "from")  # and byov itself takes it, with --init
    assert torch.equal(byov.load(tmp_path / "from").features(images), plain.features(images))


def test_the_posterior_on_request(run, plain) -> None:
    tensors = load_file(str(export(run, "safetensors", posterior=True)))
    variances = run.encoder.segments.named(run.encoder.log_variances)
    assert {name for name in tensors if name.startswith("log_variance.")} == {f"log_variance.{n}" for n in variances}
    means = run.encoder.segments.named(run.encoder.means)
    for name, value in variances.items():
        assert torch.equal(tensors[f"log_variance.{name}"], value) and torch.equal(tensors[name], means[name])
    with pytest.raises(BadInput, match="no variances"):
        export(plain, "safetensors", posterior=True)
    with pytest.raises(BadInput, match="use --format safetensors"):
        export(run, "onnx", posterior=True)


def test_the_teacher_on_request(run, images: torch.Tensor) -> None:
    path = export(run, "safetensors", teacher=True)
    fresh = build_encoder(run.config.model, run.image_shape).eval()
    fresh.load_state_dict(load_file(str(path)))
    assert torch.equal(features_of(fresh, images), features_of(run.teacher_encoder(), images))
    assert not torch.equal(features_of(fresh, images), run.features(images)) and header_of(path)["encoder"] == "teacher"


def test_onnx_with_a_class_token_any_batch_and_without_pruned_units(run, images: torch.Tensor, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    prune(run, tmp_path / "pruned", Pruning("magnitude", 0.5, structured=True), curve=())
    pruned = byov.load(tmp_path / "pruned")
    tensors = load_file(str(export(pruned, "safetensors")))
    assert tensors["backbone.blocks.0.mlp.0.weight"].shape == (32, 16)
    assert tensors["backbone.blocks.0.attention.qkv.weight"].shape == (24, 16)
    path = export(pruned, "onnx")
    assert b".py" not in path.read_bytes()  # no trace of where it was made
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for count in (1, 7):
        (features,) = session.run(["features"], {"images": images[:count].numpy()})
        np.testing.assert_allclose(features, pruned.features(images[:count]).numpy(), rtol=1e-3, atol=1e-4)
    header = json.loads(session.get_modelmeta().custom_metadata_map["byov"])
    assert header["image_shape"] == [1, 8, 8]


def test_onnx_with_both_scores_as_the_fast_scorer_gives_them(run, plain, images: torch.Tensor, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    for one in (run, plain):
        path = export(one, "onnx", with_uncertainty=True)
        assert path == one.folder / "export" / "scorer.onnx" and b".py" not in path.read_bytes()
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        header = json.loads(session.get_modelmeta().custom_metadata_map["byov"])
        outputs = header["scores"]["outputs"]
        assert (
            outputs
            == [output.name for output in session.get_outputs()]
            == [
                "embedding",
                *("oddness", "oddness_percentile", "uncertainty", "uncertainty_percentile"),
            ]
        )
        assert header["scores"]["predicted"] == (one is run)
        scorer = FastScorer(one)
        assert header["scores"]["reference_images"] == len(scorer.reference.images) == 32
        known = torch.cat([images, scorer.reference.images[:3] / 255, scorer.reference.calibration_images()[:3] / 255])
        expected, exact = scorer.scores(known)._asdict(), Scorer(one).scores(known)._asdict()
        found = dict(zip(outputs, session.run(outputs, {"images": known.numpy()}), strict=True))
        for name, values in found.items():
            steps = 2.0 if name.endswith("percentile") else 1e-4  # rounding may take a score past a calibration score
            np.testing.assert_allclose(values, expected[name].numpy(), rtol=1e-3, atol=steps, err_msg=name)
        np.testing.assert_allclose(found["oddness"], exact["oddness"].numpy(), rtol=1e-3, atol=1e-5)
        (alone,) = session.run(["uncertainty"], {"images": known[4:5].numpy()})  # any batch
        np.testing.assert_allclose(alone, found["uncertainty"][4:5], rtol=1e-4, atol=1e-5)


def test_scores_against_some_of_the_reference_images_and_without_calibration(tmp_path: Path, monkeypatch) -> None:
    runtime = pytest.importorskip("onnxruntime")
    one = trained(tmp_path / "run", calibration=0)
    monkeypatch.setattr(exporting, "MOST", 20)
    session = runtime.InferenceSession(str(export(one, "onnx", tmp_path / "s.onnx", with_uncertainty=True)))
    about = json.loads(session.get_modelmeta().custom_metadata_map["byov"])["scores"]
    assert (about["reference_images"], about["reference_images_of_run"], about["calibration_images"]) == (20, 32, 0)
    assert [output.name for output in session.get_outputs()] == ["embedding", "oddness", "uncertainty"]
    images = open_source("digits").load("test").images[:5] / 255
    oddness, uncertainty = session.run(["oddness", "uncertainty"], {"images": images.numpy()})
    expected = FastScorer(one, most=20, say=lambda text: None).scores(images)
    np.testing.assert_allclose(oddness, expected.oddness.numpy(), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(uncertainty, expected.uncertainty.numpy(), rtol=1e-3, atol=1e-4)


def test_scores_are_the_students_in_onnx(run) -> None:
    for arguments in ({"format": "timm"}, {"format": "safetensors"}, {"format": "onnx", "teacher": True}):
        with pytest.raises(BadInput, match="use --format onnx"):
            export(run, **arguments, with_uncertainty=True)


def test_our_vit_as_timms(run, plain, images: torch.Tensor) -> None:
    import_torchvision()
    library = importlib.import_module("timm")
    for one in (run, plain):
        path = export(one, "timm")
        header = header_of(path)
        norm = partial(nn.LayerNorm, eps=1e-5)
        model = library.models.VisionTransformer(norm_layer=norm, **header["timm"]["arguments"]).eval()
        model.load_state_dict(load_file(str(path)))
        mean, std = (torch.tensor(header[key]).view(-1, 1, 1) for key in ("pixel_mean", "pixel_std"))
        with torch.no_grad():
            features = model((images - mean) / std)
        torch.testing.assert_close(features, one.features(images), rtol=1e-4, atol=1e-5)


def test_our_resnet_as_torchvisions(images: torch.Tensor, tmp_path: Path) -> None:
    prepare(replace(SMALL, model=RESNET, method="byol"), tmp_path / "resnet")  # untrained: it is large
    run = byov.load(tmp_path / "resnet")
    path = export(run, "timm", tmp_path / "r.safetensors")
    header = header_of(path)
    assert header["timm"]["model"] == "resnet18"
    import_torchvision()
    model = importlib.import_module("torchvision.models").resnet18()
    model.conv1, model.fc = nn.Conv2d(1, 64, 7, 2, 3, bias=False), nn.Identity()
    model.eval().load_state_dict(load_file(str(path)))
    mean, std = (torch.tensor(header[key]).view(-1, 1, 1) for key in ("pixel_mean", "pixel_std"))
    with torch.no_grad():
        torch.testing.assert_close(model((images - mean) / std), run.features(images), rtol=1e-4, atol=1e-5)


def test_timms_own(images: torch.Tensor, tmp_path: Path) -> None:
    model = Model(backbone="timm:test_vit", head_hidden=16, head_output=8)
    run = trained(tmp_path / "timm", model=model, method="byol", image_size=32)
    header = header_of(export(run, "timm"))
    assert header["timm"] == {
        "model": "test_vit",
        "arguments": {"num_classes": 0, "in_chans": 1, "img_size": [32, 32]},
    }


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (replace(RESNET, stem="cifar"), "model.stem imagenet"),
        (replace(RESNET, width=8), "width 64"),
        (replace(SMALL.model, stem="conv"), "several convolutions"),
        (replace(SMALL.model, pool="flatten"), "features of all tokens"),
    ],
)
def test_what_timm_has_not_is_refused(model: Model, says: str, tmp_path: Path) -> None:
    prepare(replace(SMALL, model=model, method="byol"), tmp_path / "run")
    with pytest.raises(BadInput, match=f"{says}.* use --format onnx or safetensors"):
        export(byov.load(tmp_path / "run"), "timm")


def test_nothing_is_overwritten_and_what_is_wrong_is_not_kept(run, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "e.onnx"
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)  # as if onnxruntime computed something else
    with pytest.raises(BadInput, match="does not give the encoder's features"):
        export(run, "timm", out)
    assert not list(tmp_path.iterdir())
    out.touch()
    with pytest.raises(BadInput, match="exists already"):
        export(run, "safetensors", out)


def test_without_onnx_the_extra_is_named(run, tmp_path: Path, monkeypatch) -> None:
    real = importlib.import_module

    def missing(name: str, *more: object) -> object:
        if name == "onnxruntime":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BadInput, match=r"pip install 'byov-torch\[onnx\]'"):
        export(run, "onnx", tmp_path / "e.onnx")
