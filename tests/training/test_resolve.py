import math
from dataclasses import replace

import pytest

from byov._core.errors import BadInput
from byov.backbones import build_encoder
from byov.config import Config, Model, Optim, Posterior, View, Views, flatten, merge, read_recipe, to_dict
from byov.training.recipes import automatic_method, choose_recipe
from byov.training.resolve import resolve, resolve_device, with_temperature

GREY = (1, 8, 8)


def test_nothing_is_left_open_but_what_none_means() -> None:
    left = {k for k, v in flatten(to_dict(resolve(Config(), GREY, 100, flips=True))).items() if v is None}
    means = {"monitor.checkpoint_steps", "init", "model.norm", "model.frozen_until"}  # no ResNet, nothing frozen
    assert left == means
    newton = resolve(Config(optim=Optim(variances="newton")), GREY, 100, flips=True)
    left = {k for k, v in flatten(to_dict(with_temperature(newton, 1000))).items() if v is None}
    assert left == means | {"optim.log_variance_lr"}  # which newton does not have


def test_the_temperature_follows_images_and_weights() -> None:
    newton = resolve(Config(optim=Optim(variances="newton")), GREY, 100, flips=True)
    assert newton.images == 95 and newton.posterior.temperature is None  # until the network is known
    assert with_temperature(newton, 1000).posterior.temperature == pytest.approx(0.003 * 95 / 1000)
    given = replace(newton, posterior=replace(newton.posterior, temperature=0.5))
    assert with_temperature(given, 1000) == given
    assert resolve(Config(), GREY, 100, flips=True).posterior.temperature == 0.01


@pytest.mark.parametrize(
    ("optim", "posterior", "message"),
    [
        ({"variances": "newton", "log_variance_lr": 0.1}, {}, "no optim.log_variance_lr"),
        ({"variances": "newton"}, {"scale": "softplus"}, "softplus needs adam"),
        ({"variances": "newton"}, {"beta_end": 0.0}, "without a KL, sigma would be 0"),
        ({"variances": "newton"}, {"temperature": 0.0}, "without a KL, sigma would be 0"),
    ],
)
def test_newton_refuses_what_it_cannot_use(optim: dict, posterior: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        resolve(Config(optim=Optim(**optim), posterior=Posterior(**posterior)), GREY, 100, flips=True)


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
    assert config.views.first.blur_sigma == config.views.second.blur_sigma == (0.1 * 64 / 224, 2 * 64 / 224)
    given = Config(views=Views(first=View(blur_sigma=(0.5, 1.0))))
    assert resolve(given, (3, 64, 64), 100, flips=True).views.first.blur_sigma == (0.5, 1.0)


def test_the_floor_of_the_moments_prior_does_not_follow_the_start() -> None:
    for start in (-14.0, -10.0, -8.0):
        config = resolve(Config(posterior=Posterior(init_log_variance=start)), GREY, 100, flips=True)
        assert config.posterior.variance_floor == math.exp(-10)


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
        (Config(views=Views(first=View(jitter=1.5))), GREY, 50, "probabilities"),
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
    assert resolve(read_recipe(choose_recipe(None, "none")), (3, 96, 96), 50, flips=True).image_size == 64


def test_devices() -> None:
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(BadInput, match="not known"):
        resolve_device("tpu9")
    assert resolve(replace(Config(), device="auto"), GREY, 10, flips=True).device in ("cpu", "cuda", "mps")


def test_chosen_recipes_exist() -> None:
    from byov.config import find_recipe

    for side in (8, 28, 32, 64, 224, None):
        assert find_recipe(choose_recipe(side, None)).is_file()


@pytest.mark.parametrize(
    ("init", "recipe", "method"),
    [
        (None, "folder-64", "byov"),
        ("none", "folder-64", "byov"),
        ("runs/mine", "folder-64", "byov"),
        ("weights.pth", "folder-64", "byov"),
        ("lite0", "adapt-photos", "posthoc"),
        ("lite2", "adapt-photos", "posthoc"),
        ("timm:resnet18", "adapt-photos", "posthoc"),
    ],
)
def test_weights_that_set_the_backbone_choose_recipe_and_method(init: str | None, recipe: str, method: str) -> None:
    assert choose_recipe(None, init) == recipe and automatic_method(init) == method
    small = ["digits", "small-images"] if recipe == "folder-64" else ["adapt-small", "adapt-small"]
    assert [choose_recipe(side, init) for side in (8, 32)] == small


@pytest.mark.parametrize("side", [8, 10, 12, 16, 28, 64])
def test_a_recipe_is_chosen_whose_patches_divide_the_image(side: int) -> None:
    patch = resolve(read_recipe(choose_recipe(side, None)), (1, side, side), 100, flips=False).model.patch
    assert patch and side % patch == 0


def test_the_recipe_from_pretrained_weights() -> None:
    config = resolve(read_recipe("adapt-photos", "posthoc"), (3, 140, 140), 50, flips=True)
    assert (config.image_size, config.init, config.method) == (128, "lite0", "posthoc")
    assert (config.model.backbone, config.model.frozen_until) == ("efficientnet-lite0", "blocks.4")
    assert config.model.frozen_statistics is True and config.posterior.where == "all"


def test_none_is_no_weights() -> None:
    config = resolve(Config(init="none"), GREY, 100, flips=True)
    assert config.init is None and config.model.frozen_statistics is False


@pytest.mark.parametrize(
    ("init", "model", "frozen"),
    [
        (None, Model(), False),
        ("runs/mine", Model(), False),
        ("lite0", Model("efficientnet-lite0"), True),
        ("timm:resnet18", Model("timm:resnet18"), True),
        (None, Model("resnet-18", frozen_until="layer1"), True),
        (None, Model("resnet-18", frozen_until="layer1", frozen_statistics=False), False),
        (None, Model("resnet-18", frozen_statistics=True), True),
        ("lite0", Model("efficientnet-lite0", frozen_statistics=False), False),
    ],
)
def test_whether_statistics_are_frozen_depends_on_the_weights_and_stages(
    init: str | None, model: Model, frozen: bool
) -> None:
    config = resolve(Config(init=init, model=model), (3, 64, 64), 50, flips=True)
    assert config.model.frozen_statistics is frozen and config.model.frozen_until == model.frozen_until
    assert resolve(config, (3, 64, 64), 50, flips=True) == config


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_an_overlap_is_within_0_and_1(overlap: float) -> None:
    with pytest.raises(BadInput, match=r"posterior\.overlap"):
        resolve(Config(posterior=Posterior(overlap=overlap)), GREY, 50, flips=True)


def test_the_chosen_recipe_works_for_images_of_almost_any_side() -> None:
    for side in [side for side in range(8, 130) if any(side % d == 0 for d in range(2, side // 2 + 1))]:
        config = resolve(read_recipe(choose_recipe(side, None)), (3, side, side), 50, flips=True)
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
