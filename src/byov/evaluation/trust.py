"""How far a run's uncertainty over draws can be trusted: whether it finds errors and images of another kind."""

from __future__ import annotations

from collections.abc import Sequence

from byov.data.decoded import Say
from byov.evaluation.measures import Measures, Scores, errors_of, strict
from byov.evaluation.outside import outside_images, plain_name
from byov.evaluation.reference import Bank
from byov.evaluation.run import Run
from byov.evaluation.score import DEFAULT
from byov.evaluation.subject import Subject, load_labelled
from byov.evaluation.uncertainties import LABEL_FREE, Drawn, pass_draws
from byov.metrics import auroc, ece, ood_detection

SCORES = ("label_free", "probe")  # the run's own score, without labels; one less the top probability over draws


def trust_measures(run: Run, draws: int, ood: Sequence[str], say: Say) -> Measures:
    """`errors.SCORE` and `ood.SOURCE.SCORE`: AUROCs; `draws.ece`: of the probe over aligned draws."""
    data = load_labelled(run, run.config.data, lambda what, done, total: None, say)
    subject = Subject(run, run.encoder, data, run.image_shape[-1], lambda what, done, total: None, Bank(run))
    inside = pass_draws(subject, subject.test_images, draws, "draws")
    scores, labels = _scores(inside), data.test_labels
    wrong = errors_of(inside.aligned.mean, labels)
    found: Measures = {"draws.ece": ece(inside.aligned.mean, labels)}
    found |= {f"errors.{name}": auroc(score, wrong) for name, score in scores.items()}
    for spec in ood:
        outside = _scores(pass_draws(subject, outside_images(subject, spec, say), draws, spec))
        for name, score in outside.items():
            found[f"ood.{plain_name(spec)}.{name}"] = ood_detection(scores[name], score).auroc
    return strict(found)


def _scores(drawn: Drawn) -> Scores:
    scores = drawn.scores()
    return dict(zip(SCORES, (scores[LABEL_FREE + DEFAULT], scores["draws_max_softmax"]), strict=True))
