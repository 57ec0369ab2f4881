"""Bootstrap Your Own Variance: give it images without labels, get an encoder that knows what it does not know.

Everything in `__all__` is public; the rest may change without notice.

    run = byov.train("folder:photos", out="runs/photos")
    scores = run.score("new-photos")               # oddness and uncertainty per image
    posterior = byov.Posterior(network)            # a Gaussian over the weights of any nn.Module
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from byov import metrics, schedules
    from byov._core.errors import BadInput, TrainingFailed
    from byov.api import Run, load, train
    from byov.backbones import Encoder, build_encoder
    from byov.config import Config, Model, Optim, View, Views, read_recipe
    from byov.data.images import ImageSet
    from byov.data.sources import open_source
    from byov.data.views import two_views
    from byov.posterior import NewtonVariances, Posterior, Prediction, Prior, Segment, priors
    from byov.pruning.criteria import Pruning
    from byov.pruning.prune import prune
    from byov.report.page import write_report
    from byov.scoring.one_pass import FastScorer
    from byov.scoring.scores import Scorer, Scores
    from byov.training.learners import Student, Teacher

__version__ = "0.2.0"
__all__ = [
    "BadInput",
    "Config",
    "Encoder",
    "FastScorer",
    "ImageSet",
    "Model",
    "NewtonVariances",
    "Optim",
    "Posterior",
    "Prediction",
    "Prior",
    "Pruning",
    "Run",
    "Scorer",
    "Scores",
    "Segment",
    "Student",
    "Teacher",
    "TrainingFailed",
    "View",
    "Views",
    "build_encoder",
    "load",
    "metrics",
    "open_source",
    "priors",
    "prune",
    "read_recipe",
    "schedules",
    "train",
    "two_views",
    "write_report",
]

# Imported on first use, so that `import byov` and `byov --help` do not wait for torch.
_HOMES = {
    "_core.errors": ("BadInput", "TrainingFailed"),
    "api": ("Run", "load", "train"),
    "backbones": ("Encoder", "build_encoder"),
    "config": ("Config", "Model", "Optim", "View", "Views", "read_recipe"),
    "data.images": ("ImageSet",),
    "data.sources": ("open_source",),
    "data.views": ("two_views",),
    "posterior": ("NewtonVariances", "Posterior", "Prediction", "Prior", "Segment", "priors"),
    "pruning.criteria": ("Pruning",),
    "pruning.prune": ("prune",),
    "report.page": ("write_report",),
    "scoring.one_pass": ("FastScorer",),
    "scoring.scores": ("Scorer", "Scores"),
    "training.learners": ("Student", "Teacher"),
}
_MODULE_OF = {name: f"byov.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name in ("metrics", "schedules"):
        return import_module(f"byov.{name}")
    raise AttributeError(f"module 'byov' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
