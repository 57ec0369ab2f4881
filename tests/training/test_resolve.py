from dataclasses import replace

import pytest

from byov.backbones import build_encoder
from byov.config import Config, Model, Optim, Posterior, View, Views, flatten, merge, read_recipe, to_dict
from byov.errors import BadInput
from byov.training.resolve import choose_recipe, resolve, resolve_device

GREY = (1, 8, 8)


def test_nothing_is_left_open_but_what_none_means() -> None:
    left = {k for k, v in flatten(to_dict(resolve(Config(), GREY, 100, flips=True))).items() if v is None}
    assert left == {"monitor.checkpoint_steps", "init", "model.norm", "model.frozen_until"}  # no ResNet, nothing frozen


@pytest.mark.parametrize("backbone", ["vit-micro", "resnet-18", "timm:any"])
def test_resolving_twice_changes_nothing(backbone: str) -> None:
    once = resolve(Config(model=Model(backbone=backbone)), GREY, 100, flips=False)
    assert resolve(once, GREY, 100, flips=True) == once


def test_a_resnet_needs_no_patch() -> None:
    model = resolve(Config(model=Model(backbone="resnet-50")), (3, 97, 97), 50, flips=True).model
    assert (model.width, model.stem, model.norm) == (64, "imagenet", "batch")
    assert model.patch is model.heads is model.depth is model.positions is model.pool is None
    assert resolve(Config(model=Model(backbone="resnet-50")), (3, 64, 64), 50, flips=True).model.stem == "cifar"


def test_the_log_variances_rate_hangs_on_the_steps() -> None:
    optim = resolve(Config(optim=Optim(epochs=10, batch_size=20)), GREY, 100, flips=True).optim
    assert optim.log_variance_lr == pytest.approx(8 / (10 * 4))  # 95 images are left of 100, 4 whole batches
    softplus = Config(optim=Optim(epochs=10, batch_size=20), posterior=Posterior(scale="softplus"))
    assert resolve(softplus, GREY, 100, flips=True).optim.log_variance_lr == pytest.approx(4 / (10 * 4))
    assert resolve(Config(optim=Optim(log_variance_lr=0.3)), GREY, 100, flips=True).optim.log_variance_lr == 0.3


def test_epochs_are_added_until_there_are_enough_steps() -> None:
    config = Config(optim=Optim(epochs=12, batch_size=64), calibration=0)
    few = resolve(config, (3, 96, 96), 256, flips=True, least_steps=1500).optim
    assert (few.epochs, few.log_variance_lr) == (375, 8 / 1500)
    assert resolve(config, (3, 96, 96), 40, flips=True, least_steps=1500).optim.epochs == 500
    assert resolve(config, (3, 96, 96), 640, flips=True, least_steps=1500).optim.epochs == 150
    assert resolve(config, (3, 96, 96), 64_000, flips=True, least_steps=1500).optim.epochs == 12


def test_lars_has_a_weight_decay_of_its_own() -> None:
    for method, decay in (("byol", 1e-6), ("byov", 0.0)):
        config = Config(method=method, optim=Optim(optimizer="lars", lr=0.3))
        assert resolve(config, GREY, 50, True).optim.weight_decay == decay


@pytest.mark.parametrize(
    ("method", "where", "decay"), [("byov", "all", 0.0), ("byol", "none", 0.05), ("supervised-bbb", "all", 0.0)]
)
def test_the_method_decides(method: str, where: str, decay: float) -> None:
    config = resolve(Config(method=method), GREY, 100, flips=True)
    assert config.posterior.where == where and config.optim.weight_decay == decay


def test_flips_and_blur_hang_on_the_images() -> None:
    assert resolve(Config(), GREY, 100, flips=False).views.first.flip == 0
    config = resolve(Config(), (3, 64, 64), 100, flips=True)
    assert config.views.first.flip == 0.5 and config.views.first.blur == 1.0 and config.views.second.blur == 0.1
    assert resolve(Config(), (3, 32, 32), 100, flips=True).views.first.blur == 0


@pytest.mark.parametrize(
    ("side", "patch"), [(8, 2), (32, 8), (28, 7), (30, 6), (64, 16), (100, 20), (224, 16), (225, 15)]
)
def test_patch(side: int, patch: int) -> None:
    assert resolve(Config(), (3, side, side), 100, flips=True).model.patch == patch


def test_batch_is_no_larger_than_the_data() -> None:
    assert resolve(Config(), GREY, 50, flips=True).optim.batch_size == 48  # 2 are set aside
    assert resolve(Config(calibration=0), GREY, 50, flips=True).optim.batch_size == 50


@pytest.mark.parametrize(
    ("config", "shape", "images", "word"),
    [
        (Config(), GREY, 0, "at least 2"),
        (Config(), GREY, 1, "at least 2"),
        (Config(), (1, 8, 9), 9, "square"),
        (Config(images=200), GREY, 100, "between 2 and the 100"),
        (Config(model=Model(patch=3)), GREY, 100, "divide"),
        (Config(method="byol", posterior=Posterior(where="all")), GREY, 100, "nothing random"),
        (Config(posterior=Posterior(where="none")), GREY, 100, "nothing random"),
        (Config(method="supervised-bbb", posterior=Posterior(prior="teacher_mean")), GREY, 100, "teacher"),
        (Config(optim=Optim(accumulate=40)), GREY, 50, "micro-batch"),
        (Config(optim=Optim(warmup=1.0)), GREY, 50, "warmup"),
        (Config(optim=Optim(epochs=0)), GREY, 50, "epochs"),
        (Config(views=Views(first=View(crop_area=(0.5, 0.2)))), GREY, 50, "crop_area"),
        (Config(views=Views(first=View(jitter=1.5))), GREY, 50, "chances"),
    ],
)
def test_what_cannot_work_is_one_sentence(config: Config, shape: tuple[int, int, int], images: int, word: str) -> None:
    with pytest.raises(BadInput, match=word) as error:
        resolve(config, shape, images, flips=True)
    assert "\n" not in str(error.value)


def test_the_networks_side_may_be_another_than_the_images() -> None:
    assert resolve(Config(), (3, 32, 32), 50, flips=True).image_size == 32
    config = resolve(Config(image_size=64), (3, 96, 96), 50, flips=True)
    assert (config.image_size, config.model.patch, config.views.first.blur) == (64, 16, 1.0)
    assert resolve(Config(image_size=16), (3, 32, 32), 50, flips=True).model.patch == 4
    assert resolve(read_recipe(choose_recipe(None)), (3, 96, 96), 50, flips=True).image_size == 64


def test_devices() -> None:
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(BadInput, match="not known"):
        resolve_device("tpu9")
    assert resolve(replace(Config(), device="auto"), GREY, 10, flips=True).device in ("cpu", "cuda", "mps")


def test_chosen_recipes_exist() -> None:
    from byov.config import find_recipe

    for side in (8, 28, 32, 64, 224, None):
        assert find_recipe(choose_recipe(side)).is_file()


def test_the_chosen_recipe_works_for_images_of_almost_any_side() -> None:
    for side in [side for side in range(8, 130) if any(side % d == 0 for d in range(2, side // 2 + 1))]:
        config = resolve(read_recipe(choose_recipe(side)), (3, side, side), 50, flips=True)
        assert config.model.patch is not None and side % config.model.patch == 0
        build_encoder(config.model, (3, side, side))
    with pytest.raises(BadInput, match="resize"):
        resolve(Config(), (3, 97, 97), 50, flips=True)


@pytest.mark.parametrize(
    "change",
    [
        {"optim": {"batch_size": 10, "accumulate": 4}},
        {"optim": {"betas": [0.9, 1.5]}},
        {"optim": {"weight_decay": -1.0}},
        {"optim": {"momentum": 1.0}},
        {"optim": {"trust": 0.0}},
        {"optim": {"optimizer": "lars"}},
        {"model": {"depth": 0}},
        {"model": {"backbone": "resnet-18", "width": 0}},
        {"model": {"backbone": "resnet-18", "depth": 4}},
        {"model": {"backbone": "resnet-18", "stem": "conv"}},
        {"model": {"backbone": "timm:resnet18", "norm": "group"}},
        {"model": {"width": -4}},
        {"model": {"patch": 0}},
        {"model": {"head_hidden": 0}},
        {"posterior": {"variance_floor": 0.0}},
        {"monitor": {"checkpoint_steps": 0}},
        {"views": {"first": {"brightness": 3.0}}},
        {"views": {"second": {"blur_sigma": [0.0, 0.0]}}},
    ],
)
def test_numbers_out_of_range_are_refused_not_replaced(change: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        resolve(merge(Config(), change, "here"), GREY, 100, flips=True)
