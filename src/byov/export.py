"""`byov export`: the encoder at its means, usable without byov.

- safetensors: the encoder's tensors by name, with a JSON header that describes the model; log-variances on request
- onnx: the whole encoder, pixels in [0, 1] in, features out, any batch size; compared with torch in onnxruntime;
  on request with both scores (`scoring/one_pass.py`), compared with `byov score --fast`
- timm: a state dict with timm's names, and how to build timm's model for it; compared with that model

Units that `byov prune --structured` emptied are left out of safetensors and ONNX.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from byov._core.errors import BadInput
from byov._core.files import without_prefix, write_atomically
from byov.backbones import Encoder, timm
from byov.backbones._torchvision import import_torchvision
from byov.config import Model, to_dict
from byov.inference.inputs import spread
from byov.inference.run import Run
from byov.posterior.segments import untied
from byov.pruning.prune import encoder_masks, encoder_of
from byov.pruning.structured import compact
from byov.runs.checkpoints import load
from byov.runs.folder import RunFolder
from byov.scoring.one_pass import FastScorer, percentiles

Format = Literal["safetensors", "onnx", "timm"]
NAMES = {"safetensors": "{}.safetensors", "onnx": "{}.onnx", "timm": "{}-timm.safetensors"}
TOLERANCE = 1e-3  # of the largest feature: float32 summed in another order, through all layers
MOST = 2000  # reference images in a file with scores: 10 MB of it at EfficientNet-Lite0's 1,280 features
SCORES = ("oddness", "uncertainty")
HEADER = "byov"  # the key of the header in a file's metadata


def export(
    run: Run,
    format: Format,
    out: Path | None = None,
    *,
    posterior: bool = False,
    teacher: bool = False,
    with_uncertainty: bool = False,
) -> Path:
    """Write the encoder to `out` (None: a file in RUN/export) and return the path."""
    if with_uncertainty and (teacher or format != "onnx"):
        raise BadInput("--with-uncertainty is for the student as ONNX: leave out --teacher, use --format onnx.")
    if posterior and (teacher or format != "safetensors"):
        raise BadInput("--posterior is for the student as safetensors: leave out --teacher, use --format safetensors.")
    if posterior and not len(run.encoder.segments):
        raise BadInput(f"{run.folder} is a {run.config.method} run, which has no variances: leave out --posterior.")
    name = "teacher" if teacher else "posterior" if posterior else "scorer" if with_uncertainty else "encoder"
    out = run.folder / "export" / NAMES[format].format(name) if out is None else out
    if out.exists():
        raise BadInput(f"{out} exists already: choose another --out, or remove it.")
    encoder = _encoder(run, teacher)
    header = header_of(run, encoder, teacher)
    if format == "timm":
        _write_timm(run, encoder, header, out)
    elif posterior:
        variances = run.encoder.segments.named(run.encoder.log_variances.detach().cpu())
        _write_safetensors(
            _tensors(encoder) | {f"log_variance.{name}": value for name, value in variances.items()}, header, out
        )
    else:
        masks = encoder_masks(without_prefix(load(RunFolder(run.folder).checkpoint)[0], "mask."))
        smaller = compact(encoder, masks)
        if with_uncertainty:
            _write_scorer(smaller, FastScorer(run, most=MOST), header, out)
        elif format == "onnx":
            images = _noise(header)
            _write_onnx(smaller, header, out, {"features": smaller(images)}, images)
        else:
            _write_safetensors(_tensors(smaller), header, out)
    return out


def _encoder(run: Run, teacher: bool) -> Encoder:
    """The plain encoder in float32, on the CPU."""
    encoder = encoder_of(run)
    if teacher:
        run.teacher_encoder()  # raises if there is none
        assert run.learner.teacher is not None
        tensors = run.learner.teacher.tensors()
        encoder.load_state_dict(
            {k: v for w in ("mean", "other") for k, v in without_prefix(tensors, f"{w}.encoder.").items()}
        )
    assert isinstance(encoder, Encoder)
    return encoder.cpu().float().requires_grad_(False)


def header_of(run: Run, encoder: Encoder, teacher: bool) -> dict[str, Any]:
    """Return what a file states about itself."""
    model = {key: value for key, value in to_dict(run.config.model).items() if value is not None and "head_" not in key}
    return {
        "format": "byov-encoder-1",
        "encoder": "teacher" if teacher else "student at its means",
        "method": run.config.method,
        "step": run.step,
        "model": {key: value for key, value in model.items() if not key.endswith("_layers")},
        "image_shape": list(run.image_shape),
        "pixel_mean": encoder.pixel_mean.flatten().tolist(),
        "pixel_std": encoder.pixel_std.flatten().tolist(),
        "features": encoder.features,
    }


def _check(what: str, values: Tensor, expected: Tensor, name: str = "features", slack: float = 0.0) -> None:
    """Raise BadInput unless what was written computes the encoder's outputs."""
    off = float((values - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not off <= TOLERANCE + slack:
        raise BadInput(f"{what} does not give the encoder's {name} (off by {off:.1e}): use --format safetensors.")


# --------------------------------------------------------------------------------------------------------- safetensors


def _tensors(encoder: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; also fixed positions, which a state dict omits."""
    return dict(encoder.named_parameters(remove_duplicate=False)) | dict(encoder.named_buffers())


def _write_safetensors(tensors: Mapping[str, Tensor], header: Mapping[str, Any], out: Path) -> None:
    apart = untied({name: tensor.detach() for name, tensor in tensors.items()})
    metadata = {"format": "pt", HEADER: json.dumps(header)}
    write_atomically(out, lambda temporary: save_file(apart, str(temporary), metadata=metadata))


# ---------------------------------------------------------------------------------------------------------------- ONNX


def _noise(header: Mapping[str, Any]) -> Tensor:
    return torch.rand(5, *header["image_shape"], generator=torch.Generator().manual_seed(0))


def _write_onnx(
    network: nn.Module,
    header: Mapping[str, Any],
    out: Path,
    expected: Mapping[str, Tensor],
    images: Tensor,
    steps: float = 0.0,
) -> None:
    """Write a network, and check its named outputs, in order, on some images.

    `steps`: how far percentiles may be off, since rounding may move a score past a calibration score.
    """
    try:
        runtime = [importlib.import_module(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]
    except ImportError as error:
        raise BadInput("ONNX needs more packages: pip install 'byov-torch[onnx]'.") from error
    try:
        with _quiet():
            batch = torch.export.Dim("batch")
            # strict: `len(x)` stays a dimension there; else it becomes the number 2
            traced = torch.export.export(network, (images[:2],), dynamic_shapes=({0: batch},), strict=True)
            program = torch.onnx.export(
                traced, (), input_names=["images"], output_names=list(expected), dynamo=True, verbose=False
            )
    except Exception as error:  # timm's many models fail in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadInput(f"torch cannot export this encoder ({reason}): use --format safetensors.") from error
    assert program is not None
    _forget_origins(program.model)
    program.model.metadata_props[HEADER] = json.dumps(header)

    def write(temporary: Path) -> None:
        program.save(str(temporary))
        session = runtime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
        for count in (len(images), 1):
            found = session.run(list(expected), {"images": images[:count].numpy()})
            for (name, values), ours in zip(expected.items(), found, strict=True):
                slack = steps if name.endswith("percentile") else 0.0
                _check("the ONNX file", torch.from_numpy(ours), values[:count], name, slack)

    write_atomically(out, write)


class _Scored(nn.Module):
    """An encoder that returns both scores, and percentiles if there are calibration scores."""

    def __init__(self, encoder: nn.Module, scorer: FastScorer) -> None:
        super().__init__()
        self.encoder, self.one_pass = encoder, scorer.model
        for name, values in scorer.calibration.items():
            self.register_buffer(f"calibration_{name}", values.float())

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        embedding = self.encoder(images)
        found = []
        for name, values in zip(SCORES, self.one_pass(embedding), strict=True):
            found.append(values)
            if hasattr(self, f"calibration_{name}"):
                found.append(percentiles(values, getattr(self, f"calibration_{name}")))
        return embedding, *found


def _write_scorer(encoder: nn.Module, scorer: FastScorer, header: dict[str, Any], out: Path) -> None:
    """Write the encoder with both scores. It is also checked on reference images, which must not find themselves."""
    model, known = scorer.model, scorer.reference.images
    some = known[spread(len(known), 5)]
    images = torch.cat([_noise(header), some / 255 if some.dtype == torch.uint8 else some])
    scores = scorer.scores(images)._asdict()
    names = ("embedding", *(name for score in SCORES for name in (score, f"{score}_percentile")))
    expected = {name: scores[name].float() for name in names if scores[name] is not None}
    usual = len(next(iter(scorer.calibration.values()), ()))
    about = {
        "outputs": list(expected),
        "uncertainty": scorer.uncertainty,
        "draws": scorer.draws,
        "predicted": model.predicts,
        "agreement": model.agreement,
        "reference_images": len(model.reference),
        "reference_images_of_run": len(scorer.reference.means.features),
        "neighbour": model.odd,
        "calibration_images": usual,
    }
    whole = header | {"format": "byov-scorer-1", "scores": about}
    _write_onnx(_Scored(encoder, scorer), whole, out, expected, images, steps=2 / max(usual, 1))


def _forget_origins(model: Any) -> None:
    """Remove the origin of each operation: a third of the file, with paths of this machine's Python files."""
    for graph in (model.graph, *model.functions.values()):
        for node in graph.all_nodes():
            node.doc_string = None
            for named in (node, *node.outputs):
                named.metadata_props.clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which reports its own deprecations and passes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


# ---------------------------------------------------------------------------------------------------------------- timm


def _write_timm(run: Run, encoder: Encoder, header: dict[str, Any], out: Path) -> None:
    """Write a state dict for a model of timm, which takes pixels normalised with the header's statistics."""
    try:
        import_torchvision()  # first: timm imports it too
        library = importlib.import_module("timm")
    except ImportError as error:
        raise BadInput("timm is not installed: pip install 'byov-torch[timm]'.") from error
    arguments = timm_arguments(run.config.model, encoder)
    state = dict(encoder.backbone.state_dict())
    if arguments["model"] == "VisionTransformer":
        state = vit_state(encoder.backbone)
        norm = partial(nn.LayerNorm, eps=1e-5)
        build: Callable[..., nn.Module] = partial(library.models.VisionTransformer, norm_layer=norm)
    else:
        build = partial(library.create_model, arguments["model"])
    model = build(**arguments["arguments"]).eval()
    model.load_state_dict(state)
    images = torch.rand(3, *run.image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _check("timm's model", model((images - encoder.pixel_mean) / encoder.pixel_std), encoder(images))
    _write_safetensors(state, header | {"timm": arguments}, out)


def timm_arguments(model: Model, encoder: Encoder) -> dict[str, Any]:
    """Return the name of the timm model with this backbone's weights, and the arguments to build it."""
    channels, *size = encoder.image_shape
    common: dict[str, Any] = {"num_classes": 0, "in_chans": channels}
    if timm.knows(model.backbone):
        sized = "img_size" in inspect.signature(type(encoder.backbone)).parameters  # a convolutional one takes any size
        return {
            "model": model.backbone.removeprefix(timm.PREFIX),
            "arguments": common | ({"img_size": size} if sized else {}),
        }
    instead = "use --format onnx or safetensors"
    if model.backbone.startswith("resnet"):
        if (model.stem, model.norm, model.width) != ("imagenet", "batch", 64):
            raise BadInput(
                f"timm's ResNets have model.stem imagenet, norm batch and width 64, this has not: {instead}."
            )
        return {"model": model.backbone.replace("-", ""), "arguments": common}
    if model.stem != "patch":
        raise BadInput(f"timm's VisionTransformer has no stem of several convolutions, this encoder has: {instead}.")
    if model.pool == "flatten":
        raise BadInput(f"timm's VisionTransformer has no features of all tokens, this encoder has: {instead}.")
    shape = {"img_size": size, "patch_size": model.patch, "embed_dim": model.width, "depth": model.depth}
    heads = {"num_heads": model.heads, "class_token": model.pool == "cls"}
    pool = {"global_pool": "token" if model.pool == "cls" else "avg", "no_embed_class": True, "fc_norm": False}
    said = "norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-5) goes with the arguments"
    return {"model": "VisionTransformer", "arguments": common | shape | heads | pool, "note": said}


def vit_state(backbone: nn.Module) -> dict[str, Tensor]:
    """Return our ViT's tensors under timm's names."""
    renamed = {
        "stem.": "patch_embed.proj.",
        ".attention.output.": ".attn.proj.",
        ".attention.": ".attn.",
        ".mlp.0.": ".mlp.fc1.",
        ".mlp.2.": ".mlp.fc2.",
    }
    state: dict[str, Tensor] = {}
    for name, tensor in _tensors(backbone).items():
        if name == "positions":
            state["pos_embed"] = tensor[None]
        elif name == "class_token":
            state["cls_token"] = tensor[None, None]
        else:
            for ours, theirs in renamed.items():
                name = name.replace(ours, theirs)
            state[name] = tensor
    return state
