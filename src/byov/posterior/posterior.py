"""A Gaussian over the parameters of any nn.Module: q(w) = N(mean, diag(sigma^2)), sigma = exp(log_variance / 2).

Means and log-variances are two flat parameters. A draw is one pass over them into one flat buffer, whose slices become
the weights of the module. Autograd sees the draw as a single operation with a closed-form gradient, since
d w / d mean = 1 and d w / d log_variance = (w - mean) / 2; neither the noise nor sigma is stored.
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
SPARES = 2  # buffers reused by later draws (one per view, if each view has its own draw), and as many by gradients


class Prior(Protocol):
    """The interface of a prior: a custom one needs only this method.

    Examples:
        >>> import math, torch
        >>> from byov.posterior import Posterior
        >>> class Wide:  # N(0, 4 I)
        ...     def kl(self, means, log_variances):
        ...         second_moments = log_variances.exp() + means**2
        ...         return (second_moments / 4 - 1 - log_variances + math.log(4)).sum() / 2
        >>> Posterior(torch.nn.Linear(2, 1)).kl(Wide()).requires_grad
        True
    """

    def kl(self, means: Tensor, log_variances: Tensor) -> Tensor:
        """Return KL[q || prior], a differentiable scalar."""
        ...


class Prediction(NamedTuple):
    """Mean and standard deviation of an output over draws, as returned by `Posterior.predict`.

    Examples:
        >>> import torch
        >>> from byov.posterior import Posterior
        >>> mean, std = Posterior(torch.nn.Linear(2, 1)).predict(torch.zeros(5, 2), draws=4)
        >>> mean.shape == std.shape == (5, 1)
        True
    """

    mean: Tensor
    """Mean over draws, in the shape of the output."""
    std: Tensor
    """Standard deviation over draws; 0 for a single draw."""


def draw_(out: Tensor, means: Tensor, log_variances: Tensor, seed: int) -> Tensor:
    """Write one draw, mean + sigma * noise, into `out`; on a CPU in one pass over memory."""
    if fused.fits(out, means, log_variances):
        keep_freed_memory()
        return fused.draw_(out, means, log_variances, seed)
    return randomness.normal_(out, seed).mul_(torch.exp(log_variances * 0.5)).add_(means)


def _to_log_variances(out: Tensor, weights: Tensor, means: Tensor, gradient: Tensor) -> Tensor:
    """Write (weight - mean) / 2 * gradient into `out`."""
    if fused.fits(out, weights, means, gradient):
        return fused.to_log_variances_(out, weights, means, gradient)
    return torch.sub(weights, means, out=out).mul_(gradient).mul_(0.5)


def _sample(means: Tensor) -> Tensor:
    """Copy a few of the means: torch's fused optimizers change them without raising their version."""
    return means.detach()[:: max(1, means.numel() // 16)].clone()


class _Draw(torch.autograd.Function):
    """Map (means, log_variances) to the drawn weights, shaped."""

    @staticmethod
    def forward(ctx: Any, means: Tensor, log_variances: Tensor, posterior: Posterior, seed: int) -> tuple[Tensor, ...]:
        weights = draw_(posterior._lend(posterior._spares), means, log_variances, seed)
        # Stored on ctx, not by save_for_backward: accumulated micro-batches backpropagate through one draw repeatedly.
        ctx.posterior, ctx.means, ctx.weights = posterior, means, weights
        ctx.versions, ctx.sample = (means._version, weights._version), _sample(means)
        ctx.set_materialize_grads(False)
        return tuple(posterior.segments.views(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        means, weights = ctx.means, ctx.weights
        on_cpu = means.device.type == "cpu"  # elsewhere, to look is to wait for the device
        changed = on_cpu and not torch.allclose(ctx.sample, _sample(means), rtol=0, atol=0, equal_nan=True)
        if changed or ctx.versions != (means._version, weights._version):
            raise RuntimeError("backward after the means changed or another draw was made: call backward() first.")
        posterior, spares = ctx.posterior, ctx.posterior._spare_gradients
        to_means = posterior.segments.gather(grads, posterior._lend(spares))
        to_log_variances = _to_log_variances(posterior._lend(spares), weights, means, to_means)
        posterior._give_back(weights, posterior._spares)
        return to_means, to_log_variances, None, None


class Posterior(Flattened):
    """Wrap a module in a Gaussian posterior over its parameters.

    The code of the module does not change. Calling the posterior runs the module at its means; inside `sampled` it runs
    at one draw. Parameters that are not random stay in the module, trainable as usual.

    Args:
        module: Any nn.Module; its random parameters are moved into `means`.
        where: Which parameters are random: "all", "no_conv", "linear", "none", or a function(module, name) -> bool.
            Frozen parameters never are.
        init_log_variance: Initial log-variance of every random weight.

    Attributes:
        means: The means as one flat parameter.
        log_variances: The log-variances as one flat parameter.
        segments: The slice of each parameter in them: name, offset, shape, kind.

    Raises:
        BadInput: If the module is a posterior already, or contains one.
        ValueError: If no trainable parameter is chosen, or the chosen ones differ in dtype or device.

    Examples:
        >>> import torch
        >>> from byov import Posterior, priors
        >>> posterior = Posterior(torch.nn.Linear(4, 2))
        >>> optimizer = torch.optim.Adam(posterior.parameters())
        >>> x, y, images = torch.randn(8, 4), torch.randn(8, 2), 1000
        >>> with posterior.sampled():
        ...     loss = (posterior(x) - y).square().mean() + posterior.kl(priors.Standard()) / images
        >>> loss.backward()
        >>> optimizer.step()
    """

    log_variances: nn.Parameter

    def __init__(self, module: nn.Module, where: Where = "all", init_log_variance: float = -10.0) -> None:
        if any(isinstance(inner, Posterior) for inner in module.modules()):
            raise BadInput("the module already has a posterior: use that one, or wrap what its unwrapped() returns.")
        super().__init__(module, where)
        self.log_variances = nn.Parameter(torch.full_like(self.means, init_log_variance))
        self._spares: list[Tensor] = []  # of draws: a second backward through the last draw still reads them
        self._spare_gradients: list[Tensor] = []
        self._sampling = False

    # ------------------------------------------------------------------------------------------------- forward, draws

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module at its means, or inside `sampled` at the draw."""
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
        """Use one draw of the weights inside the block; the means are restored after it, also on an error.

        `backward` works inside or after the block, until the next draw. The noise depends only on the generator's
        state, not on the number of threads.

        Args:
            generator: Source of the noise; unset: torch's global generator.
            flipout: Flip the draw's signs per image (Wen et al., 2018). A generator here sets the signs, so that
                several blocks may share a draw but not the signs.

        Yields:
            This posterior.

        Raises:
            RuntimeError: If a draw is already in use.

        Examples:
            >>> import torch
            >>> from byov import Posterior
            >>> posterior, x = Posterior(torch.nn.Linear(4, 2), init_log_variance=-2.0), torch.ones(1, 4)
            >>> with posterior.sampled(generator=torch.Generator().manual_seed(0)):
            ...     drawn = posterior(x)
            >>> torch.equal(drawn, posterior(x))
            False
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
        """Compute mean and standard deviation of the output over draws, in constant memory.

        Args:
            x: Input of the module; each draw sees all of it.
            draws: Number of draws.
            generator: Source of the noise; unset: torch's global generator.

        Returns:
            Mean and standard deviation, in the shape of the output.

        Raises:
            ValueError: If `draws` is below 1.

        Examples:
            >>> import torch
            >>> from byov import Posterior
            >>> prediction = Posterior(torch.nn.Linear(4, 2)).predict(torch.ones(3, 4), draws=8)
            >>> prediction.std.shape
            torch.Size([3, 2])
        """
        if draws < 1:
            raise ValueError(f"draws={draws}: give at least 1.")
        mean = square = torch.zeros(())
        for k in range(1, draws + 1):
            with self.sampled(generator=generator):
                output = self(x)
            delta = output - mean  # Welford's update
            mean = mean + delta / k
            square = square + delta * (output - mean)
        return Prediction(mean, (square / max(draws - 1, 1)).clamp_(min=0).sqrt_())

    def kl(self, prior: Prior) -> Tensor:
        """Compute KL[q || prior], summed over the random weights.

        Args:
            prior: One of `byov.priors`, or any object with `kl(means, log_variances)`.

        Returns:
            A differentiable scalar in float32 (float64 for float64 weights).

        Examples:
            >>> import torch
            >>> from byov import Posterior, priors
            >>> posterior = Posterior(torch.nn.Linear(1, 1), init_log_variance=0.0)
            >>> _ = torch.nn.init.zeros_(posterior.means)
            >>> posterior.kl(priors.Standard()).item()  # q equals the prior
            0.0
        """
        return prior.kl(self.means, self.log_variances)

    # ------------------------------------------------------------------------------------------------ what is learned

    def reuse_gradients(self) -> None:
        """Clear gradients as `zero_grad` does, but reuse their memory for the next ones: keep no reference to them.

        New memory costs page faults: at 21M weights 4 ns per weight and step, as much as the noise.

        Examples:
            >>> import torch
            >>> from byov import Posterior
            >>> posterior = Posterior(torch.nn.Linear(4, 2))
            >>> posterior(torch.ones(1, 4)).sum().backward()
            >>> posterior.reuse_gradients()
            >>> posterior.means.grad is None
            True
        """
        flat = [p.grad for p in (self.means, self.log_variances) if p.grad is not None]
        self.zero_grad()
        for gradient in flat:
            self._give_back(gradient, self._spare_gradients)

    @property
    def sigma(self) -> Tensor:
        """The standard deviations of the random weights, flat."""
        return (self.log_variances.detach() * 0.5).exp_()

    @torch.no_grad()
    def snr(self) -> dict[str, Tensor]:
        """Compute the signal-to-noise ratio |mean| / sigma of every random weight.

        Returns:
            Parameter name -> tensor in the shape of the parameter.

        Examples:
            >>> import torch
            >>> from byov import Posterior
            >>> {name: tuple(ratio.shape) for name, ratio in Posterior(torch.nn.Linear(4, 2)).snr().items()}
            {'weight': (2, 4), 'bias': (2,)}
        """
        least = torch.finfo(self.means.dtype).tiny  # a pruned weight has sigma 0 and mean 0
        return self.segments.named(self.means.detach().abs() / self.sigma.clamp_(min=least))

    def unwrapped(self) -> nn.Module:
        """Copy the plain module, as it was before wrapping, with its weights at the means.

        Returns:
            A module of the original class, with ordinary parameters.

        Examples:
            >>> import torch
            >>> from byov import Posterior
            >>> posterior, x = Posterior(torch.nn.Linear(4, 2)), torch.ones(1, 4)
            >>> plain = posterior.unwrapped()
            >>> type(plain).__name__, torch.equal(plain(x), posterior(x))
            ('Linear', True)
        """
        return self._unwrapped_twin().module

    def _unwrapped_twin(self) -> Posterior:
        twin = copy.deepcopy(self)
        parameters = [nn.Parameter(view.clone()) for view in twin.segments.views(twin.means.detach())]
        for owner, attribute, index in twin.segments.slots:
            delattr(owner, attribute)
            owner.register_parameter(attribute, parameters[index])
        return twin

    def part(self, name: str) -> Posterior:
        """Copy the posterior of one submodule: its module, means and log-variances.

        Args:
            name: Name of the submodule, as in `nn.Module.get_submodule`.

        Returns:
            A new posterior; a submodule without random parameters stays deterministic.

        Raises:
            AttributeError: If there is no such submodule.

        Examples:
            >>> import torch
            >>> from byov import Posterior
            >>> posterior = Posterior(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
            >>> posterior.part("1").segments.numel
            8
        """
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
        """Write the posterior to a safetensors file.

        Args:
            path: File to write.

        Examples:
            >>> import tempfile, torch
            >>> from byov import Posterior
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Posterior(torch.nn.Linear(4, 2)).save(f"{folder}/posterior.safetensors")
        """
        save_file(untied(self.tensors()), str(path), metadata={"format": FORMAT})

    def load(self, path: str | Path) -> Self:
        """Read a file written by `save` into a posterior over the same kind of module.

        Args:
            path: File to read.

        Returns:
            This posterior.

        Raises:
            BadInput: If the file is not a saved posterior, or belongs to another model.

        Examples:
            >>> import tempfile, torch
            >>> from byov import Posterior
            >>> first, second = (Posterior(torch.nn.Linear(4, 2)) for _ in range(2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     first.save(f"{folder}/posterior.safetensors")
            ...     _ = second.load(f"{folder}/posterior.safetensors")
            >>> torch.equal(first.means, second.means)
            True
        """
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
        """Return a flat buffer: one that an earlier draw or gradient no longer needs, or a new one."""
        return spares.pop() if spares else torch.empty_like(self.means.detach())

    def _give_back(self, flat: Tensor, spares: list[Tensor]) -> None:
        fits = flat.dtype == self.means.dtype and flat.device == self.means.device and not flat.is_inference()
        if fits and len(spares) < SPARES and not any(spare is flat for spare in spares):
            spares.append(flat)

    def _let_go(self) -> None:
        self._spares.clear()
        self._spare_gradients.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._let_go()  # they have the old device and dtype
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(self._spares): [], id(self._spare_gradients): []}  # a copy needs none of them
        return super().__deepcopy__(memo)

    def extra_repr(self) -> str:
        return f"{self.segments.numel:,} random weights in {len(self.segments)} parameters"
