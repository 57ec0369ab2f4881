"""Features of EfficientNet-Lite0 in evaluation mode: byov compared with timm's model, plain and at its best.

All variants have the same weights, take the same uint8 images from memory, use the same number of threads and compute
the same features. timm's tf_efficientnet_lite0 runs in the loop one would write: plain, with channels_last, and traced
and frozen by TorchScript. byov folds BatchNorm, and each core processes separate batches (`inference/run.py`).

The last variant is one weight draw as `byov score` makes it: activations after the frozen stages are cached, weights
are drawn, and the stages after blocks.4 are run. Drawing the weights and folding BatchNorm into them are included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conductor import Turn, Variant, fastest, interleave, ratios, steps_of, summary

SIDES = (96, 128)  # pixels: those of the recipes adapt-small and adapt-photos
BATCHES = (32, 64, 128)  # of timm's loops, which use the fastest
TRUNK = "blocks.4"  # the last frozen stage of both recipes
OURS, DRAW = "byov", "byov, one draw"
PLAIN, LAST, FROZEN = "timm, eval loop", "timm, channels_last", "timm, traced and frozen"
LOOPS: dict[str, dict[str, bool]] = {PLAIN: {}, LAST: {"channels_last": True}, FROZEN: {"frozen": True}}


def measure(quick: bool) -> dict[str, Any]:
    count, rounds = (128, 2) if quick else (512, 6)
    return {str(side): _measure(side, count, rounds, (64,) if quick else BATCHES) for side in SIDES}


def _measure(side: int, count: int, rounds: int, batches: tuple[int, ...]) -> dict[str, Any]:
    images = {"side": side, "count": count}
    chosen = {name: _best(images | how, batches) for name, how in LOOPS.items()}
    variants = [Variant(name, "inference", "loop", arguments) for name, arguments in chosen.items()]
    ours = [Variant(OURS, "inference", "ours", images), Variant(DRAW, "inference", "one_draw", images)]
    return compare(interleave([*variants, *ours], rounds), count) | {
        "rounds": rounds,
        "loops": {name: _setting(arguments) for name, arguments in chosen.items()},
    }


def _best(arguments: dict[str, Any], batches: tuple[int, ...]) -> dict[str, Any]:
    """A loop's fastest batch size; of a frozen network also the layout, which is a choice there too."""
    layouts = (False, True) if arguments.get("frozen") else (arguments.get("channels_last", False),)
    tried = [arguments | {"batch": batch, "channels_last": layout} for batch in batches for layout in layouts]
    return fastest([Variant(_setting(each), "inference", "loop", each) for each in tried]).arguments


def _setting(arguments: dict[str, Any]) -> str:
    return f"batch {arguments['batch']}" + ", channels_last" * (
        bool(arguments.get("frozen")) and arguments["channels_last"]
    )


def compare(times: dict[str, list[float]], count: int) -> dict[str, Any]:
    """Images per second, and how many times faster byov is than each loop; `draw`: than its own full forward pass."""
    return {
        "images": count,
        "images_per_second": {name: count / summary(t).median for name, t in times.items()},
        "speedup": {name: ratios(times, name, OURS) for name in LOOPS},
        "draw": ratios(times, OURS, DRAW),
    }


# ------------------------------------------------------------------------------------------------------------- networks


def weights() -> dict[str, Tensor]:
    """The published weights where they are installed, otherwise random ones; under timm's names."""
    from byov.backbones import efficientnet_lite

    if efficientnet_lite.is_installed("lite0"):
        return efficientnet_lite.pretrained("lite0")
    torch.manual_seed(0)
    return efficientnet_lite.EfficientNetLite("lite0").state_dict()


def timm_lite0(state: dict[str, Tensor]) -> nn.Module:
    """timm's network without its classifier, in evaluation mode."""
    from byov.backbones._torchvision import import_torchvision

    import_torchvision()  # timm imports torchvision, in the way that fails with a CPU build of torch
    import timm

    model: nn.Module = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def normalised(images: Tensor) -> Tensor:
    """uint8 images as the published network expects them."""
    from byov.backbones.efficientnet_lite import PIXEL_MEAN, PIXEL_STD

    return (images.float() / 255 - PIXEL_MEAN) / PIXEL_STD


def encoder(side: int, frozen_until: str | None = None) -> nn.Module:
    """byov's encoder with the same weights and pixel statistics."""
    from byov.backbones import build_encoder
    from byov.backbones.efficientnet_lite import for_channels
    from byov.config import Model

    built = build_encoder(Model("efficientnet-lite0", frozen_until=frozen_until), (3, side, side))
    state = for_channels(weights(), 3)
    statistics = {name: state.pop(name) for name in ("pixel_mean", "pixel_std")}
    built.backbone.load_state_dict(state)
    built.set_pixel_statistics(*statistics.values())
    return built.eval()


def pixels(side: int, count: int) -> Tensor:
    return torch.randint(256, (count, 3, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------------------- variants


def loop(side: int, count: int, batch: int, channels_last: bool = False, frozen: bool = False) -> Turn:
    """The evaluation loop one would write around timm's network."""
    network, images = timm_lite0(weights()), pixels(side, count)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = network.to(memory_format=layout)
    if frozen:
        example = normalised(images[:batch]).contiguous(memory_format=layout)
        network = torch.jit.freeze(torch.jit.trace(network, example))

    @torch.inference_mode()
    def step(_: int) -> Tensor:
        parts = torch.split(images, batch)
        return torch.cat([network(normalised(part).contiguous(memory_format=layout)) for part in parts])

    return steps_of(step)


def ours(side: int, count: int) -> Turn:
    from byov.inference.run import features_of

    network, images = encoder(side), pixels(side, count)
    return steps_of(lambda k: features_of(network, images))


def one_draw(side: int, count: int) -> Turn:
    """A weight draw of the stages after the trunk, on cached activations."""
    from byov.inference.run import at_draw, at_this_draw, before_draws
    from byov.posterior import Posterior

    posterior = Posterior(encoder(side, TRUNK), init_log_variance=-13.0)
    before = before_draws(posterior, pixels(side, count), side)

    def step(k: int) -> None:
        with at_draw(posterior, 0, k):
            at_this_draw(posterior, before)

    return steps_of(step)
