"""Open a run folder: its networks at the last checkpoint. `byov.load` adds features and scores of any images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from byov._core.errors import BadInput
from byov._core.files import without_prefix
from byov.config import Config, merge
from byov.inference.features import features_of
from byov.posterior import Posterior
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.training.distributed.processes import Processes
from byov.training.learners import AnyLearner, build_learner


@dataclass(frozen=True)
class Run:
    """A run's networks at its last checkpoint, in evaluation mode."""

    folder: Path
    config: Config
    learner: AnyLearner
    encoder: Posterior
    """A posterior over the encoder: `run.encoder(images)` at the means, `with run.encoder.sampled(): ...` at a draw."""
    step: int
    image_shape: tuple[int, int, int]
    classes: int | None
    fingerprint: str | None = None
    """Of the source's training images (`ImageSet.fingerprint`), as they were then."""
    processes: Processes = field(default_factory=Processes)
    """Those that have opened it together: they share its draws."""

    def features(self, images: Tensor) -> Tensor:
        """Features (N, width) of uint8 or [0, 1] images (N, C, H, W), at the means; other sides are resized first."""
        self.check(images)
        return features_of(self.encoder, images, size=self.image_shape[-1])

    def teacher_encoder(self) -> nn.Module:
        """The teacher's encoder."""
        if self.learner.teacher is None:
            raise BadInput(f"{self.folder} is a {self.config.method} run, which has no teacher: leave out --teacher.")
        return self.learner.teacher.module.get_submodule("encoder")

    def untrained_encoder(self) -> nn.Module:
        """The same encoder with the random weights that its seed gives, whatever --init put in their place."""
        fresh = (
            build_learner(self.config, self.image_shape, self.classes).posterior.unwrapped().get_submodule("encoder")
        )
        fresh.set_pixel_statistics(self.encoder.module.pixel_mean, self.encoder.module.pixel_std)  # type: ignore[operator]
        return fresh

    def check(self, images: Tensor) -> None:
        """Images that are not square, or of other channels than the run's, are bad input."""
        if images.dim() != 4 or images.shape[1] != self.image_shape[0] or images.shape[2] != images.shape[3]:
            raise BadInput(
                f"{self.folder} takes images of shape (N, {', '.join(map(str, self.image_shape))}), or other squares, "
                f"not {tuple(images.shape)}: convert or crop them first."
            )


def load(folder: str | Path, device: str = "cpu", processes: Processes | None = None) -> Run:
    """Opens a run folder, alone or in each of several processes, which then ask for the same draws at the same time.

    In training mode a call would use, and change, BatchNorm's statistics: it is not in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"there is no run {folder}: train one with `byov train`, or check the path.")
    path = RunFolder(folder).checkpoint
    tensors, state = checkpoints.load(path)
    config = merge(Config(), state["config"], str(path))
    shape: Any = tuple(state["image_shape"])
    learner = build_learner(config, shape, state["classes"], device)
    learner.posterior.load_tensors(without_prefix(tensors, "student."), str(path))
    if learner.teacher is not None:
        learner.teacher.load_tensors(without_prefix(tensors, "teacher."), str(path))
        learner.teacher.eval()
    encoder = learner.posterior.eval().part("encoder").eval()
    classes, seen = state["classes"], state["fingerprint"]
    return Run(folder, config, learner, encoder, state["step"], shape, classes, seen, processes or Processes())
