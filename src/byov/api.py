"""Train and use runs from Python: `byov.train`, `byov.load`, and the `Run` that both return."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from byov._core.callbacks import Progress, Say, say_on_stderr
from byov._core.errors import BadInput
from byov.config import flatten, merge
from byov.evaluation.evaluate import evaluate
from byov.export import Format, export
from byov.inference import run as inference
from byov.inference.inputs import Images, converted
from byov.scoring.ensemble import EnsembleScorer
from byov.scoring.one_pass import FastScorer
from byov.scoring.posthoc import fit_posthoc
from byov.scoring.scores import DRAWS, Scorer, Scores
from byov.training.distributed.processes import Processes
from byov.training.prepare import prepare
from byov.training.preview import describe
from byov.training.recipes import choose_start, saved_start


@dataclass(frozen=True)
class Run(inference.Run):
    """A trained run, ready to use: its encoder, its settings, and what it finds in images.

    Images may be given as a folder, a source such as ``"digits@test"``, a file, a list of files, PIL images, arrays or
    tensors:

    - arrays: ``(H, W)``, ``(H, W, C)`` or ``(N, H, W, C)``;
    - tensors: ``(C, H, W)`` or ``(N, C, H, W)``;
    - uint8, or floats from 0 to 1, of any size, grey or RGB.

    They are cropped to their middle square, resized, and converted to the run's channels. Results keep the order of the
    images; those of a folder are sorted by path, and files that cannot be read are skipped with a warning.

    Attributes:
        folder: The run folder.
        config: Every setting of the run.
        encoder: A `Posterior` over the encoder: ``run.encoder(images)`` at the means, or at a draw within
            ``with run.encoder.sampled():``.
        step: Training steps made so far.
        image_shape: Channels, height and width of the images that the encoder takes.

    Example:
        >>> run = byov.load("runs/mine")
        >>> run.features(np.zeros((2, 32, 32, 3), dtype=np.uint8)).shape
        torch.Size([2, 64])
    """

    _scorers: dict[tuple[int, bool, tuple[Path, ...]], Scorer] = field(default_factory=dict, repr=False, compare=False)

    def features(self, images: Images) -> Tensor:
        """Compute the features of images at the means of the weights.

        Args:
            images: Images as described for `Run`.

        Returns:
            float32 tensor ``(N, width)`` on the CPU.

        Raises:
            BadInput: If the images cannot be used.

        Example:
            >>> run = byov.load("runs/mine")
            >>> run.features("digits@test").shape
            torch.Size([355, 64])
        """
        return torch.cat([self._features(part.images) for part in converted(self, images)])

    def _features(self, images: Tensor) -> Tensor:
        if not len(images):
            return torch.empty((0, self.encoder.module.features))  # type: ignore[arg-type]
        return inference.features_of(self.encoder, images)

    def score(
        self, images: Images, draws: int = DRAWS, fast: bool = False, ensemble: Sequence[inference.Run] = ()
    ) -> Scores:
        """Score how odd images are, and how uncertain their features, without labels.

        Args:
            images: Images as described for `Run`.
            draws: Weight draws of the uncertainty. Runs without random weights do not use them.
            fast: Predict the uncertainty from one forward pass instead.
            ensemble: Further runs on the same images: the uncertainty is then the disagreement between the draws of all
                runs. Oddness and features are those of this run.

        Returns:
            Oddness, uncertainty, a percentile of each, and the features, with ``paths`` where the images are files.

        Raises:
            BadInput: If the images cannot be used, or the runs have other reference images.

        Example:
            >>> run = byov.load("runs/mine")
            >>> scores = run.score("digits@test", draws=2)
            >>> oddest = scores.oddness.argsort(descending=True)[:10]
        """
        scorer = self._scorer(draws, fast, tuple(ensemble))
        parts, paths = [], []
        for images_of_chunk, names in converted(self, images):
            if len(images_of_chunk):
                parts.append(scorer.scores(images_of_chunk))
            paths += names or []
        return _joined(parts, tuple(paths) or None) if parts else self._no_scores()

    def _scorer(self, draws: int, fast: bool, others: tuple[inference.Run, ...]) -> Scorer:
        """The scorer for these settings; kept, since it holds what was computed of the reference images."""
        if fast and others:
            raise BadInput("fast=True predicts the uncertainty of one run: leave out ensemble or fast.")
        key = draws, fast, tuple(other.folder for other in others)
        if key not in self._scorers:
            one = FastScorer if fast else Scorer
            self._scorers[key] = EnsembleScorer(self, others, draws) if others else one(self, draws=draws)
        return self._scorers[key]

    def _no_scores(self) -> Scores:
        nothing = torch.empty(0, dtype=torch.float64)
        percentile = nothing if self.config.calibration else None
        return Scores(nothing, percentile, nothing, percentile, self._features(torch.empty((0, *self.image_shape))))

    def evaluate(self, data: str | None = None, draws: int = 0, **options: Any) -> dict[str, Any]:
        """Measure the run on labelled images, as `byov evaluate` does, and write the results into its folder.

        Args:
            data: The source of the images; the run's own by default.
            draws: Weight draws of the posterior predictive; 0 for none.
            **options: Further arguments of `byov.evaluation.evaluate.evaluate`, such as ``shifts=True``.

        Returns:
            The metrics by name, such as ``top1`` and ``ece``, and the settings they were made with.

        Raises:
            BadInput: If the images cannot be used or have no labels.

        Example:
            >>> results = byov.load("runs/mine").evaluate(draws=2)
            >>> 0 <= results["top1"] <= 1
            True
        """
        return evaluate(self, data, draws=draws, **options)

    def export(self, format: Format, out: str | Path | None = None, **options: Any) -> Path:
        """Write the encoder to a file that can be used without byov, as `byov export` does.

        Args:
            format: ``"safetensors"``, ``"onnx"`` or ``"timm"``.
            out: The file; must not exist yet. Default: a file in the folder ``export`` of the run.
            **options: Further arguments of `byov.export.export`, such as ``with_uncertainty=True``.

        Returns:
            The path of the file.

        Raises:
            BadInput: If the file exists, or the format cannot hold what is asked for.

        Example:
            >>> byov.load("runs/mine").export("safetensors", "encoder.safetensors").name
            'encoder.safetensors'
        """
        return export(self, format, None if out is None else Path(out), **options)


def load(folder: str | Path, device: str = "cpu", processes: Processes | None = None) -> Run:
    """Open a run folder that `byov train` or `byov.train` wrote.

    Args:
        folder: The run folder.
        device: Where the networks are put: ``"cpu"`` or ``"cuda"``.
        processes: The processes that open the run together and share its draws; by default this one alone.

    Returns:
        The run at its last checkpoint, in evaluation mode.

    Raises:
        BadInput: If the folder holds no run.

    Example:
        >>> byov.load("runs/mine").config.data
        'digits'
    """
    return Run(**vars(inference.load(folder, device, processes)))


def train(
    data: str | Path,
    out: str | Path,
    recipe: str | None = None,
    method: str = "auto",
    *,
    resume: bool = False,
    progress: Progress = lambda what, done, total: None,
    say: Say = say_on_stderr,
    **settings: Any,
) -> Run:
    """Train an encoder on images without labels, as `byov train` does.

    Args:
        data: A folder of images, or a source such as ``"digits"``, ``"npz:images.npz"`` or ``"folder:photos"``.
        out: Folder to write the run to; must not exist yet.
        recipe: A recipe's name or the path of its YAML file. By default one is chosen for the images.
        method: ``"byov"``, ``"byol"``, ``"posthoc"``, ``"supervised"`` or ``"supervised-bbb"``. ``"auto"`` is the
            recipe's; without a recipe, posthoc from pretrained weights and byov from random ones.
        resume: Continue the run in `out` exactly where it stopped.
        progress: Called with the stage, what is done of it and its total.
        say: Called with sentences for the user, such as warnings.
        **settings: Settings of `Config`, by section or by dotted key: ``seed=1``, ``optim={"epochs": 5}``,
            ``**{"optim.epochs": 5}``.

    Returns:
        The finished run.

    Raises:
        BadInput: If a setting, the images or the folder cannot be used.
        TrainingFailed: If the loss becomes NaN; the last good checkpoint is saved.

    Example:
        >>> run = byov.train("digits", out="runs/quick", images=64, optim={"epochs": 1, "batch_size": 32})
        >>> run.config.method
        'byov'
    """
    out = Path(out)
    given = {key: str(value) if isinstance(value, Path) else value for key, value in flatten(settings).items()}
    given["data"] = f"folder:{data}" if Path(data).is_dir() else str(data)
    if method != "auto":
        given["method"] = method
    start = saved_start(out) if resume and recipe is None else choose_start(recipe, given, say)
    config = merge(start.config, _nested(given), "byov.train")
    trainer = prepare(
        config, out, resume=resume, least_steps=0 if resume else start.least_steps, progress=progress, say=say
    )
    trainer.say = say
    trainer.on_step = lambda step, row: progress("training", step, trainer.total)
    say(describe(trainer, start.origin))
    try:
        if config.method != "posthoc":
            trainer.run()
        elif trainer.step < trainer.total:
            begun = time.monotonic()
            fit_posthoc(trainer, progress)
            trainer.finish(time.monotonic() - begun)
    finally:
        trainer.processes.leave()
    return load(out)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{'a.b': 1} as {'a': {'b': 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _joined(parts: list[Scores], paths: tuple[str, ...] | None) -> Scores:
    """Scores of several chunks as one."""
    columns = {
        name: None if getattr(parts[0], name) is None else torch.cat([getattr(part, name) for part in parts])
        for name in Scores._fields
        if name != "paths"
    }
    return Scores(**columns, paths=paths)  # type: ignore[arg-type]
