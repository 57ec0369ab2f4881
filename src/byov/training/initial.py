"""Starting from weights (`--init`): of a run, or of a state dict in safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from byov.errors import BadInput
from byov.training import checkpoints


def initialiser(source: str | None) -> Callable[[nn.Module], None]:
    """A function that puts the given weights into a network; nothing where none are given."""
    if source is None:
        return lambda network: None
    weights = _read(Path(source))
    return lambda network: _put(network, weights, source)


def _read(path: Path) -> dict[str, Tensor]:
    """Weights by name, as the network itself names them."""
    if path.is_dir():
        tensors, _ = checkpoints.load(path / "checkpoints" / "last.safetensors")
        student = checkpoints.part(tensors, "student.")
        return checkpoints.part(student, "mean.") | checkpoints.part(student, "other.")
    if not path.is_file():
        raise BadInput(f"there are no weights {path}: give a run folder or a .safetensors file to --init.")
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise BadInput(f"cannot read weights {path} ({error}): give a run folder or a .safetensors file.") from error


def _put(network: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Loads what fits: the encoder must come whole; heads that are absent or of another shape stay as they are."""
    own = network.state_dict()
    if not any(name.startswith("encoder.") for name in weights):  # the state dict of an encoder alone
        weights = {f"encoder.{name}": value for name, value in weights.items()}
    for name, value in own.items():
        if name.startswith("encoder.") and (name not in weights or weights[name].shape != value.shape):
            found = "is missing" if name not in weights else f"has shape {tuple(weights[name].shape)}"
            raise BadInput(
                f"the weights in {source} do not fit: {name} {found}, but this model wants {tuple(value.shape)}; "
                "use the same backbone, patch and image size."
            )
    fitting = {k: v for k, v in weights.items() if k in own and v.shape == own[k].shape}
    network.load_state_dict(fitting, strict=False)
