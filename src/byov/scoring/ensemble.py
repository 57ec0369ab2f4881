"""Score images with several runs at once: do their draws agree on which reference images are nearest?

The runs must have the same reference images, so that their neighbourhoods can be compared. Each encodes images and
reference images with its own network at its own draws; a run without random weights gives its means as one draw. The
uncertainty is that of `scores.DEFAULT` over all draws of all runs. Oddness and embedding are the first run's.

    scorer = EnsembleScorer(byov.load("runs/mine"), [byov.load("runs/other")])
    scorer.scores(images)                         # like `Scorer`
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from byov._core.callbacks import Say, say_on_stderr
from byov._core.errors import BadInput
from byov.data.transforms import resized
from byov.inference.run import BATCH, ReferenceSet, Run, at_draw, at_this_draw, before_draws
from byov.scoring.scores import DEFAULT, DRAWS, ODDNESS, Scorer, TermSums


class EnsembleScorer(Scorer):
    """A `Scorer` whose uncertainty is the disagreement between the draws of several runs.

    Args:
        run: The first run, whose oddness, embedding and percentiles' images are used.
        others: Further runs on the same images.
        draws: Weight draws of each run.
        batch_size: Images encoded at a time.
        say: Called with a sentence where percentiles are not available.

    Raises:
        BadInput: If a run is given twice, or has other reference images than the first.
    """

    def __init__(
        self,
        run: Run,
        others: Sequence[Run],
        draws: int = DRAWS,
        *,
        batch_size: int = BATCH,
        say: Say = say_on_stderr,
    ) -> None:
        super().__init__(run, draws=draws, batch_size=batch_size, say=say)
        self.uncertainty, self.draws = DEFAULT, draws
        self.others = tuple(map(ReferenceSet, others))
        for i, other in enumerate(self.others):
            _check_shared(other, self.reference, self.others[:i])

    def _score(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images = resized(images, self.reference.run.image_shape[-1])
        own = self.reference.own(images)
        at_means, over_draws, total = TermSums([ODDNESS]), TermSums([self.uncertainty]), 0
        for reference in (self.reference, *self.others):
            run = reference.run
            before = before_draws(run.encoder, images, run.image_shape[-1], self.batch_size)

            def features_at(k: int | None, run: Run = run, before: Tensor = before) -> Tensor:
                with at_draw(run.encoder, run.config.seed, k):
                    return at_this_draw(run.encoder, before, self.batch_size)

            if reference is self.reference:
                embedding = features_at(None)
                at_means.add(reference, embedding, None, own)
            ks: Sequence[int | None] = [None] if run.deterministic else range(self.draws)
            for k in ks:
                over_draws.add(reference, features_at(k), k, own, self.reference)
            total += len(ks)
        return at_means.scores(0)[ODDNESS], over_draws.scores(total)[self.uncertainty], embedding

    def _calibration_key(self) -> str:
        weights = hashlib.sha256("".join(other.folder.name for other in self.others).encode()).hexdigest()[:16]
        return f"{super()._calibration_key()}-{weights}"


SHARED = ("data", "images", "calibration", "image_size")  # settings that decide on the reference images


def _check_shared(reference: ReferenceSet, first: ReferenceSet, others: Sequence[ReferenceSet]) -> None:
    """Raise BadInput unless a run adds something to an ensemble, and has the reference images of its first run."""
    ours, theirs = reference.run, first.run
    if any(reference.folder.name == other.folder.name for other in (first, *others)):
        raise BadInput(f"{ours.folder} is in the ensemble twice: give runs that differ.")
    if reference.same_images(first) and ours.image_shape == theirs.image_shape:
        return
    pairs = ((name, getattr(ours.config, name), getattr(theirs.config, name)) for name in SHARED)
    differs = next(
        (f"{name} is {one} in one and {other} in the other" for name, one, other in pairs if one != other), ""
    )
    raise BadInput(
        f"{ours.folder} and {theirs.folder} cannot be one ensemble, since "
        f"{differs or 'their images have changed between them'}: give runs with the same reference images."
    )
