"""A run with an encoder made by hand, whose posterior predictive is known."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from byov.config import Config
from byov.data.sources import open_source
from byov.inference.run import Run
from byov.posterior import Posterior
from byov.runs.split import divide, write_reference
from byov.training.learners import Student

SIDE = 4


class Affine(nn.Module):
    """Pixels in [0, 1] through a Linear layer: weights N(mean, sigma^2) give outputs N(mean, sigma^2 (|x|^2 + 1))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE * SIDE, width)
        self.register_buffer("unit", torch.tensor(255.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(pixels(images).to(self.linear.weight.dtype))


class ShiftedAndStretched(nn.Module):
    """Fixed features, of which a draw shifts and stretches each: all that alignment undoes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(SIDE * SIDE, width))
        self.scale = nn.Parameter(torch.linspace(1, 3, width))
        self.shift = nn.Parameter(torch.linspace(-2, 2, width))

    def forward(self, images: Tensor) -> Tensor:
        return (pixels(images) @ self.directions).sin() * self.scale + self.shift


def pixels(images: Tensor) -> Tensor:
    return images.flatten(1).float() / 255 if images.dtype == torch.uint8 else images.flatten(1)


def images(count: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1, SIDE, SIDE), generator=g, dtype=torch.uint8)


def run(
    folder: Path,
    encoder: nn.Module,
    sigma: float = 0.05,
    source: Tensor | None = None,
    calibration: int = 20,
    where: str = "all",
    seed: int = 0,
) -> Run:
    """A run in `folder` on 120 images next to it, of which 20 are the calibration set."""
    source = images(120) if source is None else source
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "images.npz", images=source[:, 0].numpy())
    trained = len(source) - calibration
    data = f"npz:{folder / 'images.npz'}"
    config = Config(data=data, images=trained, calibration=calibration, image_size=SIDE, seed=seed)
    fingerprint = open_source(data).load("train").fingerprint()
    write_reference(folder, config, len(source), fingerprint, divide(len(source), trained, calibration))
    posterior = Posterior(encoder, where, 2 * float(np.log(sigma)))
    learner: Any = SimpleNamespace(posterior=posterior, teacher=None)
    return Run(folder, config, learner, posterior, 1, (1, SIDE, SIDE), None)


def student_run(folder: Path, sigma: float = 0.05) -> Run:
    """A run with all three levels: an affine encoder, and heads with BatchNorm that has seen some images."""
    torch.manual_seed(0)
    student = Student.__new__(Student)
    nn.Module.__init__(student)
    student.encoder = cast(Any, Affine(6))
    student.projector = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    student.predictor = nn.Sequential(nn.Linear(4, 3))
    for _ in range(5):
        student(images(50))
    made = run(folder, Affine(6), sigma)
    posterior = Posterior(student, "all", 2 * float(np.log(sigma)))
    learner: Any = SimpleNamespace(posterior=posterior, teacher=None)
    return Run(folder, made.config, learner, posterior.part("encoder"), 1, made.image_shape, None)
