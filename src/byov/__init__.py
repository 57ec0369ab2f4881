"""byov: Bootstrap Your Own Variance. Images without labels in, an encoder that knows what it does not know out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from byov import metrics, schedules
    from byov.inference.load import load
    from byov.posterior import Posterior, priors

__version__ = "0.2.0"
__all__ = ["Posterior", "load", "metrics", "priors", "schedules"]

# Loaded on first use, so that `import byov` and `byov --help` do not wait for torch.
_HOMES = {"Posterior": "byov.posterior", "load": "byov.inference.load"}
_MODULES = {"metrics": "byov.metrics", "priors": "byov.posterior.priors", "schedules": "byov.schedules"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise AttributeError(f"module 'byov' has no attribute {name!r}")
