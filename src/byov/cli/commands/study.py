"""`byov study`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from byov._core.errors import BadInput
from byov._core.files import disk_space_checked
from byov.cli import process
from byov.cli.parsing import parse


@dataclass(frozen=True)
class Options:
    """Reproduce a figure or table; trains the runs it needs. Can be interrupted and repeated."""

    name: Annotated[str, Positional, arg(metavar="NAME")]
    """The study, or all. Any other name prints the list of studies."""
    scale: Literal["micro", "fashion", "mini", "adapted", "paper"] = "micro"
    """micro: digits. fashion: 10,000 images of Fashion-MNIST. mini: 10,000 images of CIFAR-10.
    adapted: EfficientNet-Lite0 with ImageNet weights and a frozen trunk, on 10,000 images of CIFAR-10 or --data
    folder:PATH. paper: ImageNet-1k (--data folder:PATH) with ViT-B/16."""
    seeds: int | None = None
    """Seeds per run. Unset: the scale's, 1 or 3."""
    data: Annotated[str | None, arg(metavar="SOURCE")] = None
    """Another source than the scale's."""
    jobs: int | None = None
    """Runs trained at the same time, each on its share of the cores. Unset: one per core, up to 4; one on a GPU."""
    launch: Annotated[str | None, arg(metavar="COMMAND")] = None
    """Command that starts a run, such as 'torchrun --nproc-per-node 8 -m byov' or 'srun python -m byov'."""
    dry_run: bool = False
    """Only estimate memory, disk and time: nothing is written."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("studies")
    """Folder for runs and results."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "study", arguments)
    from byov.studies.framework.lab import Lab, estimate_study, make, make_all

    say = partial(print, file=sys.stderr)
    try:
        launch = shlex.split(options.launch or "")
    except ValueError as error:
        raise BadInput(
            f"--launch {options.launch!r} is not a valid command ({str(error).lower()}): fix the quoting."
        ) from error
    lab = Lab(options.out, options.scale, options.seeds, options.data, options.jobs, launch, say)
    if options.dry_run:
        print(estimate_study(lab))
        return process.DONE
    with disk_space_checked(options.out):
        if options.name != "all":
            print(f"written: {make(options.name, lab)}")
            return process.DONE
        failed = []
        for name, why in make_all(lab):
            if why is None:
                print(f"written: {lab.place(name)}", flush=True)
            else:
                failed.append(name)
                print(f"failed: {name}: {why}", file=sys.stderr)
    if failed:
        print(f"byov: some studies failed ({', '.join(failed)}): fix the errors above and repeat.", file=sys.stderr)
    return process.FAILED if failed else process.DONE
