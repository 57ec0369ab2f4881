"""Which shifts are measured, and on how much."""

from pathlib import Path

import pytest
import torch
from torch import nn

import handmade
from byov.data.images import ImageSet
from byov.data.shifts import SEVERITIES, SHIFTS
from byov.evaluation import shift_robustness
from byov.evaluation.labelled import Labelled, Subject
from byov.evaluation.shift_robustness import shift_measures, shift_names, shift_settings
from byov.inference.reference import ReferenceSet


def subject(folder: Path, channels: int, encoder: nn.Module | None = None) -> Subject:
    run = handmade.run(folder / "run", handmade.Affine(4))
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, channels, 4, 4), generator=g, dtype=torch.uint8)
    data = ImageSet(pixels, torch.arange(40) % 2)
    labelled = Labelled("made", data, data, torch.arange(40), True, None)
    return Subject(run, encoder or run.encoder, labelled, 4, lambda *what: None, ReferenceSet(run))


def test_grey_images_have_no_shifts_of_colour(tmp_path: Path) -> None:
    assert shift_names(subject(tmp_path, 3)) == list(SHIFTS)
    assert set(SHIFTS) - set(shift_names(subject(tmp_path, 1))) == {"saturation", "hue"}


def test_a_stronger_shift_is_worse_and_draws_see_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift_robustness, "DRAWN_IMAGES", 8)
    monkeypatch.setattr(shift_robustness, "DRAWS", 2)
    steps: list[int] = []
    whom = subject(tmp_path, 1, nn.Flatten())  # raw pixels: 16 for 40 images, which a probe learns by heart
    at_means = shift_measures(whom, "salt_pepper", 0, steps.append)
    assert steps == list(SEVERITIES) and not any("draws" in key for key in at_means)
    assert (8 * at_means["shifts.salt_pepper.2.at_means.top1"]).is_integer()  # beside the draws of another run
    assert at_means["shifts.salt_pepper.1.nll"] < at_means["shifts.salt_pepper.5.nll"]
    found = shift_measures(subject(tmp_path, 1), "salt_pepper", 3, steps.append)
    # of 8 images: a multiple of an eighth
    assert (8 * found["shifts.salt_pepper.2.draws.top1"]).is_integer() and found[
        "shifts.salt_pepper.2.draws.entropy"
    ] > 0
    assert (8 * found["shifts.salt_pepper.2.at_means.top1"]).is_integer()
    assert shift_settings(whom, 3) == {"images": 40, "seed": 0, "side": 4, "drawn_images": 8, "draws": 2}
    assert shift_settings(whom, 0) == {"images": 40, "seed": 0, "side": 4, "drawn_images": 8}
