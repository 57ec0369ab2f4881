"""The images a run is surest and least sure of, small, with their score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from byov._core.errors import BadInput
from byov.data.images import ImageSet
from byov.data.resample import resized
from byov.data.sources import open_source
from byov.evaluation.evaluate import fingerprint
from byov.report.elements import Section, Strip, Thumbnail
from byov.report.gallery import LOSSLESS_SIDE, data_uri
from byov.report.run_data import Run

EACH = 8  # images from either end


def example_section(runs: Sequence[Run]) -> Section:
    strips: list[Strip] = []
    notes: list[str] = []
    for run in runs:
        try:
            strips += _strips(run, _test_images(run))
        except (BadInput, OSError) as error:
            notes.append(f"{run.name}: {error}")
    return Section(
        "Surest and least sure",
        "examples",
        "Test images from both ends of the ranking. P: percentile among all test images. Framed: the probe is wrong.",
        strips=strips,
        notes=notes if strips else [],
        legend=False,
        empty=" ".join(["No images to show.", *notes]),
    )


def _test_images(run: Run) -> ImageSet:
    """The images that the rows of the evaluation are about; bad input where they cannot be had."""
    if f"score.{run.default_score}" not in run.images:
        raise BadInput(f"there is no score of each test image yet: `byov evaluate {run.path}` adds them.")
    source = open_source(str(run.settings.get("data", run.config.data)), run.config.image_size)
    test = source.load("test", say=lambda sentence: None)
    if test.labels is None or fingerprint(test) != run.evaluated_images:
        raise BadInput(f"the images of {source.name} have changed since: `byov evaluate {run.path}` scores them anew.")
    return test


def _strips(run: Run, test: ImageSet) -> list[Strip]:
    score = run.images[f"score.{run.default_score}"]
    order = score.argsort(stable=True)
    each = min(EACH, len(order) // 2)
    percentile = torch.empty_like(score)
    percentile[order] = (torch.arange(len(order), dtype=score.dtype) + 0.5) * (100 / len(order))
    wrong = run.images["means.top1"] == 0
    note = f"Score: {run.default_score}, higher is less certain."
    ends = {"least sure": order.flip(0)[:each], "surest": order[:each]}
    return [
        Strip(f"{run.name}, {end}", note, [_thumbnail(test, int(i), score, percentile, wrong) for i in chosen])
        for end, chosen in ends.items()
    ]


def _thumbnail(test: ImageSet, i: int, score: Tensor, percentile: Tensor, wrong: Tensor) -> Thumbnail:
    assert test.labels is not None
    label = int(test.labels[i])
    image = test.images[i : i + 1]
    small = resized(image, min(LOSSLESS_SIDE, max(image.shape[2:])))
    return Thumbnail(
        data_uri(small[0].numpy()),
        test.classes[label] if test.classes else f"class {label}",
        f"{float(score[i]):.3g}",
        f"P{float(percentile[i]):.1f}",
        bool(wrong[i]),
    )
