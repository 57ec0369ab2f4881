"""The examples in the docstrings of the public API run, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

from byov import metrics, posterior, schedules

PACKAGES = (metrics, posterior)
MODULES = [
    schedules.__name__,
    *(f"{package.__name__}.{module.name}" for package in PACKAGES for module in pkgutil.iter_modules(package.__path__)),
]
PUBLIC = {
    **{name: getattr(metrics, name) for name in metrics.__all__ if inspect.isfunction(getattr(metrics, name))},
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name: str) -> None:
    doc = inspect.getdoc(PUBLIC[name]) or ""
    assert "Examples:" in doc and ">>>" in doc
    assert not inspect.signature(PUBLIC[name]).parameters or "Args:" in doc
