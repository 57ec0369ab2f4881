"""A device without memory: tensors on it have shapes and no numbers, and every wait for it is recorded.

An operation on tensors of two devices fails, as on a GPU. What a GPU would have to wait for (a number read by Python, a
copy to the CPU, a count of selected rows, a blocking copy from the CPU) is recorded with the line that asks for it.

    python tests/fake_accelerator.py     # in a process of its own: torch registers the device for good
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import tiny
from byov.config import Config, Model, Optim, Posterior
from byov.training.learners import Batch, build_learner
from byov.training.optimizers.build import build_optimizer
from byov.training.resolve import resolve
from byov.training.step import training_step

NAME = "npy"
torch.utils.rename_privateuse1_backend(NAME)
DEVICE = torch.device(f"{NAME}:0")
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique")


class Accelerator(TorchDispatchMode):
    """Runs operations on the device without numbers, those on the CPU as always."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        there = any(_there(value) for value in torch.utils._pytree.tree_leaves((args, kwargs)))
        to = kwargs.get("device")
        if not there and (to is None or to.type != NAME):
            return func(*args, **kwargs)
        if name in WAITS or (name == "aten::index" and any(_mask(index) for index in args[1])):
            self.wait(name)
            return 1.0 if args[0].is_floating_point() else 1
        if name == "aten::_to_copy" and to is not None and (to.type == "cpu" or not there):
            if to.type == "cpu" or not kwargs.get("non_blocking"):
                self.wait(f"{name} to {to}")
            dtype = kwargs.get("dtype") or args[0].dtype
            if to.type == "cpu":
                return torch.ones(args[0].shape, dtype=dtype)
            with FAKE:
                return torch.empty(args[0].shape, dtype=dtype, device=to)
        if "generator" in kwargs:
            kwargs["generator"] = None
        with FAKE:
            return func(*args, **kwargs)

    def wait(self, what: str) -> None:
        lines = [frame for frame in traceback.extract_stack() if "/byov/" in frame.filename]
        self.waits.append(f"{what} in {lines[-1].filename.partition('/byov/')[2]}: {lines[-1].line}" if lines else what)


def _there(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.device.type == NAME)


def _mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and _there(index)


def register() -> None:
    """Make the device known to torch."""
    _setup_privateuseone_for_python_backend(NAME)  # renames it again, which is allowed
    module = getattr(torch, NAME)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.manual_seed_all = lambda seed: None
    module._is_in_bad_fork = lambda: False
    generator = torch.Generator
    torch.Generator = lambda device="cpu": generator()  # type: ignore[misc, assignment]


@contextmanager
def moved() -> Iterator[None]:
    """`Module.to` replaces parameters and buffers by ones on the device."""

    def to(self: nn.Module, *_: object) -> nn.Module:
        with FAKE:
            for module in self.modules():
                for name, p in module._parameters.items():
                    if p is not None:
                        fake = torch.empty(p.shape, dtype=p.dtype, device=DEVICE)
                        module._parameters[name] = nn.Parameter(fake, p.requires_grad)
                for name, b in module._buffers.items():
                    if b is not None:
                        module._buffers[name] = torch.empty(b.shape, dtype=b.dtype, device=DEVICE)
        return self

    with mock.patch.object(nn.Module, "to", to):
        yield


def images(*shape: int) -> Tensor:
    with FAKE:
        return torch.empty(shape, dtype=torch.uint8, device=DEVICE)


def step(config: Config, channels: int = 1) -> list[str]:
    """Make two whole training steps; return what the second one waits for."""
    config = resolve(config, (channels, 8, 8), 24, flips=True)
    with Accelerator() as device:
        with moved():
            learner = build_learner(config, (channels, 8, 8), 3)
        optimizer = build_optimizer(learner.posterior, config.optim)
        for number in range(2):
            device.waits.clear()
            with FAKE:
                labels = torch.empty(8, dtype=torch.int64, device=DEVICE)
            batch = Batch(images(8, channels, 8, 8), torch.arange(8), labels, 0)
            report = training_step(learner, optimizer, [batch], config, number, 10)
            assert report is not None
        return list(device.waits)


RESNET = Model("resnet-18", width=4, stem="cifar", norm="batch", head_hidden=16, head_output=8)
CASES: dict[str, Callable[[], list[str]]] = {
    "byov": lambda: step(tiny.config()),
    "byov, colour, clipped": lambda: step(tiny.config(optim=replace(tiny.config().optim, clip=1.0)), channels=3),
    "byov, teacher_moments": lambda: step(tiny.config(posterior=Posterior(prior="teacher_moments"))),
    "byov, flipout": lambda: step(tiny.config(posterior=Posterior(draw="flipout"))),
    "byov, resnet": lambda: step(tiny.config(model=RESNET), channels=3),
    "byol": lambda: step(tiny.config("byol")),
    "byol, LARS": lambda: step(tiny.config("byol", optim=Optim(epochs=2, batch_size=8, optimizer="lars", lr=0.2))),
    "supervised-bbb": lambda: step(tiny.config("supervised-bbb")),
}

if __name__ == "__main__":
    register()
    found = {}
    for name in sys.argv[1:] or CASES:
        try:
            found[name] = CASES[name]()
        except Exception:  # the test shows it
            found[name] = [traceback.format_exc()]
    print(json.dumps(found))
