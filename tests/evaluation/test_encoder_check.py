"""Does an encoder find an image from a view of it? Ranks by hand, encoders with a known answer, cache, wording."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from byov.config import View, Views
from byov.evaluation import encoder_check
from byov.evaluation.encoder_check import EncoderCheck, check_encoder, check_on_images, own_ranks, paired_interval
from byov.inference.run import ReferenceSet, Run
from handmade import images, pixels
from handmade import run as made_run

STILL = View(crop_area=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0, jitter=0.0, grey=0.0, blur=0.0)
MIRRORED = replace(STILL, flip=1.0)


class Fixed(nn.Module):
    """Features of the pixels, nothing learned."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(1))  # a posterior needs one

    def forward(self, batch: Tensor) -> Tensor:
        return self.function(batch) + 0 * self.weight


def blind(batch: Tensor) -> Tensor:
    return torch.ones(len(batch), 5)


def mirror_invariant(batch: Tensor) -> Tensor:
    return pixels(batch) + pixels(batch.flip(3))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A run with this encoder and view; its untrained encoder is blind."""
    monkeypatch.setattr(Run, "untrained_encoder", lambda self: Fixed(blind))

    def make(encoder: Callable[[Tensor], Tensor], setting: View, calibration: int = 60) -> Run:
        run = made_run(tmp_path / "run", Fixed(encoder), source=images(160), calibration=calibration)
        return replace(run, config=replace(run.config, views=Views(first=setting)))

    return make


# ---------------------------------------------------------------------------------------------------------------- ranks


def test_ranks_by_hand() -> None:
    references = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])  # their mean is 0
    originals = torch.tensor([[1.0, 1], [1, 1], [2, 0]])
    views = torch.tensor([[2.0, 2], [3, -1], [1, 0]])
    # 45 degrees: itself. -18 degrees: [1, 0] is 18 away, it 63, [0, -1] 72. 0 degrees: it and [1, 0] tie.
    assert own_ranks(views, originals, references).tolist() == [1, 2, 2]


def test_a_tie_counts_against_the_encoder_but_a_copy_does_not() -> None:
    references = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    original = view = torch.tensor([[1.0, 0]])
    copies = torch.tensor([[True, False, False, False]])
    assert own_ranks(view, original, references).item() == 2
    assert own_ranks(view, original, references, copies).item() == 1


def test_features_are_centred_on_the_references() -> None:
    references, far = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), torch.tensor([100.0, 50])
    originals, views = torch.tensor([[1.0, 1]]), torch.tensor([[3.0, -1]])
    assert own_ranks(views + far, originals + far, references + far).item() == 2


def test_an_encoder_of_one_point_ranks_all_before() -> None:
    assert own_ranks(torch.ones(3, 4), torch.ones(3, 4), torch.ones(9, 4)).tolist() == [10] * 3


def test_the_interval_of_a_difference() -> None:
    low, high = paired_interval(torch.tensor([1.0] * 30 + [-1.0] * 10 + [0.0] * 60, dtype=torch.float64))
    assert low == pytest.approx(20 / 102 - 1.96 * ((41 / 102 - (20 / 102) ** 2) / 102) ** 0.5)
    assert (low + high) / 2 == pytest.approx(20 / 102)
    few = paired_interval(torch.ones(2))
    assert few[0] < 0 < few[1], "two images that agree prove nothing"


# ------------------------------------------------------------------------------------------------------------- encoders


def test_whatever_sees_all_finds_all_where_nothing_is_changed(opened) -> None:
    check = check_encoder(ReferenceSet(opened(pixels, STILL)))
    assert (check.encoder, check.untrained, check.pixels) == (1, 0, 1)
    assert check.images == 60 and check.views == 300 and check.held_out
    assert not check.trusted, "raw pixels do as well"


def test_an_encoder_that_has_learned_the_views_is_trusted(opened) -> None:
    check = check_encoder(ReferenceSet(opened(mirror_invariant, MIRRORED)))
    assert check.encoder == 1 and check.pixels < 0.3 and check.trusted


def test_a_blind_encoder_is_not_trusted(opened) -> None:
    check = check_encoder(ReferenceSet(opened(blind, STILL)))
    assert check.encoder == 0 and not check.trusted


def test_few_calibration_images_are_replaced_by_those_of_the_reference_set(opened) -> None:
    check = check_encoder(ReferenceSet(opened(mirror_invariant, MIRRORED, calibration=20)))
    assert check.images == 140 and not check.held_out and check.encoder == 1
    assert "of images that were not held out" in check.sentence()


def test_copies_among_the_references_do_not_hide_an_image(opened) -> None:
    run = opened(mirror_invariant, MIRRORED)
    twice = torch.cat([images(40, seed=3)] * 2)
    check = check_on_images(run, run.encoder, twice, held_out=True)
    assert check.encoder == 1 and check.images == 80


def test_the_result_is_cached_until_the_weights_change(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(mirror_invariant, replace(MIRRORED, crop_area=(0.5, 1.0)))
    told: list[str] = []
    first = check_encoder(ReferenceSet(run), lambda what, done, total: told.append(what))
    assert set(told) == {"checking the encoder"}
    for path in ReferenceSet(run).folder.glob(f"{encoder_check.CACHE}*"):
        kept = path.read_bytes()
        path.unlink()
        assert check_encoder(ReferenceSet(run)) == first and path.read_bytes() == kept, "the same again"
    with monkeypatch.context() as patch:
        patch.setattr(encoder_check, "_all_hits", None)
        assert check_encoder(ReferenceSet(run)) == first
    with torch.no_grad():
        run.encoder.means.add_(1)
    told.clear()
    check_encoder(ReferenceSet(run), lambda what, done, total: told.append(what))
    assert told


# ---------------------------------------------------------------------------------------------------------------- words

CHECK = EncoderCheck(0.62, 0.12, 0.31, (0.4, 0.6), (0.2, 0.4), 300, 300, True)


def test_what_a_user_reads() -> None:
    found = "finds an image from an augmented view of it in 62% of 300 cases (untrained: 12%, raw pixels: 31%)"
    assert CHECK.trusted and CHECK.sentence() == f"encoder check: it {found}."
    worse = CHECK._replace(encoder=0.12, over_pixels=(-0.3, -0.1))
    assert worse.sentence() == (
        f"warning: this encoder {found.replace('62%', '12%')}: its scores mean little; "
        "train longer, use more images, or start from pretrained weights (--init lite0)."
    )
    assert worse.sentence(pretrained=True).endswith("its scores mean little; train longer or use more images.")
    level = CHECK._replace(over_pixels=(-0.01, 0.05))
    assert "its scores may mean no more than those of raw pixels" in level.sentence()
    assert "it has learned little" in CHECK._replace(over_untrained=(-0.01, 0.05)).sentence()
    few = CHECK._replace(images=7)
    assert not few.trusted and few.sentence().startswith("warning: there are only 7 images to check this encoder on")
