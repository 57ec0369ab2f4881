"""The whole step, views to teacher: BYOV and our BYOL compared with plain BYOL in torch and lightly's BYOL.

All train the same ViT with the same heads on the same images, batch 128, and make views by the same recipe. Plain BYOL
is an ordinary nn.Module with torch's fused AdamW and a foreach EMA, what one would write without byov, on byov's views.
lightly's is its documented loop: its transform, heads, loss and EMA, with fused AdamW and the best number of workers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov.backbones import build_encoder
from byov.backbones._torchvision import import_torchvision
from byov.config import Model
from byov.data.images import ImageSet
from byov.data.views import two_views
from byov.training.learners import Student, build_learner
from byov.training.loop import Trainer
from byov.training.step import training_step
from conductor import Turn, Variant, fastest, interleave, ratios, steps_of, summary
from models import BATCH, SIDE, STUDENT, byol_views, config, images
from views import Loader, as_pil, lightly_transform

BYOV, BYOL, PLAIN, VIEWS = "byov, method byov", "byov, method byol", "plain BYOL in torch", "byov's views alone"
STORED = 4 * BATCH  # images


def measure(quick: bool) -> dict[str, Any]:
    rounds, steps = (3, 4) if quick else (8, 6)
    workers = [Variant(f"lightly, {w} workers", "byol_step", "lightly", {"workers": w}) for w in (0, 1, 2)]
    lightly_best = fastest(workers, rounds=1 if quick else 2, steps=steps)
    variants = [
        Variant(PLAIN, "byol_step", "plain"),
        Variant(BYOL, "byol_step", "ours", {"method": "byol"}),
        Variant(BYOV, "byol_step", "ours", {"method": "byov"}),
        lightly_best,
        Variant(VIEWS, "views", "byov", {"side": SIDE}),
    ]
    times = interleave(variants, rounds, steps)
    return {
        "batch": BATCH,
        "rounds": rounds,
        "steps_a_turn": steps,
        "lightly": lightly_best.name,
        "milliseconds": {name: 1e3 * summary(t).median for name, t in times.items()},
        "images_per_second": {name: BATCH / summary(t).median for name, t in times.items() if name != VIEWS},
        "ratio": {name: ratios(times, name, PLAIN) for name in times},
        "byov_to_our_byol": ratios(times, BYOV, BYOL),
        "speedup_over_lightly": ratios(times, lightly_best.name, BYOV),
        "views_share": ratios(times, VIEWS, BYOV),
    }


# ------------------------------------------------------------------------------------------------------------ variants


def ours(method: str, model: Model = STUDENT, batch: int = BATCH, side: int = SIDE, count: int = STORED) -> Turn:
    """Steps of byov's own trainer; `growth` uses other sizes."""
    trainer = trainer_of(method, model, batch, side, count)

    def step(k: int) -> None:
        training_step(trainer.learner, trainer.optimizer, trainer.batches(k), trainer.config, k, trainer.total)

    return steps_of(step)


def trainer_of(method: str, model: Model, batch: int, side: int, count: int) -> Trainer:
    settings = config(method, count, model, batch, side)
    return Trainer(settings, Path(), build_learner(settings, (3, side, side), None), ImageSet(images(count, side)))


def plain() -> Turn:
    settings, pixels = config("byol", STORED), images(STORED)
    student = Student(build_encoder(settings.model, (3, SIDE, SIDE)), settings.model)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.05, fused=True)

    def step(k: int) -> None:
        ids = (torch.arange(BATCH) + BATCH * k) % STORED
        views = two_views(pixels[ids], ids, settings.views, SIDE, 0, k)
        with torch.no_grad():
            targets = [teacher.projector(teacher.encoder(v)) for v in views]
        predictions = [student(v).prediction for v in views]
        cosine = [F.cosine_similarity(p, z) for p, z in zip(predictions, reversed(targets), strict=True)]
        loss = (4 - 2 * cosine[0] - 2 * cosine[1]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.01)

    return steps_of(step)


def lightly(workers: int) -> Turn:
    model = LightlyBYOL(config("byol", STORED).model)
    optimizer = torch.optim.AdamW(model.trained(), lr=1e-3, weight_decay=0.05, fused=True)

    def step(views: list[Tensor]) -> None:
        model.step(views, optimizer, momentum=0.99)

    return Loader(as_pil(images(STORED)), lightly_transform(byol_views(SIDE), SIDE), workers).turn(step)


class LightlyBYOL(nn.Module):
    """BYOL as lightly's documentation builds it, around byov's encoder."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        import_torchvision()
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead

        hidden, out = model.head_hidden, model.head_output
        self.encoder = build_encoder(model, (3, SIDE, SIDE))
        self.projector = BYOLProjectionHead(self.encoder.features, hidden, out)
        self.predictor = BYOLPredictionHead(out, hidden, out)
        self.teacher_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.teacher_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.loss = NegativeCosineSimilarity()

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def step(self, views: list[Tensor], optimizer: torch.optim.Optimizer, momentum: float) -> None:
        from lightly.models.utils import update_momentum

        update_momentum(self.encoder, self.teacher_encoder, momentum)
        update_momentum(self.projector, self.teacher_projector, momentum)
        predictions = [self.predictor(self.projector(self.encoder(v))) for v in views]
        with torch.no_grad():
            targets = [self.teacher_projector(self.teacher_encoder(v)) for v in views]
        loss = (self.loss(predictions[0], targets[1]) + self.loss(predictions[1], targets[0])) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
