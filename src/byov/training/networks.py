"""The networks that are trained: the student (encoder, projector, predictor) and the supervised classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from byov.backbones import Encoder
from byov.backbones.vit import initialise
from byov.config import Model

ENCODER = "encoder."  # prefix of an encoder's parameter names in Student and Classifier


def encoder_of(network: nn.Module) -> Encoder:
    """Return the encoder of a student, a teacher or a classifier."""
    encoder = network.get_submodule(ENCODER[:-1])
    assert isinstance(encoder, Encoder)
    return encoder


def head(inputs: int, hidden: int, outputs: int, layers: int, norm: str) -> nn.Sequential:
    """Build BYOL's head: (Linear, norm, ReLU) for each hidden layer, then a Linear without bias."""
    norms: dict[str, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm1d,
        "layer": nn.LayerNorm,
        "none": lambda width: nn.Identity(),
    }
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(inputs, hidden), norms[norm](hidden), nn.ReLU(inplace=True)]
        inputs = hidden
    return nn.Sequential(*parts, nn.Linear(inputs, outputs, bias=False)).apply(initialise)


class Outputs(NamedTuple):
    features: Tensor
    projection: Tensor
    prediction: Tensor


class Student(nn.Module):
    """Encoder, projector and predictor."""

    def __init__(self, encoder: Encoder, config: Model) -> None:
        super().__init__()
        hidden, out, norm = config.head_hidden, config.head_output, config.head_norm
        self.encoder = encoder
        self.projector = head(encoder.features, hidden, out, config.projector_layers, norm)
        self.predictor = head(out, hidden, out, config.predictor_layers, norm)

    def forward(self, images: Tensor, after_trunk: bool = False) -> Outputs:
        """Of images; with `after_trunk` of what the encoder's frozen trunk made of them."""
        features = self.encoder.after_trunk(images) if after_trunk else self.encoder(images)
        projection = self.projector(features)
        return Outputs(features, projection, self.predictor(projection))


class Bare(nn.Module):
    """Only an encoder, for methods that train nothing."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Return the features."""
        return (self.encoder(images),)


class Classifier(nn.Module):
    """An encoder and a linear layer."""

    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.features, classes).apply(initialise)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits."""
        features = self.encoder(images)
        return features, self.classifier(features)
