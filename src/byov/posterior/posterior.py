"""A Gaussian over the parameters of any nn.Module: q(w) = N(mean, diag(sigma^2)), sigma = exp(log_variance / 2).

    posterior = Posterior(module)
    with posterior.sampled(generator=g):
        loss = loss_of(posterior(x)) + posterior.kl(priors.Standard()) / number_of_images
    loss.backward()

Means and log-variances are two flat parameters. A draw is one pass over them into one flat buffer, whose slices the
module shows as its weights. Autograd sees the draw as a single operation: its gradient is written by formula, since
d w / d mean = 1 and d w / d log_variance = (w - mean) / 2; neither the noise nor sigma is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from byov._compiled import fused
from byov._core import randomness
from byov._core.errors import BadInput
from byov._core.threads import keep_freed_memory
from byov.posterior.flipout import flipped
from byov.posterior.segments import Flattened, Where, untied

FORMAT = "byov-posterior-1"
SPARES = 2  # buffers kept for coming draws (one a view, where each view has its own draw), and for gradients


class Prior(Protocol):
    """What `Posterior.kl` asks of a prior: a user's own needs no more than this."""

    def kl(self, means: Tensor, log_variances: Tensor) -> Tensor:
        """KL[q || prior], a differentiable scalar."""
        ...


class Prediction(NamedTuple):
    """Mean and standard deviation of an output over draws."""

    mean: Tensor
    std: Tensor


def draw_(out: Tensor, means: Tensor, log_variances: Tensor, seed: int) -> Tensor:
    """Writes one draw, mean + sigma * noise, into `out`; on a CPU in one pass over memory."""
    if fused.fits(out, means, log_variances):
        keep_freed_memory()
        return fused.draw_(out, means, log_variances, seed)
    return randomness.normal_(out, seed).mul_(torch.exp(log_variances * 0.5)).add_(means)


def _to_log_variances(out: Tensor, weights: Tensor, means: Tensor, gradient: Tensor) -> Tensor:
    """Writes (weight - mean) / 2 * gradient into `out`."""
    if fused.fits(out, weights, means, gradient):
        return fused.to_log_variances_(out, weights, means, gradient)
    return torch.sub(weights, means, out=out).mul_(gradient).mul_(0.5)


def _sample(means: Tensor) -> Tensor:
    """A few of the means: torch's fused optimizers change them without counting up their version."""
    return means.detach()[:: max(1, means.numel() // 16)].clone()


class _Draw(torch.autograd.Function):
    """(means, log_variances) -> the drawn weights, shaped."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, log_variances: Tensor, posterior: Posterior, seed: int) -> tuple[Tensor, ...]:
        weights = draw_(posterior._lend(posterior._spares), means, log_variances, seed)
        # Kept on ctx, not by save_for_backward: accumulated micro-batches go back through one draw several times.
        ctx.posterior, ctx.means, ctx.weights = posterior, means, weights
        ctx.versions, ctx.sample = (means._version, weights._version), _sample(means)
        ctx.set_materialize_grads(False)
        return tuple(posterior.segments.views(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        means, weights = ctx.means, ctx.weights
        changed = not torch.allclose(ctx.sample, _sample(means), rtol=0, atol=0, equal_nan=True)
        if changed or ctx.versions != (means._version, weights._version):
            raise RuntimeError("backward after the means changed or another draw was made: call backward() first.")
        posterior, spares = ctx.posterior, ctx.posterior._spare_gradients
        to_means = posterior.segments.gather(grads, posterior._lend(spares))
        to_log_variances = _to_log_variances(posterior._lend(spares), weights, means, to_means)
        posterior._give_back(weights, posterior._spares)
        return to_means, to_log_variances, None, None


class Posterior(Flattened):
    """A Gaussian over the chosen parameters of `module`; what is not chosen stays in the module, trainable as usual.

    Args:
        module: any nn.Module; its chosen parameters are moved into `means`.
        where: which parameters are random: "all", "no_conv", "linear", "none", or a function(module, name) -> bool.
            Frozen parameters never are.
        init_log_variance: initial log-variance of every random weight.
    """

    log_variances: nn.Parameter

    def __init__(self, module: nn.Module, where: Where = "all", init_log_variance: float = -10.0) -> None:
        super().__init__(module, where)
        self.log_variances = nn.Parameter(torch.full_like(self.means, init_log_variance))
        self._spares: list[Tensor] = []  # of draws: still read by whoever goes back through the last draw again
        self._spare_gradients: list[Tensor] = []
        self._sampling = False

    # ------------------------------------------------------------------------------------------------- forward, draws

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module at its means, or within `sampled` at the draw."""
        if self._sampling or not (torch.is_grad_enabled() and self.means.requires_grad and len(self.segments)):
            return self.module(*args, **kwargs)
        self.segments.show(self.segments.views(self.means))  # with a gradient to the means
        try:
            return self.module(*args, **kwargs)
        finally:
            self.rest()

    @contextmanager
    def sampled(
        self, generator: torch.Generator | None = None, *, flipout: bool | torch.Generator = False
    ) -> Iterator[Self]:
        """One draw of the weights for the block; the means are back after it.

        `backward` works inside or after the block, until the next draw. The noise depends on the generator's state
        alone, not on the number of threads. With `flipout`, each image sees the draw under random signs of its own
        (from this generator, if one is given: several blocks may then share a draw, but not the signs).
        """
        if self._sampling:
            raise RuntimeError("already inside `sampled`: leave that block before making another draw.")
        device = generator.device if generator is not None else torch.device("cpu")
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        weights: Tensor | None = None
        if torch.is_grad_enabled() and (self.means.requires_grad or self.log_variances.requires_grad):
            shown = list(_Draw.apply(self.means, self.log_variances, self, seed))  # type: ignore[no-untyped-call]
        else:
            weights = draw_(self._lend(self._spares), self.means.detach(), self.log_variances.detach(), seed)
            shown = self.segments.views(weights)
        self.segments.show(shown)
        self._sampling = True
        try:
            if isinstance(flipout, bool):
                signs = randomness.generator(seed, 1, device=self.means.device) if flipout else None
            else:
                signs = flipout
            with nullcontext() if signs is None else flipped(self._mean_weights(), signs):
                yield self
        finally:
            self._sampling = False
            self.rest()
            if weights is not None:
                self._give_back(weights, self._spares)

    @torch.no_grad()
    def predict(self, x: Tensor, draws: int, generator: torch.Generator | None = None) -> Prediction:
        """Mean and standard deviation of the output over draws; each draw passes all of `x`. Memory: flat in draws."""
        if draws < 1:
            raise ValueError(f"draws={draws}: at least one is needed.")
        mean = square = torch.zeros(())
        for k in range(1, draws + 1):
            with self.sampled(generator=generator):
                output = self(x)
            delta = output - mean  # Welford's update
            mean = mean + delta / k
            square = square + delta * (output - mean)
        return Prediction(mean, (square / max(draws - 1, 1)).clamp_(min=0).sqrt_())

    def kl(self, prior: Prior) -> Tensor:
        """KL[q || prior], summed over the random weights; a differentiable float32 scalar (float64 for float64)."""
        return prior.kl(self.means, self.log_variances)

    # ------------------------------------------------------------------------------------------------ what is learned

    def reuse_gradients(self) -> None:
        """As `zero_grad`, but what held the flat gradients will hold the next ones: keep no reference to them.

        Fresh memory costs page faults: at 21M weights 4 ns a weight and step, as much as the noise.
        """
        flat = [p.grad for p in (self.means, self.log_variances) if p.grad is not None]
        self.zero_grad()
        for gradient in flat:
            self._give_back(gradient, self._spare_gradients)

    @property
    def sigma(self) -> Tensor:
        """The standard deviations, flat."""
        return (self.log_variances.detach() * 0.5).exp_()

    @torch.no_grad()
    def snr(self) -> dict[str, Tensor]:
        """Signal-to-noise ratio |mean| / sigma of every random weight, by parameter name."""
        least = torch.finfo(self.means.dtype).tiny  # a pruned weight has sigma 0, and mean 0
        return self.segments.named(self.means.detach().abs() / self.sigma.clamp_(min=least))

    def unwrapped(self) -> nn.Module:
        """A copy of the module as it would be had it never been wrapped: random weights at their means."""
        return self._unwrapped_twin().module

    def _unwrapped_twin(self) -> Posterior:
        twin = copy.deepcopy(self)
        parameters = [nn.Parameter(view.clone()) for view in twin.segments.views(twin.means.detach())]
        for owner, attribute, index in twin.segments.slots:
            delattr(owner, attribute)
            owner.register_parameter(attribute, parameters[index])
        return twin

    def part(self, name: str) -> Posterior:
        """A posterior over one submodule: a copy of its module, means and log-variances."""
        twin = self._unwrapped_twin()
        module = twin.module.get_submodule(name)
        inside = set(module.modules())
        random = {(owner, attribute): index for owner, attribute, index in twin.segments.slots if owner in inside}
        part = (
            Posterior(module, where=lambda m, attribute: (m, attribute) in random)
            if random
            else Posterior(module, "none")
        )
        with torch.no_grad():
            own, whole = part.segments.views(part.log_variances), self.segments.views(self.log_variances)
            for owner, attribute, index in part.segments.slots:
                own[index].copy_(whole[random[owner, attribute]])
        return part

    # -------------------------------------------------------------------------------------------------- save and load

    def flats(self) -> dict[str, Tensor]:
        return super().flats() | {"log_variance": self.log_variances.detach()}

    def save(self, path: str | Path) -> None:
        """Writes the posterior as safetensors."""
        save_file(untied(self.tensors()), str(path), metadata={"format": FORMAT})

    def load(self, path: str | Path) -> Self:
        """Reads what `save` wrote, into a posterior over the same kind of module."""
        try:
            with safe_open(str(path), framework="pt") as file:
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise BadInput(f"{path} is not a saved posterior; give a file that Posterior.save wrote.")
                self.load_tensors({name: file.get_tensor(name) for name in file.keys()}, str(path))  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise BadInput(f"cannot read {path} ({error}); give a file that Posterior.save wrote.") from error
        return self

    # ------------------------------------------------------------------------------------------------------- plumbing

    def _mean_weights(self) -> dict[nn.Module, Tensor]:
        views = self.segments.views(self.means)
        return {owner: views[index] for owner, name, index in self.segments.slots if name == "weight"}

    def _lend(self, spares: list[Tensor]) -> Tensor:
        """A flat buffer: one that an earlier draw or gradient no longer needs, or a new one."""
        return spares.pop() if spares else torch.empty_like(self.means.detach())

    def _give_back(self, flat: Tensor, spares: list[Tensor]) -> None:
        fits = flat.dtype == self.means.dtype and flat.device == self.means.device and not flat.is_inference()
        if fits and len(spares) < SPARES and not any(spare is flat for spare in spares):
            spares.append(flat)

    def _let_go(self) -> None:
        self._spares.clear()
        self._spare_gradients.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._let_go()  # they are of the old device and dtype
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(self._spares): [], id(self._spare_gradients): []}  # a copy needs none of them
        return super().__deepcopy__(memo)

    def extra_repr(self) -> str:
        return f"{self.segments.numel:,} random weights in {len(self.segments)} parameters"
