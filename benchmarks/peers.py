"""The supervised step as each library does it: forward, backward, KL. One function per library.

All wrap the same ViT (`models.classifier`). bayesian-torch, torch-uncertainty and blitz make Linear and convolution
layers Bayesian, no others: a little less work than byov, where LayerNorm is random too. Each uses its best setting.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from byov.backbones._torchvision import import_torchvision
from conductor import Turn, steps_of
from models import classifier, labelled_batch

IMAGES = 50_000  # the KL of a batch is divided by this


def _turn(zero_grad: Callable[[], None], backward: Callable[[Tensor, Tensor], None], task: str) -> Turn:
    x, y = labelled_batch(task)

    def step(_: int) -> None:
        zero_grad()
        backward(x, y)

    return steps_of(step)


def deterministic(task: str) -> Turn:
    model = classifier(task)
    return _turn(model.zero_grad, lambda x, y: F.cross_entropy(model(x), y).backward(), task)


def deterministic_kept(task: str) -> Turn:
    """With the memory that byov's draws make glibc keep: what a posterior costs beyond that."""
    from byov._core.threads import keep_freed_memory

    keep_freed_memory()
    return deterministic(task)


def byov_add_kl(task: str) -> Turn:
    """The KL's gradient by formula, after backward."""
    from byov import Posterior, priors

    posterior, prior = Posterior(classifier(task)), priors.Standard()

    def backward(x: Tensor, y: Tensor) -> None:
        with posterior.sampled():
            F.cross_entropy(posterior(x), y).backward()
        priors.add_kl(posterior, prior, 1 / IMAGES)

    return _turn(posterior.reuse_gradients, backward, task)


def byov_kl_in_loss(task: str) -> Turn:
    """The KL as a part of the loss, as in a user's own loop."""
    from byov import Posterior, priors

    posterior, prior = Posterior(classifier(task)), priors.Standard()

    def backward(x: Tensor, y: Tensor) -> None:
        with posterior.sampled():
            (F.cross_entropy(posterior(x), y) + posterior.kl(prior) / IMAGES).backward()

    return _turn(posterior.reuse_gradients, backward, task)


def bayesian_torch(task: str, kind: str) -> Turn:
    """`kind`: Reparameterization or Flipout."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -5.0}
    model = classifier(task)
    dnn_to_bnn(model, settings | {"type": kind, "moped_enable": False})

    def backward(x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(model(x), y) + get_kl_loss(model) / IMAGES).backward()

    return _turn(model.zero_grad, backward, task)


def torch_uncertainty(task: str) -> Turn:
    import_torchvision()  # it imports torchvision, in the way that fails with a CPU build of torch
    from torch_uncertainty.layers import BayesConv2d, BayesLinear
    from torch_uncertainty.losses import ELBOLoss

    torch.distributions.Distribution.set_default_validate_args(False)  # or every prior checks its arguments each step
    model = _replaced(
        classifier(task),
        lambda m: BayesLinear(m.in_features, m.out_features, prior_sigma_1=1.0),
        lambda m: BayesConv2d(m.in_channels, m.out_channels, m.kernel_size, stride=m.stride, prior_sigma_1=1.0),
    )
    loss = ELBOLoss(model, nn.CrossEntropyLoss(), kl_weight=1 / IMAGES, num_samples=1)
    return _turn(model.zero_grad, lambda x, y: loss(x, y).backward(), task)


def blitz(task: str) -> Turn:
    from blitz.losses import kl_divergence_from_nn
    from blitz.modules import BayesianConv2d, BayesianLinear

    torch.distributions.Distribution.set_default_validate_args(False)
    prior = torch.distributions.Normal(0.0, 1.0)  # one Gaussian: half the work of its mixture of two
    model = _replaced(
        classifier(task),
        lambda m: BayesianLinear(m.in_features, m.out_features, prior_dist=prior),
        lambda m: BayesianConv2d(m.in_channels, m.out_channels, m.kernel_size, stride=m.stride, prior_dist=prior),
    )

    def backward(x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(model(x), y) + kl_divergence_from_nn(model) / IMAGES).backward()

    return _turn(model.zero_grad, backward, task)


def ivon(task: str) -> Turn:
    """For information: its KL is within its update, so the update is timed too."""
    from ivon import IVON

    model = classifier(task)
    optimizer = IVON(model.parameters(), lr=0.1, ess=IMAGES)

    def backward(x: Tensor, y: Tensor) -> None:
        with optimizer.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return _turn(model.zero_grad, backward, task)


def _replaced(
    module: nn.Module, linear: Callable[[nn.Linear], nn.Module], conv: Callable[[nn.Conv2d], nn.Module]
) -> nn.Module:
    """The module with its Linear and Conv2d layers exchanged: what bayesian-torch's dnn_to_bnn does."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, linear(child))
        elif isinstance(child, nn.Conv2d):
            setattr(module, name, conv(child))
        else:
            _replaced(child, linear, conv)
    return module
