"""How far a run's uncertainty over draws can be trusted: whether it finds errors and images of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from byov._core.callbacks import Say
from byov.evaluation.labelled import subject_of
from byov.evaluation.named_metrics import Measures, Scores, errors_of, strict
from byov.evaluation.ood import OOD_IMAGES, outside_images, plain_name
from byov.evaluation.per_image_uncertainty import LABEL_FREE, Drawn, pass_draws
from byov.inference.load import Run
from byov.inference.reference import ReferenceSet
from byov.metrics import auroc, ood_detection
from byov.scoring.candidates import DEFAULT

SCORES = ("label_free", "probe")  # the run's own score, without labels; one less the top probability over draws


def trust_measures(run: Run, draws: int, ood: Sequence[str], say: Say) -> Measures:
    """`errors.SCORE` and `ood.SOURCE.SCORE`: AUROCs."""
    subject = replace(subject_of(run, say=say), bank=ReferenceSet(run))
    inside = pass_draws(subject, subject.test_images, draws, "draws")
    scores, wrong = _scores(inside), errors_of(inside.aligned.mean, subject.data.test_labels)
    found: Measures = {f"errors.{name}": auroc(score, wrong) for name, score in scores.items()}
    for spec in ood:
        outside = _scores(pass_draws(subject, outside_images(subject, spec, say), draws, spec))
        for name, score in outside.items():
            found[f"ood.{plain_name(spec)}.{name}"] = ood_detection(scores[name], score).auroc
    return strict(found)


def trust_settings(draws: int, ood: Sequence[str]) -> Measures:
    """What the numbers hang on."""
    return {"draws": draws, "score": DEFAULT, "ood": list(ood), "ood_images": OOD_IMAGES}


def _scores(drawn: Drawn) -> Scores:
    scores = drawn.scores()
    return dict(zip(SCORES, (scores[LABEL_FREE + DEFAULT], scores["draws_max_softmax"]), strict=True))
