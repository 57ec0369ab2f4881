"""How accuracy and calibration hold under shifts of the test images: at the means, and with a few draws."""

from __future__ import annotations

from collections.abc import Callable

from byov.data.shifts import SEVERITIES, SHIFTS, shifted
from byov.evaluation.labelled import Subject
from byov.evaluation.named_metrics import Measures, below, class_measures, predictive_measures
from byov.evaluation.predictive import predict_classes
from byov.inference.features import features_of
from byov.inference.inputs import spread

IMAGES = 10_000  # at most, at the means
DRAWN_IMAGES = 2000  # at most, with draws
DRAWS = 5  # at most: 2,000 images through 5 draws take as long as 10,000 at the means
SEED = 0


def shift_names(subject: Subject) -> list[str]:
    """The shifts that change images of so many channels."""
    return [name for name, shift in SHIFTS.items() if shift.applies_to(subject.data.test.images.shape[1])]


def shift_measures(subject: Subject, name: str, draws: int, advance: Callable[[int], None]) -> Measures:
    """`shifts.NAME.SEVERITY.*`; with draws also `.draws.*`, and in any case `.at_means.*` on the images that these see.

    So a run with draws can be set beside one that has none.
    """
    chosen = spread(len(subject.data.test), IMAGES)
    images, labels = subject.test_images[chosen], subject.data.test_labels[chosen]
    drawn = spread(len(chosen), DRAWN_IMAGES)
    found: Measures = {}
    for severity in SEVERITIES:
        now = shifted(images, chosen, name, severity, SEED)
        probabilities = subject.probe.probabilities(features_of(subject.encoder, now))
        measures = class_measures(probabilities, labels)
        measures |= below("at_means.", class_measures(probabilities[drawn], labels[drawn]))
        if draws and subject.bank is not None:
            over = predict_classes(subject.bank, subject.probe, now[drawn], min(draws, DRAWS)).aligned
            measures |= below("draws.", predictive_measures(over, labels[drawn]))
        found |= below(f"shifts.{name}.{severity}.", measures)
        advance(severity)
    return found


def shift_settings(subject: Subject, draws: int) -> Measures:
    """What the numbers hang on."""
    images = min(len(subject.data.test), IMAGES)
    found: Measures = {"images": images, "seed": SEED, "side": subject.side, "drawn_images": min(images, DRAWN_IMAGES)}
    return found | ({"draws": min(draws, DRAWS)} if draws else {})
