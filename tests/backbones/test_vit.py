import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from byov._core.errors import BadInput
from byov.backbones import Encoder, build_encoder, complete_model, with_backbone
from byov.backbones.vit import SIZES, ConvStem, Size, ViT, sincos_positions
from byov.config import Model, WeightInit
from byov.training.learners import Student

TINY = Size(16, 2, 2)


@pytest.mark.parametrize("positions", ["sincos", "learned"])
@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize(("stem", "patch"), [("patch", 4), ("conv", 4), ("patch", 3), ("conv", 6), ("conv", 3)])
def test_shapes_for_any_image_patch_and_channels(positions: str, pool: str, stem: str, patch: int) -> None:
    vit = ViT((12, 24), patch, 5, TINY, stem, positions, pool)
    assert vit(torch.randn(3, 5, 12, 24)).shape == (3, 16)


@pytest.mark.parametrize(("name", "millions"), [("tiny", 5.5), ("small", 21.7), ("base", 85.8)])
def test_sizes_are_deits(name: str, millions: float) -> None:
    """DeiT's encoder without its classifier: 5.5M, 21.7M, 85.8M parameters (class token, learned positions)."""
    with torch.device("meta"):
        vit = ViT((224, 224), 16, 3, SIZES[name], "patch", "learned", "cls")
    assert sum(p.numel() for p in vit.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_attention_equals_torchs_own() -> None:
    torch.manual_seed(0)
    ours = ViT((4, 4), 2, 1, TINY).blocks[0].attention
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_flattened_tokens_keep_their_places() -> None:
    torch.manual_seed(0)
    vit = ViT((4, 4), 2, 1, TINY, pool="flatten").eval()
    assert vit.features == 4 * 16
    tokens = []
    vit.norm.register_forward_hook(lambda module, inputs, output: tokens.append(output))
    features = vit(torch.randn(3, 1, 4, 4))
    assert torch.equal(features.view(3, 4, 16), tokens[0])


def test_sincos_by_hand() -> None:
    positions = sincos_positions(2, 3, 8)
    assert positions.shape == (6, 8)
    x, y, slow = 2.0, 1.0, 10000**-0.5
    angles = torch.tensor([x, x * slow, y, y * slow])
    expected = torch.cat([angles[:2].sin(), angles[:2].cos(), angles[2:].sin(), angles[2:].cos()])
    torch.testing.assert_close(positions[5], expected)
    assert torch.unique(positions, dim=0).shape[0] == 6


@pytest.mark.parametrize(
    ("weights", "stds"), [("trunc_normal", (0.02, 0.02)), ("lecun_normal", (128**-0.5, 512**-0.5))]
)
def test_initial_weights(weights: WeightInit, stds: tuple[float, float]) -> None:
    torch.manual_seed(0)
    mlp = ViT((8, 8), 2, 1, Size(128, 2, 4), weights=weights).blocks[0].mlp
    assert [float(mlp[i].weight.detach().std()) for i in (0, 2)] == pytest.approx(stds, rel=0.02)
    assert (mlp[0].bias == 0).all()


@pytest.mark.parametrize("weights", ["trunc_normal", "lecun_normal"])
def test_a_config_decides_the_initial_weights(weights: WeightInit) -> None:
    model = Model(width=64, depth=1, patch=4, head_hidden=256, weight_init=weights)
    student = Student(build_encoder(model, (1, 8, 8)), model)
    wanted = 0.02 if weights == "trunc_normal" else 64**-0.5
    for layer in (student.encoder.backbone.blocks[0].mlp[0], student.projector[0]):
        assert float(layer.weight.detach().std()) == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize(("patch", "convolutions"), [(1, 2), (7, 2), (6, 2), (4, 3), (16, 5)])
def test_a_conv_stem_has_a_convolution_before_the_tokens(patch: int, convolutions: int) -> None:
    """An odd patch too: 28 pixels with patches of 7 had a plain projection."""
    stem = ConvStem(1, 32, patch)
    assert sum(isinstance(layer, nn.Conv2d) for layer in stem) == convolutions
    assert stem(torch.zeros(1, 1, 4 * patch, 4 * patch)).shape == (1, 32, 4, 4)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"patch": 5}, "divide"),
        ({"heads": 3}, "heads"),
        ({"depth": 0}, "depth"),
        ({"norm": "batch"}, "model.norm does not apply"),
        ({"stem": "cifar"}, "use patch or conv"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        build_encoder(Model(**{"width": 16, "patch": 4, **changes}), (1, 12, 12))


def test_with_another_backbone_only_what_applies_stays() -> None:
    vit = Model("vit-micro", width=16, depth=1, stem="conv", pool="cls", head_hidden=8)
    assert with_backbone(vit, "vit-micro") is vit
    assert with_backbone(vit, "vit-mini") == Model("vit-mini", stem="conv", pool="cls", head_hidden=8)
    assert with_backbone(vit, "resnet-18") == Model("resnet-18", head_hidden=8)
    assert with_backbone(vit, "timm:resnet18") == Model("timm:resnet18", head_hidden=8)
    resnet = Model("resnet-18", stem="cifar", norm="group")
    assert with_backbone(resnet, "resnet-50") == replace(resnet, backbone="resnet-50")
    assert with_backbone(resnet, "vit-micro") == Model("vit-micro")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vit-huge", "did you mean vit-base?"),
        ("resnet-19", "did you mean resnet-18?"),
        ("vit_micro", "did you mean vit-micro?"),
        ("timm", "did you mean timm:NAME?"),
        ("timm:", "did you mean timm:NAME?"),
        ("alexnet", "vit-base, resnet-18, resnet-34, resnet-50, resnet-101, efficientnet-lite0"),
    ],
)
def test_unknown_backbone_names_the_nearest_or_all(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=re.escape(hint)) as error:
        complete_model(Model(backbone=name), 32)
    assert str(error.value).startswith(f"there is no backbone {name!r}; ")


def test_encoder_normalises_uint8_and_float_alike() -> None:
    encoder = build_encoder(Model(width=16, depth=1, heads=2, patch=4), (3, 8, 8))
    encoder.set_pixel_statistics(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7]))
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(encoder(images), encoder(images.float() / 255))
    seen = []
    encoder.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    encoder(images)
    expected = (images[:, 1].float() / 255 - 0.2) / 0.6
    torch.testing.assert_close(seen[0][:, 1], expected)
    with pytest.raises(BadInput, match="channels"):
        encoder(images[:, :1])


def test_encoder_is_a_module_of_its_own() -> None:
    encoder = build_encoder(Model(width=16, depth=1, heads=2, patch=4), (1, 8, 8))
    assert isinstance(encoder, Encoder) and encoder.features == 16
