"""Initial weights (`--init`): of a run, of a state dict in a file, of EfficientNet-Lite, or of timm.

Weights are matched by name. A foreign state dict may be wrapped (`state_dict`, `module.`, `backbone.`, ...) and include
a classifier, which is ignored. Pixels are normalised by the statistics that come with the weights (of a run,
EfficientNet-Lite or timm), else by those of the new data.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from byov._core import memory
from byov._core.errors import BadInput
from byov._core.files import without_prefix
from byov.backbones import efficientnet_lite, timm
from byov.config import LITE
from byov.runs import checkpoints
from byov.runs.folder import CHECKPOINT, RunFolder
from byov.training.learners import encoder_of

BACKBONE = "encoder.backbone."
CONTAINERS = ("state_dict", "model", "model_state_dict")  # keys under which others store a state dict
WRAPPERS = ("module", "_orig_mod", "model", "encoder", "backbone")  # prefixes that others add to a name
HEADS = ("fc", "head", "head_dist", "heads", "classifier")  # names of classifiers
FOREIGN_VIT = ("patch_embed.proj.weight", "conv_proj.weight")  # timm's and torchvision's
GIVE = f"give {', '.join(LITE)}, timm:NAME, a run folder, or a .safetensors, .pt or .pth file to --init"


def initialiser(source: str | None) -> Callable[[nn.Module], None]:
    """Return a function that loads the given weights into a network, or does nothing if there are none."""
    if source is None:
        return lambda network: None
    if source in LITE:
        published = efficientnet_lite.pretrained(source)
        return lambda network: _put(
            network, efficientnet_lite.for_channels(published, encoder_of(network).image_shape[0]), source
        )
    if source.startswith(timm.PREFIX):  # which of them, depends on the images
        return lambda network: _put(network, timm.pretrained(source, encoder_of(network).image_shape), source)
    weights = _read(Path(source))
    return lambda network: _put(network, weights, source)


def _read(path: Path) -> dict[str, Tensor]:
    """Read the weights of a run or a file, by name."""
    if path.is_dir() or path.name == CHECKPOINT:
        tensors, _ = checkpoints.load(RunFolder(path).checkpoint if path.is_dir() else path)
        student = without_prefix(tensors, "student.")
        return without_prefix(student, "mean.") | without_prefix(student, "other.")
    if not path.is_file():
        raise BadInput(f"there are no weights {path}: {GIVE}.")
    try:
        return load_file(str(path)) if path.suffix == ".safetensors" else _read_torch(path)
    except BadInput:
        raise
    except Exception as error:  # a damaged file makes torch raise almost anything
        said = isinstance(error, (SafetensorError, OSError, RuntimeError))
        reason = (str(error).splitlines() or ["it is empty"])[0] if said else "it is damaged, or not a torch file"
        raise BadInput(f"cannot read weights {path} ({reason[:200]}): {GIVE}.") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Read a state dict that torch.save wrote. Tensors only: a pickle with code is refused, not run."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())  # compressed, it may be a thousand times this
        memory.require(size, str(path), "use a smaller file of weights")
    try:
        with warnings.catch_warnings(action="ignore"):  # of a damaged pickle's protocol
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadInput(
            f"cannot read weights {path}: it is damaged, or holds more than tensors, which is not loaded for safety; "
            "save its state dict alone."
        ) from error
    for key in CONTAINERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise BadInput(f"cannot read weights {path}: it holds a {type(loaded).__name__}; save a state dict.")
    return {str(k): v for k, v in loaded.items() if isinstance(v, Tensor) and v.layout == torch.strided}


def _put(network: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load what fits: the backbone must be complete; heads that are absent or of another shape stay as they are."""
    own = network.state_dict()
    placed = _placed(weights, own, source)
    for name in (name for name in own if name.startswith(BACKBONE)):
        wanted = tuple(own[name].shape)
        if name not in placed and not name.endswith("num_batches_tracked"):  # old files lack this one
            _refuse(source, f"{name} is missing, but this model needs {wanted}")
        if name in placed and tuple(placed[name].shape) != wanted:
            _refuse(source, f"{name} has shape {tuple(placed[name].shape)}, but this model needs {wanted}")
    fitting = {name: value for name, value in placed.items() if value.shape == own[name].shape}
    for name, value in fitting.items():
        if not bool(value.isfinite().all()):
            raise BadInput(f"the weights in {source} are not finite in {name}: they diverged, use others.")
    if "encoder.pixel_mean" in fitting and not 0 <= float(fitting["encoder.pixel_mean"].min()) <= 1:
        raise BadInput(f"the pixel_mean in {source} is not within 0 to 1, as pixels are here: remove it from the file.")
    network.load_state_dict(fitting, strict=False)


def _refuse(source: str, why: str) -> None:
    raise BadInput(
        f"the weights in {source} do not fit: {why}; use the same backbone, stem, norm, patch and image size."
    )


def _placed(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Map the weights to our names, without those that this model does not use (classifiers, a teacher, ...).

    An unknown tensor in a known part of the backbone is refused: it comes from a deeper network, or from one with
    another norm, and the rest is useless without it.
    """
    parts = {name.removeprefix(BACKBONE).split(".")[0] for name in own if name.startswith(BACKBONE)}
    ours = any(name.startswith(BACKBONE) for name in weights)
    placed: dict[str, Tensor] = {}
    for name, value in weights.items():
        bare = _bare(name, own)
        first = bare.split(".")[0]
        place = next((prefix + bare for prefix in (BACKBONE, "encoder.") if prefix + bare in own), None)
        if place is not None:
            placed[place] = value
        elif ours and name in own:  # projector, predictor, classifier
            placed[name] = value
        elif bare in FOREIGN_VIT:
            raise BadInput(
                f"the weights in {source} are of another library's ViT, which is built differently: use "
                "--model.backbone timm:NAME."
            )
        elif first in parts and first not in HEADS:
            _refuse(source, f"they have {name}, for which this model has no place")
    return placed


def _bare(name: str, own: Mapping[str, Tensor]) -> str:
    """Strip prefixes from a name, only as many as needed to recognise it."""
    while BACKBONE + name not in own:
        first, _, rest = name.partition(".")
        if first not in WRAPPERS or not rest:
            break
        name = rest
    return name
