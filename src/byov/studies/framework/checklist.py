"""The paper's claims by section: the checklist for the ledger, and the claims that no study here can judge."""

from __future__ import annotations

import re
from dataclasses import dataclass

SECTIONS = {
    "Abstract": "Abstract",
    "1": "1 Introduction",
    "1.1": "1.1 Contributions",
    "2.1": "2.1 Bayes by Backprop",
    "2.2": "2.2 BYOL",
    "3": "3 The method",
    "4.1": "4.1 Ablations",
    "4.2": "4.2 The posterior distribution",
    "4.3": "4.3 Does BYOV capture meaningful uncertainty?",
    "4.4": "4.4 Pruning",
    "5": "5 Conclusion",
    "B": "Appendix B: Why BBB?",
    "C": "Appendix C: Training details",
    "D": "Appendix D: Number of draws",
    "E": "Appendix E: The posterior over training",
    "F": "Appendix F: Growing Gaussian noise",
    "G": "Appendix G: Should the whole network be Bayesian?",
    "Poster": "The poster",
}
BEYOND = "Beyond the paper"
"""The section for claims of others: of the BYOL talk, and of the reader's summary of the paper."""

_NUMBERED = re.compile(r"(?!and |section )\b[a-z]+\.? \d\w*", re.IGNORECASE)  # "Figure 5", "check 3": not sections
_SECTION = re.compile(r"[Aa]bstract|[Pp]oster|(?<![\w.])(?:[1-5](?:\.\d)?|[B-G])(?![\w.])")


@dataclass(frozen=True)
class NotJudged:
    """A claim without a rule, and the reason."""

    where: str
    says: str
    reason: str


def sections(where: str) -> list[str]:
    """Return the sections that a place names: "Abstract; 4.1, Figure 2" -> Abstract, 4.1."""
    found = (match[0] for match in _SECTION.finditer(_NUMBERED.sub("", where)))
    return [name.capitalize() for name in found]


def missing(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the entries of REQUIRED without a row (where, says) of that section that says all words of the key."""
    known = [(set(sections(where)), says.casefold()) for where, says in rows]

    def answered(section: str, key: str) -> bool:
        return any(section in named and all(word in says for word in key.split()) for named, says in known)

    return [(section, key) for section, key in REQUIRED if not answered(section, key)]


REQUIRED: list[tuple[str, str]] = [
    ("Abstract", "gaussian captures predictive std"),
    ("Abstract", "label-free"),
    ("Abstract", "better ece"),
    ("Abstract", "brier"),
    ("Abstract", "salt ece"),
    ("Abstract", "salt brier"),
    ("Abstract", "augmentations"),
    ("1", "posteriors large likelihood"),
    ("1", "downstream"),
    ("1", "snr magnitude"),
    ("1.1", "imagenet"),
    ("1.1", "priors"),
    ("1.1", "std correlated supervised bbb"),
    ("1.1", "snr magnitude"),
    ("1.1", "sparser"),
    ("2.1", "cold"),
    ("2.2", "predictor"),
    ("3", "generalised posterior"),
    ("4.1", "better ece"),
    ("4.1", "better reliability"),
    ("4.1", "lower top-1"),
    ("4.1", "lower top-5"),
    ("4.1", "lower resolution"),
    ("4.1", "draws means"),
    ("4.1", "expensive"),
    ("4.1", "as accurate as byol"),
    ("4.1", "n(0, i) n(μ_t, i) differ little"),
    ("4.1", "n(0, i) slightly better n(μ_t, i)"),
    ("4.1", "n(μ_t, σ_t) notably worse"),
    ("4.1", "n(μ_t, σ_t) unstable"),
    ("4.1", "invariant shifts weights"),
    ("4.1", "pulls teacher"),
    ("4.1", "varies during training"),
    ("4.2", "prior large difference sigma"),
    ("4.2", "snr more similar sigma"),
    ("4.2", "maxima"),
    ("4.2", "particularly similar"),
    ("4.2", "beta snr"),
    ("4.2", "invariant rescaling"),
    ("4.3", "gaussian captures predictive std"),
    ("4.3", "correlated beyond confidence"),
    ("4.3", "supervised calibration"),
    ("4.3", "better clean ece"),
    ("4.3", "better clean reliability"),
    ("4.3", "better most shifts ece"),
    ("4.3", "better most shifts reliability"),
    ("4.3", "salt reliab"),
    ("4.3", "worse shearing ece"),
    ("4.3", "worse shearing reliability"),
    ("4.3", "worse gaussian noise ece"),
    ("4.3", "worse gaussian noise reliability"),
    ("4.4", "snr magnitude"),
    ("4.4", "sparser"),
    ("4.4", "snr variance alone"),
    ("4.4", "confidence"),
    ("5", "pruning"),
    ("5", "correlated supervised"),
    ("5", "approximate inference"),
    ("B", "flipout"),
    ("B", "dropout"),
    ("B", "unbiased"),
    ("C", "weight decay"),
    ("C", "annealing constant"),
    ("C", "exp softplus"),
    ("C", "out of the box"),
    ("C", "initial"),
    ("D", "standard deviation converges"),
    ("D", "expectation stable"),
    ("D", "across models"),
    ("D", "thirty"),
    ("E", "beta small impact snr"),
    ("E", "maximum snr beta"),
    ("E", "projector predictor smaller"),
    ("F", "encoder projector predictor correlate"),
    ("F", "average variance grows"),
    ("F", "spread shrinks"),
    ("G", "fully bayesian convolution"),
    ("G", "fully bayesian linear"),
    ("G", "below baseline"),
    ("G", "annealed beats constant"),
    ("G", "n(μ_t, σ_t) worse"),
    ("G", "memory"),
    ("G", "doubles"),
    ("Poster", "everywhere except"),
]
"""(section, lower-case words of the row's sentence): one for each claim of the paper."""

NOT_JUDGED = [
    NotJudged(
        "Abstract",
        "This is preliminary evidence that the posterior is useful for label-free uncertainty estimation",
        "A conclusion, not a measurement: the evidence for it is judged in 4.3. `byov study score` reports how good "
        "label-free scores are here, image by image.",
    ),
    NotJudged(
        "Abstract",
        "BYOV has better calibration and reliability under various augmentations",
        "Judged in 4.3, shift by shift.",
    ),
    NotJudged(
        "1",
        "Bayes by Backprop can learn parameter posteriors in self-supervised learning, despite large models and "
        "the absence of a likelihood",
        "This library shows by running that it can, for small models; the other rows ask whether the posteriors are "
        "useful.",
    ),
    NotJudged(
        "1",
        "The parameter distributions provide uncertainty quantification in downstream tasks",
        "A summary: judged in 4.1 (calibration) and 4.3.",
    ),
    NotJudged(
        "1",
        "Pruning by SNR preserves better performance than pruning by magnitude in self-supervised models",
        "Judged in 4.4.",
    ),
    NotJudged(
        "1.1",
        "Bayes by Backprop is scaled to Vision Transformers and trained on ImageNet-1k",
        "Needs ImageNet-1k and accelerators: there is a recipe (imagenet-vit-b16-byov), but no run.",
    ),
    NotJudged("1.1", "The choice of priors has an impact on BYOV's posterior", "Judged in 4.1 and 4.2."),
    NotJudged(
        "2.1",
        "In practice a beta below 1, a cold posterior, improves predictive performance",
        "From cited work on supervised networks. How accuracy depends on the temperature here: "
        "`byov study working-point`.",
    ),
    NotJudged(
        "2.2",
        "The predictor is necessary to prevent collapse",
        "From cited work (Grill et al. 2020); no study here trains without a predictor.",
    ),
    NotJudged(
        "3",
        "Cosine similarity is no likelihood, so that what is estimated is a generalised posterior",
        "A definition. The sign in equation (2) is a typo: its KL must be added where the loss is minimised.",
    ),
    NotJudged(
        "4.1",
        "The mean over draws is more expensive to compute than the means",
        "True by construction: K draws take K passes.",
    ),
    NotJudged(
        "4.1",
        "N(0, I) and N(μ_T, I) differ little because performance is relatively invariant to constant shifts in the "
        "weights",
        "The authors call it a hypothesis.",
    ),
    NotJudged(
        "4.1",
        "N(μ_T, Σ_T) pulls the student towards the teacher, since Σ_T is small, and so keeps the two too close",
        "The authors call it a hypothesis.",
    ),
    NotJudged(
        "4.1",
        "N(μ_T, Σ_T) is unstable because the prior varies during training",
        'The authors say "likely"; the instability itself is judged above.',
    ),
    NotJudged(
        "4.2",
        "That SNR is more similar than sigma supports the idea that performance is relatively invariant to rescaling",
        "An interpretation of claims that are judged above.",
    ),
    NotJudged(
        "4.3",
        "Of supervised networks, Bayes by Backprop improves calibration and reliability",
        "From cited work (Ovadia et al. 2019); no study here compares supervised networks.",
    ),
    NotJudged(
        "4.4",
        "A high posterior variance means that the network lacks confidence in a weight's value",
        "An interpretation; `byov study pruning-ablation` judges what a weight's own sigma adds to its magnitude.",
    ),
    NotJudged("4.4", "Pruning by SNR gives better performance with a sparser model", "Judged in 1.1, with its number."),
    NotJudged("5", "SNR is a good metric for pruning", "Judged in 4.4."),
    NotJudged(
        "5",
        "The distributions can be used for approximate inference in downstream tasks",
        'The authors say "suggesting". What draws add to the means is judged in 4.1.',
    ),
    NotJudged(
        "B",
        "Bayes by Backprop has better ECE and Brier than expectation propagation, dropout and last-layer variants",
        "From cited work (Ovadia et al. 2019), on supervised networks.",
    ),
    NotJudged(
        "B",
        "One draw per minibatch gives an unbiased estimate of the gradient, if one of high variance",
        "Mathematics.",
    ),
    NotJudged(
        "C",
        "Bayes by Backprop does not work out of the box with BYOL",
        "Not precise enough to judge as a whole; the changes it needed are judged one by one.",
    ),
    NotJudged(
        "C",
        "Log-variances are initialised with -10, means with trunc_normal(std=0.02)",
        "A setting, which is also ours; nothing is claimed about alternatives.",
    ),
    NotJudged(
        "D, Figure 5",
        "The standard deviation of the expectation falls as draws are added, under all shifts",
        "Arithmetic of the bootstrap: for K of 50 fixed draws, with replacement, it falls as 1 / sqrt(K) for any "
        "model. How much remains at 50 is judged above.",
    ),
    NotJudged(
        "D, Figure 5",
        "That the std converges and the expectation is stable is consistent across models",
        "Only one model is measured here, the standard BYOV, over seeds.",
    ),
    NotJudged("D", "Other work takes thirty draws and does not say why", "About cited work."),
    NotJudged("G", "A Gaussian posterior doubles the number of parameters", "True by construction."),
    NotJudged(
        "G",
        "Most of an accelerator's memory is activations and their gradients, so that memory hardly grows",
        "From cited work, and depends on network and batch. At our scale the peak memory of a training process is "
        "mostly Python and torch, so the claim could not fail. `byov study appendix-bc` reports it without a verdict; "
        "`benchmarks/results.md` has the peak memory of training BYOV, also beyond the imports. Not measured at the "
        "scale of ImageNet.",
    ),
    NotJudged(
        "Poster",
        "Under shifts BYOV outperforms BYOL everywhere except for shearing and additive Gaussian noise",
        'The paper says "many": judged in 4.3 as most; the figure of `byov study fig4-shift` shows each shift.',
    ),
    NotJudged(
        "BYOL talk",
        "BYOL without a predictor collapses, and barely learns without an averaged teacher",
        "No study here trains without them.",
    ),
    NotJudged(
        "BYOL talk",
        "BYOL needs a norm or a good initialisation, not batch statistics",
        "No study here varies the norm; `byov train --model.norm` does.",
    ),
    NotJudged(
        "BYOL talk",
        "BYOL is less sensitive to the choice of views and to small batches than SimCLR",
        "No study here trains SimCLR.",
    ),
]
