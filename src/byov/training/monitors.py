"""Label-free monitors of training: collapse, effective rank, sigma and SNR per layer, memory, the source of a NaN."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov.posterior import Posterior

COLLAPSED_STD = 0.05


@torch.no_grad()
def feature_std(features: Tensor) -> float:
    """Measure the spread of directions: 1 if unit features are isotropic, 0 if all are equal (SimSiam's check)."""
    unit = F.normalize(features.float(), dim=1)
    return float(unit.std(dim=0, correction=0).mean() * unit.shape[1] ** 0.5)


@torch.no_grad()
def effective_rank(features: Tensor) -> float:
    """Compute exp(entropy) of the spectrum of the centred features: the number of directions in use."""
    features = features.cpu().double()
    centred = features - features.mean(dim=0)
    spectrum = torch.linalg.svdvals(centred)
    if spectrum.sum() == 0:
        return 0.0
    p = spectrum / spectrum.sum()
    return float(torch.exp(-torch.special.xlogy(p, p).sum()))


def collapse_warning(projection_std: float, step: int) -> str | None:
    """Return a warning if all images are projected onto nearly the same direction."""
    if projection_std >= COLLAPSED_STD:
        return None
    return (
        f"the representation is collapsing at step {step}: all images have nearly the same projection (std "
        f"{projection_std:.3f}, 1 is healthy). Lower optim.lr, raise optim.tau, or set model.head_norm to batch."
    )


@torch.no_grad()
def layer_statistics(posterior: Posterior, balance: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """Summarise sigma and SNR of every random parameter, over the weights that are not pruned."""
    rows = []
    sigmas, ratios = posterior.segments.named(posterior.sigma), posterior.snr()
    for k, segment in enumerate(posterior.segments):
        sigma, snr = sigmas[segment.name], ratios[segment.name]
        if bool((left := sigma > 0).any()):
            sigma, snr = sigma[left], snr[left]
        rows.append(
            {
                "layer": segment.name,
                "weights": sigma.numel(),
                "sigma_mean": float(sigma.mean()),
                "sigma_median": float(sigma.median()),
                "sigma_max": float(sigma.max()),
                "snr_mean": float(snr.mean()),
                "snr_max": float(snr.max()),
                **({} if balance is None else {"balance": balance[k]}),
            }
        )
    return rows


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: of the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would also count the peak of the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


@torch.no_grad()
def first_bad_parameter(posterior: Posterior) -> str | None:
    """Return the name of the first parameter with a NaN or infinity in its values or gradient."""
    flats = [posterior.means, posterior.log_variances, posterior.means.grad, posterior.log_variances.grad]
    for segment in posterior.segments:
        if any(f is not None and not f[segment.offset : segment.stop].isfinite().all() for f in flats):
            return segment.name
    for name, parameter in posterior.module.named_parameters():
        if not all(t.isfinite().all() for t in (parameter, parameter.grad) if t is not None):
            return name
    return None


@torch.no_grad()
def lost_noise(posterior: Posterior, masks: Mapping[str, Tensor]) -> bool:
    """Return whether a sigma is exactly 0 although its weight is not pruned."""
    pruned = sum((~masks[segment.name]).sum() for segment in posterior.segments if segment.name in masks)
    return bool((posterior.sigma == 0).sum() > pruned)


class FirstBadOutput:
    """A context that records the first submodule whose output is not finite."""

    def __init__(self, module: nn.Module) -> None:
        self.name: str | None = None
        self._handles = [
            child.register_forward_hook(self._watch(name)) for name, child in module.named_modules() if name
        ]

    def _watch(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.name is None and isinstance(output, Tensor) and not output.isfinite().all():
                self.name = name

        return hook

    def __enter__(self) -> FirstBadOutput:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
