"""The examples in the docstrings of the public API run, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

from byov import metrics, posterior, schedules
from byov.posterior import Posterior, Prediction, Prior, priors

PACKAGES = (metrics, posterior)
MODULES = [
    schedules.__name__,
    *(f"{package.__name__}.{module.name}" for package in PACKAGES for module in pkgutil.iter_modules(package.__path__)),
]
FUNCTIONS = [
    *(getattr(metrics, name) for name in metrics.__all__),
    *(getattr(schedules, name) for name in ("half_cosine", "beta", "tau", "learning_rate", "log_variance_rate")),
    *(getattr(Posterior, name) for name in ("sampled", "predict", "kl", "reuse_gradients", "snr", "unwrapped", "part")),
    *(Posterior.save, Posterior.load, priors.add_kl),
]
CLASSES = [Posterior, Prediction, Prior, metrics.Predictive, priors.Gaussian, *priors.Gaussian.__subclasses__()]
PUBLIC = {each.__qualname__: each for each in (*filter(inspect.isfunction, FUNCTIONS), *CLASSES)}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name]) or ""
    assert "Examples:" in doc and ">>>" in doc
    if inspect.isfunction(PUBLIC[name]):
        assert set(inspect.signature(PUBLIC[name]).parameters) <= {"self"} or "Args:" in doc
