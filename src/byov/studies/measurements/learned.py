"""Whether an encoder has learned anything: its probe against those of raw pixels and of the untrained encoder.

A verdict about an encoder that is worse than its pixels says little about the method: this is the precondition of every
claim. A study checks its first arm of BYOV and of BYOL (`Lab.learned`), with every seed, on its test images.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn

from byov._core.callbacks import Say
from byov.evaluation.evaluate import PIXELS
from byov.evaluation.probe import subject_of
from byov.inference.run import Run
from byov.metrics import top_k_accuracy
from byov.metrics.resampling import RESAMPLES
from byov.studies.framework.claims import Row, Rows, Verdict, differences, judge
from byov.studies.measurements.pruned import top1_difference

METHODS = ("byov", "byol")  # the others learn from labels, or nothing
SETTINGS = {"pixels": PIXELS, "resamples": RESAMPLES}
"""What the numbers depend on, apart from the run."""
RIVALS = {"untrained": "the untrained encoder", "pixels": "raw pixels"}


def compare_with_rivals(run: Run, say: Say) -> Row:
    """Return top-1 of the encoder and of its rivals, with the paired differences."""
    own = subject_of(run, say=say)
    labels = own.data.test_labels
    mine = own.probe.probabilities(own.test_features)
    row: Row = {"top1": top_k_accuracy(mine, labels, 1)}
    rivals = {
        "untrained": replace(own, encoder=run.untrained_encoder()),
        "pixels": replace(own, encoder=nn.Flatten(), side=min(own.side, PIXELS)),
    }
    for name, rival in rivals.items():
        theirs = rival.probe.probabilities(rival.test_features)
        row |= {f"{name}.top1": top_k_accuracy(theirs, labels, 1), **top1_difference(name, mine, theirs, labels)}
    return row


def learned_caveats(rows: Rows) -> list[str]:
    """Say what the encoders do not beat, by the 95% interval over seeds and images; nothing if they beat both.

    One seed is judged by the interval over images: the condition is about these encoders, not about others.
    """
    if not rows:
        return ["it was not measured whether the encoder has learned"]
    caveats = []
    for method in dict.fromkeys(row["method"] for row in rows):
        found = {name: judge(differences(rows, name, method=method), size=1.0) for name in RIVALS}
        beaten = {name: _low(each) > 0 for name, each in found.items()}
        if not all(beaten.values()):
            worse = [
                f"{RIVALS[name]} ({each.estimate:+.1f} points)"
                for name, each in found.items()
                if not beaten[name] and each.estimate is not None
            ]
            caveats.append(f"{method.upper()}'s probe is not shown to beat {' and '.join(worse)}")
    return caveats


def _low(found: Verdict) -> float:
    """The lower end of the interval; with one seed, of that over images."""
    if found.low is not None:
        return found.low
    return -math.inf if found.estimate is None else found.estimate - 1.96 * found.image_error
