"""Which weights are pruned: a score for every weight, and masks that drop the lowest (True: not pruned).

Prunable are the weights of Linear layers and convolutions (segments of kind `weight`): 98% of a ViT. Biases, norms,
positions and tokens stay; only whole units (structured.py) take their biases and norms with them. Frozen stages stay
too: they have no variance, so that all scores rank the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from byov._core.errors import BadInput
from byov._core.randomness import generator
from byov.posterior import Posterior
from byov.posterior.segments import kind_of
from byov.pruning import structured

By = Literal["snr", "magnitude", "variance", "random"]
Masks = Mapping[str, Tensor]

ALREADY = -1.0  # the score of pruned weights: below all others, which are never negative


@dataclass(frozen=True)
class Pruning:
    """How to prune.

    Raises:
        BadInput: If a value is out of its range, or two settings exclude each other.

    Example:
        >>> byov.Pruning("snr", 0.5).scope
        'layer'
    """

    by: By
    """The score: |mean| / sigma; |mean|; 1 / sigma (largest sigma first); or a random order."""
    sparsity: float
    """The share of the prunable weights that is pruned."""
    scope: Literal["layer", "global"] = "layer"
    """The lowest of each layer, or of all layers together."""
    part: Literal["encoder", "all"] = "encoder"
    """What is pruned: the encoder, or the heads as well."""
    structured: bool = False
    """Whole neurons, attention heads and channels instead of single weights."""
    rounds: int = 1
    """Number of rounds of pruning and training until the final sparsity."""
    epochs: int = 0
    """Epochs of training after each round."""
    seed: int = 0
    """Of the random order."""

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise BadInput(f"there is no score {self.by!r} to prune by: use one of {', '.join(get_args(By))}.")
        if not 0 < self.sparsity < 1:
            raise BadInput(f"--sparsity is the share of weights to prune, between 0 and 1, not {self.sparsity:g}.")
        if self.rounds < 1 or self.epochs < 0:
            raise BadInput("--rounds must be at least 1, and --epochs not negative.")
        if self.rounds > 1 and not self.epochs:
            raise BadInput("several rounds need training in between: give --epochs too, or leave out --rounds.")
        if self.structured and self.part == "all":
            raise BadInput("--structured is for the encoder: leave out --part all.")

    def sparsity_after(self, round: int, start: float) -> float:
        """Return the sparsity after a round (from 1 on): each prunes the same share of what is left."""
        return float(1 - (1 - start) * ((1 - self.sparsity) / (1 - start)) ** (round / self.rounds))


def choose_masks(posterior: Posterior, how: Pruning, sparsity: float, before: Masks) -> dict[str, Tensor]:
    """Return masks by parameter name that drop this share of the prunable weights, and all that was dropped before."""
    scores = weight_scores(posterior, how.by, how.part, before, how.seed)
    if how.structured:
        masks = structured.drop_units(posterior.module, scores, sparsity, how.scope)
    else:
        masks = drop_weights(scores, sparsity, how.scope)
    chosen = {name: mask.cpu() for name, mask in masks.items()}  # as in a checkpoint, whatever the run's device
    return dict(before) | {name: mask & before[name] if name in before else mask for name, mask in chosen.items()}


def weight_scores(
    posterior: Posterior,
    by: By,
    part: Literal["encoder", "all"] = "encoder",
    before: Masks | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Score every prunable weight, by parameter name; the lowest is pruned first."""
    means, sigmas = _prunable(posterior, part)
    if by in ("snr", "variance"):
        means = {name: mean for name, mean in means.items() if name in sigmas}
        if not means:
            raise BadInput(f"these weights have no variance to prune by {by}: use --by magnitude.")
    scores = {}
    for place, (name, mean) in enumerate(means.items()):
        if by == "random":
            score = torch.rand(mean.shape, generator=generator(seed, place)).to(mean.device)
        else:
            score = torch.ones_like(mean) if by == "variance" else mean.abs()
            score = score / sigmas[name] if by in ("snr", "variance") else score
        gone = None if before is None or name not in before else ~before[name].to(score.device)
        scores[name] = score if gone is None else score.masked_fill(gone, ALREADY)
    return scores


def _prunable(posterior: Posterior, part: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The prunable weights by name, and the standard deviations of the random ones."""
    prefix = "encoder." if part == "encoder" else ""
    names = [s.name for s in posterior.segments if s.kind == "weight" and s.name.startswith(prefix)]
    means = posterior.segments.named(posterior.means.detach())
    sigmas = posterior.segments.named(posterior.sigma)
    weights = {name: means[name] for name in names}
    for path, owner in posterior.module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{attribute}"
            if name.startswith(prefix) and kind_of(owner, attribute) == "weight" and parameter.requires_grad:
                weights[name] = parameter.detach()
    return weights, {name: sigmas[name] for name in names}


def drop_weights(scores: Masks, sparsity: float, scope: Literal["layer", "global"] = "layer") -> dict[str, Tensor]:
    """Return masks that drop the lowest share of each layer, or of all. Larger sparsities drop the same and more."""
    if scope == "layer":
        return {name: _highest(score.flatten(), sparsity).view(score.shape) for name, score in scores.items()}
    kept = _highest(torch.cat([score.flatten() for score in scores.values()]), sparsity)
    parts = torch.split(kept, [score.numel() for score in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def _highest(scores: Tensor, sparsity: float) -> Tensor:
    """Which scores are not among the lowest; of equal scores the first are dropped first."""
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept[scores.argsort(stable=True)[: round(sparsity * len(scores))]] = False
    return kept


def sparsity_of(masks: Masks, prunable: Mapping[str, Tensor]) -> float:
    """Return the share of these weights that the masks drop."""
    gone = sum(int((~masks[name]).sum()) for name in prunable if name in masks)
    return gone / max(1, sum(weight.numel() for weight in prunable.values()))


def prunable_weights(posterior: Posterior, part: Literal["encoder", "all"] = "encoder") -> dict[str, Tensor]:
    """Return the weights that can be pruned, at their means, by parameter name."""
    return _prunable(posterior, part)[0]
