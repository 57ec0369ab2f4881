"""Import torchvision in a way that also works with a CPU build of torch."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

# Referenced for the whole process: a schema is withdrawn when the library that declared it is collected.
_DECLARED: list[torch.library.Library] = []
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def import_torchvision() -> ModuleType:
    """Import torchvision with its transforms; ImportError if it is not installed.

    The wheels of the default index are built for CUDA. With a CPU build of torch their C++ library does not load, and
    the import then fails when it registers fake kernels for two operators that this library would have declared.
    Declaring their schemas first is enough: nothing here calls them, and the transforms are plain torch code.
    """
    try:
        return _transforms()
    except RuntimeError:  # "operator torchvision::nms does not exist"
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
                library.define(schema)  # type: ignore[no-untyped-call]
                _DECLARED.append(library)
        return _transforms()


def _transforms() -> ModuleType:
    importlib.import_module("torchvision.transforms.v2.functional")
    return importlib.import_module("torchvision")
