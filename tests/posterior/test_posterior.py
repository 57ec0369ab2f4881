"""The posterior against closed forms, torch.distributions and plain autograd."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import byov
from byov import priors
from byov._compiled import fused
from byov._core.errors import BadInput
from byov._core.randomness import generator


class Zoo(nn.Module):
    """A bit of everything a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.bare = nn.Parameter(torch.randn(5, 8))
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.listed = nn.ParameterList([torch.randn(8), torch.randn(8)])
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight  # tied
        self.frozen = nn.Linear(11, 3).requires_grad_(False)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.bare
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.batch(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = self.recurrent(x)[0] * self.listed[0] + self.listed[1]
        return self.frozen(self.out(x)) + self.offset


@pytest.fixture
def zoo() -> Zoo:
    torch.manual_seed(0)
    return Zoo()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(1))


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3))


def test_forward_at_the_means_equals_the_module(zoo: Zoo, tokens: Tensor) -> None:
    reference = copy.deepcopy(zoo)
    posterior = byov.Posterior(zoo)
    torch.testing.assert_close(posterior(tokens), reference(tokens), rtol=0, atol=0)
    posterior.eval(), reference.eval()
    torch.testing.assert_close(posterior(tokens), reference(tokens))


def test_gradient_at_the_means_equals_the_modules(zoo: Zoo, tokens: Tensor) -> None:
    reference = copy.deepcopy(zoo)
    posterior = byov.Posterior(zoo)
    posterior(tokens).square().sum().backward()
    reference(tokens).square().sum().backward()
    named = dict(reference.named_parameters())
    for segment in posterior.segments:
        got = posterior.means.grad[segment.offset : segment.stop].view(segment.shape)
        torch.testing.assert_close(got, named[segment.name].grad)


def test_tied_frozen_and_buffers(zoo: Zoo) -> None:
    posterior = byov.Posterior(zoo)
    names = [s.name for s in posterior.segments]
    assert "embedding.weight" in names and "out.weight" not in names  # one segment for the tied pair
    assert zoo.out.weight.data_ptr() == zoo.embedding.weight.data_ptr()
    assert not any(name.startswith("frozen") for name in names)
    assert set(dict(posterior.module.named_parameters())) == {"frozen.weight", "frozen.bias"}
    assert "offset" in dict(posterior.module.named_buffers())
    with posterior.sampled():
        assert zoo.out.weight.data_ptr() == zoo.embedding.weight.data_ptr()
        assert zoo.frozen.weight.requires_grad is False


def test_every_random_parameter_is_drawn_and_gets_a_gradient(zoo: Zoo, tokens: Tensor) -> None:
    posterior = byov.Posterior(zoo, init_log_variance=-4.0)
    means = posterior.segments.named(posterior.means.detach().clone())
    with posterior.sampled(generator(3)):
        shown = {posterior.segments[i].name: getattr(o, a).detach().clone() for o, a, i in posterior.segments.slots}
        loss = posterior(tokens).square().sum()
    loss.backward()
    for name, mean in means.items():
        assert (shown[name] != mean).any(), name
    gradients = posterior.segments.named(posterior.log_variances.grad)
    assert all(g.abs().sum() > 0 for name, g in gradients.items() if name != "attention.in_proj_bias")


def test_gradients_by_formula_equal_autograd_through_the_reparameterisation() -> None:
    posterior = byov.Posterior(small().double(), init_log_variance=-3.0)
    x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with posterior.sampled(generator(1)):
        weights = torch.cat([getattr(o, a).detach().reshape(-1) for o, a, _ in posterior.segments.slots])
        loss = posterior(x).square().sum()
    loss.backward()

    means = posterior.means.detach().clone().requires_grad_()
    log_variances = posterior.log_variances.detach().clone().requires_grad_()
    noise = (weights - posterior.means.detach()) / posterior.sigma
    drawn = means + (log_variances / 2).exp() * noise
    names = [s.name for s in posterior.segments]
    state = dict(zip(names, posterior.segments.views(drawn), strict=True))
    torch.func.functional_call(small().double(), state, (x,)).square().sum().backward()
    torch.testing.assert_close(posterior.means.grad, means.grad)
    torch.testing.assert_close(posterior.log_variances.grad, log_variances.grad)


def test_moments_of_draws_match_the_closed_form() -> None:
    posterior = byov.Posterior(nn.Linear(30, 30))
    with torch.no_grad():
        posterior.log_variances.uniform_(-4, 0)
    draws = 2000
    stack = torch.empty(draws, posterior.means.numel())
    for k in range(draws):
        with torch.no_grad(), posterior.sampled(generator(9, k)):
            stack[k] = torch.cat([posterior.module.weight.reshape(-1), posterior.module.bias])
    z = (stack.mean(0) - posterior.means.detach()) / (posterior.sigma / math.sqrt(draws))
    # 930 standard normal z-scores: their largest exceeds 4.8 with chance 1.5e-3; their mean square is 1 within 5 s.e.
    assert z.abs().max() < 4.8
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / z.numel())
    ratio = stack.var(0) / posterior.sigma**2
    assert (ratio - 1).abs().max() < 5 * math.sqrt(2 / draws)
    standard = (stack - posterior.means.detach()) / posterior.sigma
    assert abs(float(standard.pow(4).mean()) - 3) < 5 * math.sqrt(
        96 / standard.numel()
    )  # kurtosis: normal, not just moments 1, 2


def test_draws_are_the_same_for_any_number_of_threads_and_differ_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ALONE", 0)  # so few weights would stay on one thread
    posterior = byov.Posterior(nn.Linear(400, 300))
    before = torch.get_num_threads()

    def draw(key: int) -> Tensor:
        with torch.no_grad(), posterior.sampled(generator(key)):
            return posterior.module.weight.clone()

    try:
        torch.set_num_threads(1)
        one = draw(4)
        torch.set_num_threads(3)
        assert torch.equal(one, draw(4))
        assert not torch.equal(one, draw(5))
    finally:
        torch.set_num_threads(before)


def test_the_means_are_back_after_the_block_also_on_an_error() -> None:
    net = small()
    posterior = byov.Posterior(net)
    x = torch.randn(2, 6)
    expected = posterior(x).detach()
    with pytest.raises(ZeroDivisionError), posterior.sampled():
        assert not torch.equal(posterior(x), expected)
        raise ZeroDivisionError
    assert torch.equal(posterior(x), expected)
    assert torch.equal(net(x), expected)


def test_backward_works_inside_and_after_the_block_and_sums() -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    gradients = []
    for inside in (True, False):
        posterior = byov.Posterior(small())
        with posterior.sampled(generator(2)):
            loss = posterior(x).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append(posterior.means.grad.clone())
    assert torch.equal(*gradients)

    posterior = byov.Posterior(small())  # micro-batches under one draw
    with posterior.sampled(generator(2)):
        for row in x:
            posterior(row[None]).sum().backward()
    torch.testing.assert_close(posterior.means.grad, gradients[0])


def test_two_draws_before_backward_keep_apart() -> None:
    posterior = byov.Posterior(small(), init_log_variance=-2.0)
    x = torch.randn(3, 6)
    losses = []
    for key in (1, 2):
        with posterior.sampled(generator(key)):
            losses.append(posterior(x).square().sum())
    sum(losses).backward()
    together = posterior.log_variances.grad.clone()
    posterior.zero_grad()
    for key in (1, 2):
        with posterior.sampled(generator(key)):
            posterior(x).square().sum().backward()
    torch.testing.assert_close(posterior.log_variances.grad, together)


def test_stale_backward_is_refused() -> None:
    posterior = byov.Posterior(small())
    with posterior.sampled():
        loss = posterior(torch.randn(2, 6)).sum()
    with torch.no_grad():
        posterior.means.add_(1)
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


def test_nested_draws_are_refused() -> None:
    posterior = byov.Posterior(small())
    with pytest.raises(RuntimeError, match="already"), posterior.sampled(), posterior.sampled():
        pass


def test_a_training_loop_of_ones_own_learns_and_shrinks_nothing_by_hand() -> None:
    """The ten lines of the guide: regression with a known noise-free answer."""
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    y = x @ torch.randn(6, 1)
    posterior = byov.Posterior(nn.Linear(6, 1), init_log_variance=-6.0)
    optimizer = torch.optim.Adam(posterior.parameters(), lr=0.05)
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        with posterior.sampled(generator=g):
            loss = F.mse_loss(posterior(x), y) + 1e-4 * posterior.kl(priors.Standard()) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert F.mse_loss(posterior(x), y) < 1e-2
    assert posterior.log_variances.mean() < -6.0  # a good fit wants less noise than the start


def test_bayesian_linear_regression_finds_the_exact_posterior() -> None:
    """One weight, known noise: q must become N(m, v) with 1/v = 1 + sum x^2 / s^2, m = v * sum x y / s^2."""
    torch.manual_seed(1)
    x = torch.randn(50, 1)
    y = 0.7 * x + 0.5 * torch.randn(50, 1)
    precision = 1 + float((x**2).sum() / 0.25)
    mean = float((x * y).sum() / 0.25) / precision
    posterior = byov.Posterior(nn.Linear(1, 1, bias=False), init_log_variance=-5.0)
    optimizer = torch.optim.Adam(posterior.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 3000)
    for k in range(3000):
        with posterior.sampled(generator(k)):
            loss = ((posterior(x) - y) ** 2).sum() / (2 * 0.25) + posterior.kl(priors.Standard())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    sigma = 1 / math.sqrt(precision)
    assert abs(float(posterior.means.detach()) - mean) < 0.2 * sigma
    assert abs(float(posterior.sigma) / sigma - 1) < 0.1


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("all", {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "fc.weight", "fc.bias", "bare"}),
        ("no_conv", {"norm.weight", "norm.bias", "fc.weight", "fc.bias", "bare"}),
        ("linear", {"fc.weight", "fc.bias"}),
        ("none", set()),
        (lambda module, name: name == "bias", {"conv.bias", "norm.bias", "fc.bias"}),
    ],
)
def test_where(where: object, expected: set[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 2), nn.LayerNorm(4), nn.Linear(4, 2)
            self.bare = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(self.conv(x).mean((2, 3)) + self.bare))

    posterior = byov.Posterior(Net(), where=where)
    assert {s.name for s in posterior.segments} == expected
    rest = {n for n, _ in posterior.module.named_parameters()}
    assert rest == {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "fc.weight", "fc.bias", "bare"} - expected
    with posterior.sampled():
        posterior(torch.randn(2, 3, 2, 2)).sum().backward()
    assert all(p.grad is not None for p in posterior.module.parameters())  # trainable as usual


def test_unknown_where_is_refused() -> None:
    with pytest.raises(ValueError, match="no_conv"):
        byov.Posterior(small(), where="some")


def test_segments_tell_kinds(zoo: Zoo) -> None:
    kinds = {s.name: s.kind for s in byov.Posterior(zoo).segments}
    assert kinds["conv.weight"] == "weight" and kinds["conv.bias"] == "bias" and kinds["norm.weight"] == "norm"
    assert kinds["batch.bias"] == "norm" and kinds["embedding.weight"] == "embedding" and kinds["bare"] == "other"


def test_predict_equals_moments_over_the_same_draws() -> None:
    posterior = byov.Posterior(small(), init_log_variance=-3.0)
    x = torch.randn(4, 6)
    prediction = posterior.predict(x, draws=7, generator=generator(1))
    g, outputs = generator(1), []
    for _ in range(7):
        with torch.no_grad(), posterior.sampled(generator=g):
            outputs.append(posterior(x))
    stack = torch.stack(outputs)
    torch.testing.assert_close(prediction.mean, stack.mean(0))
    torch.testing.assert_close(prediction.std, stack.std(0))
    assert (posterior.predict(x, draws=1).std == 0).all()
    with pytest.raises(ValueError, match="draws"):
        posterior.predict(x, draws=0)


def test_snr_and_sigma() -> None:
    posterior = byov.Posterior(nn.Linear(3, 2), init_log_variance=math.log(0.25))
    torch.testing.assert_close(posterior.sigma, torch.full((8,), 0.5))
    torch.testing.assert_close(posterior.snr()["weight"], posterior.module.weight.abs() / 0.5)


def test_save_and_load(tmp_path, zoo: Zoo, tokens: Tensor) -> None:
    posterior = byov.Posterior(zoo)
    with torch.no_grad():
        posterior.log_variances.normal_()
    posterior(tokens)  # moves the batch statistics
    posterior.save(tmp_path / "p.safetensors")
    torch.manual_seed(7)
    twin = byov.Posterior(Zoo()).load(tmp_path / "p.safetensors")
    assert all(torch.equal(v, twin.tensors()[k]) for k, v in posterior.tensors().items())
    assert torch.equal(posterior.eval()(tokens), twin.eval()(tokens))


def test_load_checks_names_shapes_and_format(tmp_path) -> None:
    path = tmp_path / "p.safetensors"
    byov.Posterior(small()).save(path)
    wide = byov.Posterior(nn.Sequential(nn.Linear(6, 11), nn.LayerNorm(11), nn.Tanh(), nn.Linear(11, 3)))
    before = wide.means.detach().clone()
    with pytest.raises(BadInput, match="shape"):
        wide.load(path)
    assert torch.equal(wide.means, before)  # nothing half-loaded
    with pytest.raises(BadInput, match=r"lacks|unknown"):
        byov.Posterior(nn.Linear(2, 2)).load(path)
    with pytest.raises(BadInput, match=r"lacks|unknown"):
        byov.Posterior(small(), where="linear").load(path)
    save_file({"x": torch.zeros(2)}, str(path))
    with pytest.raises(BadInput, match="not a saved posterior"):
        byov.Posterior(small()).load(path)
    path.write_bytes(b"rubbish")
    with pytest.raises(BadInput, match="cannot read"):
        byov.Posterior(small()).load(path)
    with pytest.raises(BadInput, match="cannot read"):
        byov.Posterior(small()).load(tmp_path / "absent")


def test_deepcopy_and_dtype_moves_keep_module_and_means_together() -> None:
    posterior = byov.Posterior(small())
    twin = copy.deepcopy(posterior)
    x = torch.randn(2, 6)
    with torch.no_grad():
        twin.means.add_(1)
    assert not torch.equal(twin.module(x), posterior.module(x))
    posterior.double()
    with torch.no_grad():
        posterior.means.zero_()
    assert posterior.module[0].weight.dtype == torch.float64 and (posterior.module[0].weight == 0).all()


def test_unwrapped_and_part(zoo: Zoo, tokens: Tensor) -> None:
    reference = copy.deepcopy(zoo)
    posterior = byov.Posterior(zoo, where=lambda m, n: not isinstance(m, nn.GRU))
    plain = posterior.unwrapped()
    assert list(plain.state_dict()) and set(plain.state_dict()) == set(reference.state_dict())
    assert plain.out.weight is plain.embedding.weight
    torch.testing.assert_close(plain(tokens), reference(tokens))
    with torch.no_grad():
        posterior.log_variances.normal_()
    part = posterior.part("attention")
    own = posterior.segments.named(posterior.log_variances)
    for name, value in part.segments.named(part.log_variances).items():
        assert torch.equal(value, own[f"attention.{name}"])
    assert len(posterior.part("recurrent").segments) == 0


def test_empty_posterior_is_the_plain_module() -> None:
    posterior = byov.Posterior(small(), where="none")
    x = torch.randn(2, 6)
    with posterior.sampled():
        posterior(x).sum().backward()
    assert posterior.means.numel() == 0 and float(posterior.kl(priors.Standard()).detach()) == 0
    assert posterior.module[0].weight.grad is not None


def test_inference_leaves_no_graph_and_reuses_its_buffer() -> None:
    posterior = byov.Posterior(small())
    places = set()
    for k in range(5):
        with torch.no_grad(), posterior.sampled(generator(k)):
            places.add(posterior.module[0].weight.data_ptr())
            assert not posterior(torch.randn(1, 6)).requires_grad
    assert len(places) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.floats(-12, 2))
def test_kl_is_never_negative_and_zero_only_at_the_prior(inputs: int, outputs: int, log_variance: float) -> None:
    posterior = byov.Posterior(nn.Linear(inputs, outputs), init_log_variance=log_variance)
    assert float(posterior.kl(priors.Standard()).detach()) >= 0
    with torch.no_grad():
        posterior.means.zero_()
        posterior.log_variances.zero_()
    assert float(posterior.kl(priors.Standard()).detach()) == 0


def test_predicting_in_inference_mode_leaves_training_possible() -> None:
    posterior = byov.Posterior(small())
    x = torch.randn(2, 6)
    with torch.inference_mode():
        posterior.predict(x, draws=2)
    with posterior.sampled():
        posterior(x).sum().backward()
    assert posterior.means.grad is not None


def test_buffers_of_many_draws_are_not_all_kept() -> None:
    posterior = byov.Posterior(small())
    losses = []
    for k in range(6):
        with posterior.sampled(generator(k)):
            losses.append(posterior(torch.ones(1, 6)).sum())
    sum(losses).backward()
    assert len(posterior._spares) <= 2


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_between_draw_and_backward_is_noticed(fused: bool) -> None:
    posterior = byov.Posterior(small())
    optimizer = torch.optim.AdamW(posterior.parameters(), lr=0.1, fused=fused)
    with posterior.sampled():
        losses = [posterior(torch.ones(1, 6)).sum() for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="backward"):
        losses[1].backward()


def test_second_derivatives_are_refused_not_wrong() -> None:
    posterior = byov.Posterior(small())
    with posterior.sampled():
        loss = posterior(torch.ones(1, 6)).square().sum()
    gradient = torch.autograd.grad(loss, posterior.log_variances, create_graph=True)[0]
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_a_module_that_cannot_be_wrapped_is_left_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="dtype"):
        byov.Posterior(net)
    assert len(list(net.parameters())) == 4
    plain = small()
    byov.Posterior(plain)
    with pytest.raises(ValueError, match="wrapped already"):
        byov.Posterior(plain)
    with pytest.raises(ValueError, match="chosen"):
        byov.Posterior(nn.ReLU())


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: nn.Sequential(nn.Linear(3, 3), inner)])
def test_a_posterior_is_not_wrapped_again(wrap: Callable[[nn.Module], nn.Module]) -> None:
    inner = byov.Posterior(small())
    before = [p.clone() for p in inner.parameters()]
    with pytest.raises(BadInput, match="already has a posterior"):
        byov.Posterior(wrap(inner))
    assert all(torch.equal(p, kept) for p, kept in zip(inner.parameters(), before, strict=True))
    byov.Posterior(inner.unwrapped())


def test_tied_weights_that_are_not_random_are_saved(tmp_path) -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.LayerNorm(3))
    net[1].weight = net[0].weight
    posterior = byov.Posterior(net, where=lambda module, name: isinstance(module, nn.LayerNorm))
    posterior.save(tmp_path / "p.safetensors")
    with torch.no_grad():
        net[0].weight.zero_()
    posterior.load(tmp_path / "p.safetensors")
    assert net[1].weight is net[0].weight and net[0].weight.abs().sum() > 0


def test_part_of_modules_with_two_paths() -> None:
    shared = nn.Linear(2, 2)
    net = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.Linear(2, 2))})
    posterior = byov.Posterior(net)
    with torch.no_grad():
        posterior.log_variances.normal_()
    part = posterior.part("b")
    assert part.segments.numel == 12
    own, whole = part.segments.named(part.log_variances), posterior.segments.named(posterior.log_variances)
    assert torch.equal(own["0.weight"], whole["a.0.weight"]) and torch.equal(own["1.bias"], whole["b.1.bias"])
    assert posterior.part("").segments.numel == posterior.segments.numel


def test_reused_gradients_are_the_same_gradients_in_the_same_memory() -> None:
    """`reuse_gradients` changes no number; `zero_grad` leaves an old gradient alone, as torch's does."""
    posteriors = [byov.Posterior(small()) for _ in range(2)]
    x, held, places = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), [], set()
    for k in range(4):
        for posterior, reuse in zip(posteriors, (True, False), strict=True):
            posterior.reuse_gradients() if reuse else posterior.zero_grad()
            with posterior.sampled(generator(k)):
                posterior(x).square().sum().backward()
        assert torch.equal(posteriors[0].means.grad, posteriors[1].means.grad)
        assert torch.equal(posteriors[0].log_variances.grad, posteriors[1].log_variances.grad)
        places.add(posteriors[0].means.grad.data_ptr())
        held.append((posteriors[1].means.grad, posteriors[1].means.grad.clone()))
    assert len(places) <= 2  # the two buffers, in turn
    for gradient, copied in held:
        assert torch.equal(gradient, copied)


def test_a_nan_in_the_means_is_not_called_a_stale_draw() -> None:
    posterior = byov.Posterior(small())
    with torch.no_grad():
        posterior.means[0] = math.nan
    with posterior.sampled(generator(0)):
        posterior(torch.ones(2, 6)).sum().backward()
    assert posterior.means.grad.isnan().any()
