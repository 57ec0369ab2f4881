"""byov: Bootstrap Your Own Variance. Images without labels in, an encoder that knows what it does not know out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from byov import metrics, priors, schedules
    from byov.evaluation.run import load
    from byov.posterior import Posterior

__version__ = "0.2.0"
__all__ = ["Posterior", "load", "metrics", "priors", "schedules"]

# Loaded on first use, so that `import byov` and `byov --help` do not wait for torch.
_HOMES = {"Posterior": "byov.posterior", "load": "byov.evaluation.run"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"byov.{name}")
    raise AttributeError(f"module 'byov' has no attribute {name!r}")
