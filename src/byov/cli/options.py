"""What the commands take: one class a command, from which its help is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from byov.config import Config


@dataclass(frozen=True)
class Train:
    """Train an encoder on images without labels (byov, byol), or with them (supervised, supervised-bbb).

    Without a RECIPE one is chosen from the images. Flags override the recipe.
    """

    out: Annotated[Path, arg(metavar="RUN")]
    """Folder to write the run to; must not exist yet."""
    recipe: Annotated[str | None, Positional, arg(metavar="[RECIPE]")] = None
    """A recipe's name or the path of its YAML file."""
    resume: bool = False
    """Go on with the run in --out exactly where it stopped."""
    extend: Annotated[int | None, arg(metavar="EPOCHS")] = None
    """Lengthen the finished run in --out by this many epochs."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class Evaluate:
    """Measure a run on images, best with labels; writes RUN/results/evaluation.json.

    A linear probe and neighbours, calibration, and what each uncertainty is worth; compared with an untrained encoder
    and raw pixels. Without labels: whether it finds an image from an augmented view of it. Stopped, it resumes: give
    the same command again.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder."""
    data: Annotated[str | None, arg(metavar="SOURCE")] = None
    """Source, best with labels. Unset: the one the run was trained on."""
    draws: Annotated[int, arg(metavar="K")] = 0
    """Draws of the weights: the posterior predictive, and the scores that need it. A run without random weights has
    none."""
    baseline: Annotated[Path | None, arg(metavar="RUN2")] = None
    """Also the difference to this run; its evaluation is read, or made if there is none."""
    shifts: bool = False
    """Also under fifteen shifts of the images, five severities each (with a few draws, if there are --draws)."""
    ood: Annotated[tuple[str, ...], arg(metavar="SOURCE [SOURCE ...]")] = ()
    """Also tell images of these sources from the test images."""
    semi: bool = False
    """Also with 1% and 10% of the labels."""
    align: Annotated[tuple[Path, ...], arg(metavar="RUN [RUN]")] = ()
    """Also whether it is unsure of the same images as this supervised-bbb run of the same data; with a second one, of
    another seed, how well two of these agree."""
    finetune: bool = False
    """Also train all weights on the labels for a few epochs; the run stays as it is."""
    teacher: bool = False
    """Evaluate the teacher's encoder instead of the student's."""
    threads: int | None = None
    """CPU threads. Unset: one a core, or each process's share of them."""
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True)
class Score:
    """Find the odd images, without labels; writes a table (oddness, uncertainty, embedding) and a page to look at.

    Stopped, it goes on where it was: give the same command again.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder."""
    images: Annotated[str, Positional, arg(metavar="IMAGES")]
    """A folder, with all images below it, or a source (`byov data list`)."""
    out: Annotated[Path, arg(metavar="FILE")]
    """The table to write: .parquet, or .csv (without embeddings). Must not exist yet."""
    draws: int = 8
    """Draws of the weights, for the uncertainty. A run without random weights has none: its uncertainty is the distance
    to its ten nearest reference images."""
    fast: bool = False
    """One forward pass per image: the oddness is exact, the uncertainty predicted from the features. The draws are
    only used once, on the reference images, to learn from."""
    embedding: bool = True
    """Put the embeddings into the Parquet file."""
    page: bool = True
    """Also write FILE.html: oddest and most usual images, near-duplicates."""
    threads: int | None = None
    """CPU threads. Unset: one a core."""
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True)
class Prune:
    """Write a pruned run, and what is left of its accuracy at each sparsity."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder; it stays as it is."""
    by: Literal["snr", "magnitude", "variance", "random"]
    """The lowest go first: |mean| / sigma, |mean|, 1 / sigma, or a random order."""
    sparsity: float
    """The part of the weights (of Linear layers and convolutions) that goes, between 0 and 1."""
    out: Annotated[Path, arg(metavar="RUN2")]
    """Folder to write the pruned run to; must not exist yet."""
    scope: Literal["layer", "global"] = "layer"
    """The lowest of each layer, or of all layers together."""
    part: Literal["encoder", "all"] = "encoder"
    """Prune the encoder, or projector and predictor too."""
    structured: bool = False
    """Take out whole neurons, attention heads and channels, which makes the encoder smaller and faster."""
    rounds: int = 1
    """Prune and train on this many times, to the final sparsity."""
    epochs: int = 0
    """Epochs to train after each round. 0: nothing is trained."""
    data: Annotated[str | None, arg(metavar="SOURCE")] = None
    """What to measure on. Unset: the source the run was trained on; without labels, features are compared."""
    curve: tuple[float, ...] = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
    """Sparsities to measure besides, without training."""
    seed: int = 0
    """Of the random order."""
    threads: int | None = None
    """CPU threads. Unset: one a core."""
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True)
class Export:
    """Write a run's encoder to a file that needs no byov."""

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """The run folder."""
    format: Literal["safetensors", "onnx", "timm"]
    """Tensors with a JSON header; ONNX, checked in onnxruntime; or a state dict for timm's model, checked in it."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """The file; must not exist yet. Unset: below RUN/export."""
    posterior: bool = False
    """The log-variances too (safetensors only)."""
    teacher: bool = False
    """The teacher's encoder instead of the student's."""
    with_uncertainty: bool = False
    """Also oddness, uncertainty and their percentiles, as `byov score --fast` gives them (onnx only)."""


@dataclass(frozen=True)
class Report:
    """Write one self-contained page about one or several runs, and print their table."""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN [RUN ...]")]
    """The run folders."""
    out: Annotated[Path, arg(metavar="PAGE")] = Path("report.html")
    """The page to write."""


@dataclass(frozen=True)
class Study:
    """Make a figure or table from runs that are trained where they are missing; can be stopped and repeated."""

    name: Annotated[str, Positional, arg(metavar="NAME")]
    """The study, or all; any other name is answered with a list of them."""
    scale: Literal["micro", "fashion", "mini", "paper"] = "micro"
    """micro: digits; fashion: Fashion-MNIST, 10,000 images, as small a network; mini: CIFAR-10, 10,000 images; paper:
    ImageNet-1k (--data folder:PATH), ViT-B/16."""
    seeds: int | None = None
    """Seeds of every run. Unset: the scale's (1, then 3)."""
    data: Annotated[str | None, arg(metavar="SOURCE")] = None
    """Another source than the scale's."""
    jobs: int | None = None
    """Runs trained at the same time, each on its share of the cores. Unset: one a core, up to 4; on a GPU one."""
    launch: Annotated[str | None, arg(metavar="COMMAND")] = None
    """How a run is started, such as 'torchrun --nproc-per-node 8 -m byov' or 'srun python -m byov'."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("studies")
    """Folder for runs and results."""


@dataclass(frozen=True)
class Ledger:
    """Judge the paper's claims by the studies that have been made; trains nothing."""

    studies: Annotated[Path, arg(metavar="FOLDER")] = Path("studies")
    """Folder that `byov study --out` wrote."""
    out: Annotated[Path, arg(metavar="PAGE")] = Path("results.md")
    """Page to write; a JSON with all numbers and a folder of figures go beside it."""


@dataclass(frozen=True)
class Data:
    """List the image sources, or fetch one."""

    action: Positional[Literal["list", "get"]]
    """list: what there is. get: fetch NAME and check its digest."""
    name: Annotated[str | None, Positional, arg(metavar="[NAME]")] = None
    """The source to fetch."""
