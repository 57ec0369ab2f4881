"""The compiled loops against torch's own operations, number by number, and what must not matter to them."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from byov import priors
from byov._compiled import fused
from byov._core.randomness import CHUNK, chunk_generator
from byov.posterior.posterior import draw_


def reference_noise(size: int, seed: int) -> Tensor:
    chunks = [min(CHUNK, size - start) for start in range(0, size, CHUNK)]
    return torch.cat([torch.empty(n).normal_(generator=chunk_generator(seed, k)) for k, n in enumerate(chunks)])


def noise(size: int, seed: int) -> Tensor:
    return fused.draw_(torch.empty(size), torch.zeros(size), torch.zeros(size), seed)


# Around MT19937's 624 words, torch's groups of 16, a chunk, a span, and seeds that run over 32 bits.
SIZES = (16, 17, 100, 608, 623, 624, 625, 639, 640, 641, 1247, CHUNK - 1, CHUNK, CHUNK + 16, CHUNK + 17, 5 * CHUNK + 99)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 2**32 - 2, 2**61 + 12345])
def test_the_noise_is_that_of_torch(size: int, seed: int) -> None:
    torch.testing.assert_close(noise(size, seed), reference_noise(size, seed), rtol=1e-5, atol=2e-6)


@given(st.integers(1, 3000), st.integers(0, 2**62))
@settings(max_examples=40, deadline=None)
def test_noise_of_any_size_is_finite_and_begins_as_that_of_a_larger_one(size: int, seed: int) -> None:
    got = noise(size, seed)
    assert got.isfinite().all()
    sure = max(0, size - 16)  # the last 16 may be drawn again
    torch.testing.assert_close(got[:sure], noise(3000 + size, seed)[:sure], rtol=0, atol=0)


def test_a_last_chunk_of_less_than_sixteen_is_normal_too() -> None:
    # torch has another way for those; of 300 such chunks all numbers together are N(0, 1), and differ by seed
    tails = torch.cat([noise(CHUNK + 3, 7 * CHUNK * k)[CHUNK:] for k in range(300)])
    assert stats.kstest(tails.numpy(), "norm").pvalue > 1e-4 and tails.unique().numel() == 900


def test_noise_is_normal_and_independent_between_chunks_and_seeds() -> None:
    n = 8 * CHUNK
    first, second = noise(n, 1), noise(n, 2**20)
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-4
    assert abs(float(first.double().pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)
    rows = torch.cat([first.view(8, -1), second.view(8, -1), first.roll(1).view(8, -1)])
    correlation = torch.corrcoef(rows).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(CHUNK)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ALONE", 0)  # so few weights would stay on one thread
    g = torch.Generator().manual_seed(0)
    m, log_v = torch.randn(9 * CHUNK + 5, generator=g), torch.randn(9 * CHUNK + 5, generator=g)
    before, seen = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            gradients = torch.zeros_like(m), torch.zeros_like(m)
            kl = fused.kl(m, log_v, None, None, 1.0, gradients, 0.5)
            seen.append((fused.draw_(torch.empty_like(m), m, log_v, 3), kl, *gradients))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@given(st.floats(-60, 60), st.floats(-3, 3))
@settings(max_examples=60, deadline=None)
def test_a_draw_is_mean_plus_sigma_times_noise(log_variance: float, mean: float) -> None:
    m, log_v = torch.full((50,), mean), torch.full((50,), log_variance)
    expected = m + (log_v / 2).exp() * reference_noise(50, 4)
    scale = math.exp(log_variance / 2)
    torch.testing.assert_close(fused.draw_(torch.empty(50), m, log_v, 4), expected, rtol=2e-5, atol=4e-6 * scale)


def test_no_variance_is_no_noise_and_nan_stays_nan() -> None:
    m = torch.linspace(-1, 1, 40)
    assert torch.equal(fused.draw_(torch.empty(40), m, torch.full((40,), -math.inf), 1), m)
    log_v = torch.zeros(40)
    log_v[7] = math.nan
    assert fused.draw_(torch.empty(40), m, log_v, 1).isnan().nonzero().flatten().tolist() == [7]


def test_autograd_hears_of_what_was_written() -> None:
    out, m, log_v = torch.empty(40), torch.zeros(40), torch.zeros(40)
    before = out._version
    fused.draw_(out, m, log_v, 1)
    assert out._version > before


@pytest.mark.parametrize("around", ["zero", "tensor"])
@pytest.mark.parametrize("variance", [1.0, 0.01, "tensor"])
@pytest.mark.parametrize("size", [1, 1000, 1024, 5 * CHUNK + 3])
def test_kl_and_its_gradients_are_those_of_torch(around: str, variance: float | str, size: int) -> None:
    g = torch.Generator().manual_seed(size)
    m, log_v = torch.randn(size, generator=g), 3 * torch.randn(size, generator=g) - 4
    m0 = torch.randn(size, generator=g) if around == "tensor" else None
    v0 = torch.rand(size, generator=g) if variance == "tensor" else None
    least = 0.2 if v0 is not None else float(variance)
    gradients = torch.ones(size), torch.ones(size)
    got = fused.kl(m, log_v, m0, v0, least, gradients, 0.3)

    m64, log_v64 = m.double().requires_grad_(), log_v.double().requires_grad_()
    prior_variance = torch.full((size,), least).double() if v0 is None else v0.double().clamp(min=least)
    prior = Normal(torch.zeros(size).double() if m0 is None else m0.double(), prior_variance.sqrt())
    expected = kl_divergence(Normal(m64, (log_v64 / 2).exp()), prior).sum()
    (0.3 * expected).backward()
    torch.testing.assert_close(got.double(), expected.detach(), rtol=2e-6, atol=1e-6)
    assert m64.grad is not None and log_v64.grad is not None
    torch.testing.assert_close(gradients[0].double(), 1 + m64.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1].double(), 1 + log_v64.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(got, fused.kl(m, log_v, m0, v0, least))  # without gradients


def test_the_gradient_of_the_log_variances_is_that_of_torch() -> None:
    g = torch.Generator().manual_seed(0)
    weights, means, gradient = (torch.randn(5 * CHUNK + 3, generator=g) for _ in range(3))
    got = fused.to_log_variances_(torch.empty_like(means), weights, means, gradient)
    torch.testing.assert_close(got, (weights - means) * gradient / 2)


@pytest.mark.parametrize("prior", [priors.Standard(), priors.Gaussian(torch.ones(2000), 0.3), "moments"])
def test_what_gpus_run_is_the_same_in_float32(prior: priors.Gaussian, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    m, log_v, v0 = torch.randn(2000, generator=g), torch.randn(2000, generator=g) - 3, torch.rand(2000, generator=g)
    prior = priors.TeacherMoments(m + 1, v0, floor=0.1) if isinstance(prior, str) else prior

    def everything() -> tuple[Tensor, ...]:
        gradients = torch.ones(2000), torch.ones(2000)
        return (prior.evaluate(m, log_v, gradients, 0.2), *gradients, draw_(torch.empty(2000), m, log_v, 9))

    compiled = everything()
    monkeypatch.setattr(fused, "fits", lambda *tensors: False)
    torch.testing.assert_close(compiled, everything(), rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_is_seen() -> None:
    m, log_v = torch.zeros(5 * CHUNK), torch.zeros(5 * CHUNK)
    log_v[0], log_v[-1] = math.inf, -math.inf  # in two spans
    assert not fused.kl(m, log_v, None, None, 1.0).isfinite()
    assert fused.kl(m[:9], torch.full((9,), 100.0), None, None, 1.0) == math.inf
    variance = torch.ones(9)
    variance[4] = math.nan
    assert fused.kl(m[:9], log_v[1:10].contiguous(), None, variance, 0.1).isnan()


def test_lengths_that_differ_are_refused_not_read_beyond() -> None:
    with pytest.raises(ValueError, match="one length"):
        fused.draw_(torch.empty(10), torch.zeros(10), torch.zeros(3), 5)
    with pytest.raises(ValueError, match="log-variances"):
        priors.Standard().kl(torch.zeros(200_000), torch.zeros(10))


def test_loops_work_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "import torch, byov\np = byov.Posterior(torch.nn.Linear(3, 2))\nwith p.sampled(): print(p(torch.ones(1, 3)))"
    package = tmp_path / "byov"
    shutil.copytree(Path(fused.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (package / "_compiled", package / "data"):
        (folder / "__pycache__").write_text("")  # a file where a folder would be made
    nowhere = {"HOME": str(tmp_path / "file"), "XDG_CACHE_HOME": str(tmp_path / "file" / "cache")}
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | nowhere
    environment |= {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "tensor" in done.stdout, done.stderr


def test_only_flat_float32_on_a_cpu_fits() -> None:
    assert fused.fits(torch.zeros(3), None)
    assert not fused.fits(torch.zeros(3, 2)) and not fused.fits(torch.zeros(()))
    assert not fused.fits(torch.zeros(3), torch.zeros(4))
    assert not fused.fits(torch.zeros(3), torch.zeros(3, dtype=torch.float64))
    assert not fused.fits(torch.zeros(6)[::2])
    assert not fused.fits(torch.zeros(3, device="meta"))
