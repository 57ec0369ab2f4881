"""The training loop: epochs of steps, with monitors, checkpoints and a clean exit on interruption.

All randomness is keyed by (seed, epoch, step, image), so the position of the loop is one number, the step. A checkpoint
holds it with the tensors; a resumed run is bit-equal to one that was never stopped.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from byov._core.errors import BadInput, TrainingFailed
from byov._core.files import without_prefix, write_json
from byov._core.lock import Lock
from byov._core.randomness import RandomStream, permutation
from byov.config import Config, differences, merge, to_dict
from byov.data.images import ImageSet
from byov.data.transforms import resized
from byov.metrics.representation import knn_accuracy
from byov.posterior.priors import Gaussian
from byov.runs import checkpoints
from byov.runs.folder import RunFolder
from byov.runs.split import divide
from byov.runs.training_log import TrainingLog
from byov.training.balance import Balance, effective_images, losing_to_its_prior, loss_at_prior
from byov.training.distributed.processes import Processes
from byov.training.learners import AnyLearner, Batch
from byov.training.masks import hold_pruned
from byov.training.monitors import (
    FirstBadOutput,
    collapse_warning,
    effective_rank,
    feature_std,
    first_bad_parameter,
    layer_statistics,
    lost_noise,
    peak_memory_mib,
)
from byov.training.optimizers.build import build_optimizer, build_variances, load_optimizer_tensors, optimizer_tensors
from byov.training.optimizers.sharded_adamw import ShardedAdamW
from byov.training.resolve import with_temperature
from byov.training.step import StepReport, noise_key, training_step
from byov.training.view_cache import ViewCache, remove_cache

MARGINS = 10  # measurements of the margin over the prior in a run
KNN_BANK, KNN_QUERIES = 2000, 1000
KNN_AT_ONCE = 100  # images: a convolutional encoder takes up to 3 MiB per image at 96 pixels


class Interrupted(Exception):
    """Raised on Ctrl-C or SIGTERM, after the state was saved."""


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM instead of raising, so that a step always completes. A second Ctrl-C raises."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone handles signals
        before = {}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Trainer:
    """A run in progress."""

    config: Config
    folder: Path
    learner: AnyLearner
    data: ImageSet
    processes: Processes = field(default_factory=Processes)
    autocast: Callable[[], Any] | None = None
    fingerprint: str | None = None  # of the source's images
    trained: Tensor | None = None  # indices of the images trained on, None for all: `data` may be too large to copy
    view_cache: ViewCache | None = None
    say: Callable[[str], None] = print
    on_step: Callable[[int, dict[str, Any]], None] = lambda step, row: None
    step: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)
    warned: bool = False
    lock: Lock | None = None  # on the folder; held by the main process until training ends
    margin: float | None = None  # over the prior, as last measured

    def __post_init__(self) -> None:
        posterior, prior = self.learner.posterior, self.learner.prior
        self.config = with_temperature(self.config, posterior.segments.numel)
        self.optimizer = build_optimizer(posterior, self.config.optim, self.processes)
        self.variances = build_variances(posterior, prior, self.config)
        effective = effective_images(self.config)
        self.balance = Balance(posterior, prior, effective) if isinstance(prior, Gaussian) else None
        self.device = self.learner.posterior.means.device
        self.labels = labels_of(self.data, self.trained)
        self.seconds = 0.0  # of training so far, over all interruptions
        self._saved_at = time.monotonic()
        self._cached_order: tuple[int, Tensor] | None = None  # epoch and order
        self._logged_at = 0, 0.0  # step and time

    # ------------------------------------------------------------------------------------------------------- position

    @property
    def images(self) -> int:
        """The number of images trained on."""
        return len(self.data if self.trained is None else self.trained)

    @property
    def steps_per_epoch(self) -> int:
        return self.images // self.config.optim.batch_size  # an incomplete last batch is dropped

    @property
    def total(self) -> int:
        """The number of steps of the whole run. A posthoc run has one: the fit of its posterior."""
        return 1 if self.config.method == "posthoc" else self.config.optim.epochs * self.steps_per_epoch

    def batches(self, step: int) -> list[Batch]:
        """Return this process's micro-batches of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        size = self.config.optim.batch_size
        order = self._order(epoch)
        ids = order[place * size : (place + 1) * size][self.processes.rank :: self.processes.world]
        return [self._batch(part, epoch) for part in ids.chunk(self.config.optim.accumulate)]

    def _order(self, epoch: int) -> Tensor:
        """Return the order of the images in an epoch, cached for the epoch."""
        if self._cached_order is None or self._cached_order[0] != epoch:
            self._cached_order = epoch, permutation(self.images, RandomStream.ORDER, self.config.seed, epoch)
        return self._cached_order[1]

    def _batch(self, ids: Tensor, epoch: int) -> Batch:
        labels = None if self.labels is None else self.labels[ids].to(self.device)
        if self.view_cache is None:
            return Batch(self.pixels(ids), ids, labels, epoch)
        first, second = (views.to(self.device) for views in self.view_cache.pair(ids, epoch))
        return Batch(None, ids, labels, epoch, (first, second))

    def pixels(self, ids: Tensor) -> Tensor:
        """Return training images, uint8 (B, C, H, W), as the source stores them."""
        return self.data.images[ids if self.trained is None else self.trained[ids]].to(self.device)

    # ------------------------------------------------------------------------------------------------------- training

    def run(self) -> dict[str, Any]:
        """Train to the end; write and return the summary.

        Raises:
            Interrupted: On Ctrl-C or SIGTERM; the state is saved.
            TrainingFailed: If loss or gradient are not finite.
        """
        main = self.processes.main
        if main and self.step < self.total:
            RunFolder(self.folder).summary.unlink(missing_ok=True)  # it describes a shorter run
        log = TrainingLog(self.folder, self.step, self.config.monitor.tensorboard) if main else None
        if log is not None and self.step == 0:
            log.layers(layer_statistics(self.learner.posterior), 0, 0)
        self.learner.posterior.train()
        self._logged_at = self.step, time.monotonic()
        try:
            with _signals_noted() as signals:
                while self.step < self.total:
                    begun = time.monotonic()
                    report = self._advance()
                    if self._logs():
                        self._check_weights()
                    epoch_row = self._epoch_row(report)
                    row = {} if log is None else self._log(log, report, epoch_row)
                    self.on_step(self.step, row)
                    self.seconds += time.monotonic() - begun
                    stop, due = self.processes.any(bool(signals), self._due())
                    if stop or due or self.step == self.total:
                        self.save()
                    if stop and self.step < self.total:
                        raise Interrupted(signal.Signals(signals[0]).name if signals else "another process")
            if main:
                remove_cache(self.folder)
            return self._summarise()
        finally:
            if log is not None:
                log.close()
            self._unlock()

    def _epoch_row(self, report: StepReport) -> dict[str, Any]:
        """Return what is measured at the end of an epoch. All processes take part: BatchNorm may be shared."""
        steps = self.steps_per_epoch
        if self.balance is None or self.step % steps:
            return {}
        layers, loss = self.balance.take()
        row: dict[str, Any] = {"balance": layers}
        if MARGINS * self.step // self.total == MARGINS * (self.step - steps) // self.total:
            return row
        with self.autocast() if self.autocast is not None else nullcontext():
            at_prior = loss_at_prior(self.learner, self.batches(self.step - 1)[0], self.config, self.step)
        self.margin = at_prior - (loss + (report.kl or 0.0) / self.balance.effective)
        if self.margin < 0 and self.step == self.total:
            self.say(f"warning: {losing_to_its_prior(self.margin)}")
        return row | {"elbo_margin": self.margin}

    def _log(self, log: TrainingLog, report: StepReport, epoch_row: dict[str, Any]) -> dict[str, Any]:
        """Write what is due after a step: a row of metrics, and the layers at the end of an epoch. Return the row."""
        if not self._logs():
            return {}
        epoch_ends = self.step % self.steps_per_epoch == 0
        balance = epoch_row.pop("balance", None)
        step, at = self._logged_at
        rate = (self.step - step) * self.config.optim.batch_size / (time.monotonic() - at)
        row: dict[str, Any] = {"step": self.step, "epoch": self.step / self.steps_per_epoch, "images_per_second": rate}
        row |= self._monitor(report)
        if epoch_ends:
            row |= {"knn": self._knn()} | epoch_row
            layers = layer_statistics(self.learner.posterior, balance)
            log.layers(layers, self.step // self.steps_per_epoch, self.step)
        log.metrics(row)
        self._logged_at = self.step, time.monotonic()
        return row

    def _logs(self) -> bool:
        """Whether this step is logged: each `log_every`-th, the last of an epoch, and the last of all."""
        step = self.step
        return step % self.config.monitor.log_every == 0 or step % self.steps_per_epoch == 0 or step == self.total

    def _check_weights(self) -> None:
        """Raise TrainingFailed if an update left weights that cannot be used, which its loss could not show yet."""
        bad = checkpoints.first_not_finite(self.weights())
        if bad is None and lost_noise(self.learner.posterior, self.learner.masks):
            bad = "student.log_variance (some sigmas are 0)"
        if bad is not None:
            raise TrainingFailed(f"step {self.step}: after the update, {bad} is not finite; {self._advice()}")

    def _advance(self) -> StepReport:
        batches = self.batches(self.step)
        autocast = self.autocast() if self.autocast is not None else None
        report = training_step(
            self.learner,
            self.optimizer,
            batches,
            self.config,
            self.step,
            self.total,
            self.processes,
            autocast,
            self.variances,
        )
        if report is None:
            raise TrainingFailed(self._diagnose(batches))
        self.step += 1
        if self.balance is not None and report.pulls is not None:
            self.balance.add(report.pulls, report.nll)
        return report

    def _monitor(self, report: StepReport) -> dict[str, Any]:
        """Compute a row of metrics."""
        last, teacher = report.last, self.learner.teacher
        projection_std = None if last.projection is None else feature_std(last.projection)
        warning = None if projection_std is None else collapse_warning(projection_std, self.step)
        if warning and not self.warned:
            self.say(f"warning: {warning}")
            self.warned = True
        values = {key: value for key, value in report._asdict().items() if key not in ("last", "pulls")}
        moved = None
        if teacher is not None and report.tau is not None:
            # The teacher has moved already: the remaining gap is tau times what it was.
            moved = (1 - report.tau) / max(report.tau, 1e-6) * teacher.distance(self.learner.posterior)
        return values | {
            "feature_std": feature_std(last.features),
            "effective_rank": effective_rank(last.features),
            "projection_std": projection_std,
            "teacher_moved": moved,
            "memory_mib": peak_memory_mib(self.device),
        }

    def _knn(self) -> float | None:
        """Compute kNN accuracy on features at the means: a fixed part of the training images queries another."""
        epoch, every = self.step // self.steps_per_epoch, self.config.monitor.knn_every
        if self.labels is None or not every or (epoch % every and self.step < self.total):
            return None
        chosen = permutation(self.images, RandomStream.ORDER)[: KNN_BANK + KNN_QUERIES]
        queries = min(KNN_QUERIES, len(chosen) // 3)
        if queries == 0:
            return None
        encoder = self.learner.posterior.module.get_submodule("encoder").eval()
        with torch.no_grad():
            whole = (self.pixels(ids) for ids in torch.split(chosen, KNN_AT_ONCE))
            parts = [encoder(resized(images, self.learner.image_size)).float().cpu() for images in whole]
        encoder.train()
        features, labels = torch.cat(parts), self.labels[chosen].cpu()
        return knn_accuracy(features[queries:], labels[queries:], features[:queries], labels[:queries])

    def _diagnose(self, batches: list[Batch]) -> str:
        """Name step, loss and layer of a NaN, by repeating the same draw and batches with every output checked."""
        key = noise_key(self.config, self.step, self.processes.rank)
        with FirstBadOutput(self.learner.posterior.module) as watch, torch.no_grad():
            losses = []
            for batch in batches:
                with self.autocast() if self.autocast is not None else nullcontext():
                    losses.append(float(self.learner.loss(batch, key).nll))
        layer = watch.name or first_bad_parameter(self.learner.posterior) or "the loss itself"
        return (
            f"step {self.step}: the loss without the KL is {sum(losses) / len(losses):g} and the first value that is "
            f"not finite is in {layer}; {self._advice()}"
        )

    def _advice(self) -> str:
        kept = checkpoints.kept(RunFolder(self.folder).checkpoint)
        return f"{kept}. Lower optim.lr or optim.log_variance_lr, or set optim.clip."

    # ----------------------------------------------------------------------------------------------- saving, resuming

    def _due(self) -> bool:
        every = self.config.monitor.checkpoint_steps
        if every is not None:
            return self.step % every == 0
        return time.monotonic() - self._saved_at > self.config.monitor.checkpoint_seconds

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of student, teacher and prior by name."""
        learner = self.learner
        state = {f"student.{k}": v for k, v in learner.posterior.tensors().items()}
        if learner.teacher is not None:
            state |= {f"teacher.{k}": v for k, v in learner.teacher.tensors().items()}
        if self.config.posterior.prior == "pretrained" and learner.prior is not None:
            state["prior.mean"] = learner.prior.mean  # type: ignore[attr-defined]
        return state

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the run's state."""
        state = self.weights() | {f"mask.{k}": v for k, v in self.learner.masks.items()}
        for place, part in (("variances", self.variances), ("balance", self.balance)):
            state |= {} if part is None else {f"{place}.{k}": v for k, v in part.tensors().items()}
        return state | {f"optimizer.{k}": v for k, v in optimizer_tensors(self.optimizer).items()}

    def save(self) -> None:
        """Write the checkpoint."""
        self._check_weights()
        self._check_folder()
        sharded = isinstance(self.optimizer, ShardedAdamW)
        tensors = self.tensors() if self.processes.main or sharded else {}  # shards are gathered from all processes
        if self.processes.main:
            state = {
                "step": self.step,
                "total": self.total,
                "seconds": self.seconds,
                "image_shape": [self.data.images.shape[1], self.learner.image_size, self.learner.image_size],
                "classes": classes_of(self.data, self.trained),
                "fingerprint": self.fingerprint,
                "config": to_dict(self.config),
            }
            checkpoints.save(RunFolder(self.folder).checkpoint, tensors, state)
        self._saved_at = time.monotonic()

    def _check_folder(self) -> None:
        """Raise TrainingFailed if the run folder is no longer that of this process."""
        if self.lock is not None and not self.lock.is_ours():
            raise TrainingFailed(
                f"{self.folder} was removed, moved or taken over while it was trained (step {self.step}): nothing more "
                "is written; restore it and use --resume, or train again."
            )

    def _unlock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def restore(self) -> None:
        """Return to the last checkpoint."""
        path = RunFolder(self.folder).checkpoint
        tensors, state = checkpoints.load(path)
        different = differences(merge(Config(), state["config"], str(path)), self.config)
        different.pop("optim.epochs", None)  # --extend
        if different:
            raise BadInput(f"{path} was made with another {next(iter(different))}: it belongs to another run.")
        self.learner.posterior.load_tensors(without_prefix(tensors, "student."), str(path))
        if self.learner.teacher is not None:
            self.learner.teacher.load_tensors(without_prefix(tensors, "teacher."), str(path))
        if "prior.mean" in tensors:
            self.learner.prior.mean.copy_(tensors["prior.mean"])  # type: ignore[union-attr]
        masks, moments = without_prefix(tensors, "mask."), without_prefix(tensors, "optimizer.")
        hold_pruned(self.learner, masks)
        if state["step"] and not (moments or masks or self.config.method == "posthoc"):  # pruning drops it
            raise BadInput(f"{path} lacks the optimizer's state: it was not written by `byov train`; restore a copy.")
        load_optimizer_tensors(self.optimizer, moments, str(path))
        curvature = without_prefix(tensors, "variances.")
        if self.variances is not None and (curvature or not masks):
            self.variances.load_tensors(curvature)
        if self.balance is not None:
            for name, tensor in self.balance.tensors().items():
                tensor.copy_(tensors.get(f"balance.{name}", torch.zeros(())))
        self.step, self.seconds = state["step"], state["seconds"]

    def finish(self, seconds: float) -> dict[str, Any]:
        """End a run whose posterior was fitted without training; write and return the summary."""
        self.step, self.seconds = self.total, seconds
        self.save()
        try:
            return self._summarise()
        finally:
            self._unlock()

    def _summarise(self) -> dict[str, Any]:
        sigma = self.learner.posterior.sigma
        sigma = sigma[sigma > 0]  # a pruned weight has sigma 0
        summary = {
            "steps": self.step,
            "epochs": self.config.optim.epochs,
            "seconds": self.seconds,
            "images_per_second": self.step * self.config.optim.batch_size / max(self.seconds, 1e-9),
            "peak_memory_mib": peak_memory_mib(self.device),
            "random_weights": sigma.numel(),
            "median_sigma": float(sigma.median()) if sigma.numel() else None,
            "elbo_margin": self.margin,
        }
        if self.processes.main:
            self._check_folder()
            write_json(RunFolder(self.folder).summary, summary)
        return summary


def labels_of(data: ImageSet, trained: Tensor | None) -> Tensor | None:
    """Return the labels of the images trained on."""
    return data.labels if data.labels is None or trained is None else data.labels[trained]


def classes_of(data: ImageSet, trained: Tensor | None = None) -> int | None:
    """Return the number of classes among the images trained on; None without labels."""
    labels = labels_of(data, trained)
    return None if labels is None else int(labels.max()) + 1


def subset(data: ImageSet, count: int) -> ImageSet:
    """Return a fixed random subset, the same for every seed."""
    return data if count >= len(data) else data.subset(divide(len(data), count, 0).trained)
