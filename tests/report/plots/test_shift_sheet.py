"""The contact sheet of the shifts: the right pictures in the right places, and the command that writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from byov.data.shifts import SHIFTS, shifted
from byov.report.plots.shift_sheet import contact_sheet, main, mosaic


def test_tiles_lie_in_rows_with_white_between() -> None:
    tiles = torch.arange(6, dtype=torch.uint8).view(2, 3, 1, 1, 1).expand(2, 3, 1, 2, 2)
    got = mosaic(tiles, 1)
    assert got.shape == (6, 9, 3)
    assert got[1::3, 1::3, 0].tolist() == got[2::3, 2::3, 1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (got[::3] == 255).all() and (got[:, ::3] == 255).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_row_a_shift_and_a_column_a_severity(channels: int) -> None:
    images = torch.randint(0, 255, (2, channels, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    ids = torch.tensor([5, 9])
    axes = contact_sheet(images, ids, seed=3).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [name for name in SHIFTS if channels == 3 or name not in ("saturation", "hue")]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["original", "1", "2", "3", "4", "5"] * 2
    sheet = np.asarray(axes.images[0].get_array())
    row, column = names.index("rotation"), 6 + 4  # of the second image, severity 4
    tile = sheet[9 * row + 1 : 9 * row + 9, 9 * column + 1 : 9 * column + 9]
    want = shifted(images, ids, "rotation", 4, 3)[1].permute(1, 2, 0).expand(-1, -1, 3)
    assert np.array_equal(tile, want.numpy())
    original = sheet[9 * row + 1 : 9 * row + 9, 9 * 6 + 1 : 9 * 6 + 9]
    assert np.array_equal(original, images[1].permute(1, 2, 0).expand(-1, -1, 3).numpy())


def test_the_command_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "sheet.png"), "--data", "digits", "--images", "2"]) == 0
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.format == "PNG" and picture.width > 300 and picture.height > 600
    assert "sheet.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--data", "digitz"], "did you mean digits"), (["--images", "100000"], "give numbers from 0 to 354")],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "sheet.png"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
