"""Stop every long command at random moments, in every way a machine has, and check that nothing is lost.

    make chaos-stops                                 # an hour on two idle cores; CHAOS_FLAGS="--minutes 10" for less
    python benchmarks/chaos.py --campaign kills --cases 300 --seed 0

Each case starts from the same small run, stops a command, repeats it until it ends, and compares what it wrote with the
work of a command that was never stopped: bit by bit, clocks aside. A case is lost if the results differ, a traceback
appears, an exit code is not one of ours, a file is left behind, memory passes 2 GiB, or the command hangs.

Commands run in forks of one warm process: the same code as in a process of its own, without 3 s of imports. Only
torchrun and the runs of a study are separate processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image

from byov._core.cache import digest_of, read_entry
from byov.cli.main import main
from byov.runs import checkpoints
from byov.runs.folder import RunFolder, read_log
from byov.scoring import table
from byov.studies.framework import lab

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
MOST_SECONDS = 300  # per command, on a machine that others use too
MOST_MIB = 2048
CLOCK = ("seconds", "second", "memory", "bytes")  # parts of keys whose values differ from run to run
MODEL = ["--model.width", "16", "--model.depth", "1", "--model.heads", "2"]
HEADS = ["--model.head-hidden", "16", "--model.head-output", "8", "--monitor.no-tensorboard", "--threads", "1"]
TRAIN = ["--images", "96", "--optim.batch-size", "16", *MODEL, *HEADS, "--monitor.checkpoint-steps", "4"]


# ------------------------------------------------------------------------------------------------------------ commands


@dataclasses.dataclass(frozen=True)
class Command:
    """A long command: how it is started, where it writes, and what it has written."""

    arguments: Callable[[Path], list[str]]
    outcome: Callable[[Path], str]
    repeated: Callable[[Path], list[str]] | None = None
    """After a stop; None: as the first time."""


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _timeless(value: Any) -> Any:
    """A JSON value without its clocks."""
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not any(word in k for word in CLOCK)}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def _run_outcome(run: Path) -> str:
    tensors, state = checkpoints.load(RunFolder(run).checkpoint)
    rows = [_timeless(row) for row in read_log(RunFolder(run).metrics).rows]
    assert RunFolder(run).summary.is_file(), "there is no summary"
    return _digest(digest_of(tensors), _timeless(state), rows)


def _json_outcome(path: Path) -> str:
    return _digest(_timeless(json.loads(path.read_text(encoding="utf-8"))))


def _evaluation_outcome(work: Path) -> str:
    results = work / "run" / "results"
    rows = read_entry(results / "evaluation.safetensors")
    assert rows is not None
    return _digest(_json_outcome(results / "evaluation.json"), digest_of(rows.tensors))


def _score_outcome(work: Path) -> str:
    assert (work / "odd.html").is_file()
    return _digest(pq.read_table(work / "odd.parquet").to_pylist())


def _prune_outcome(work: Path) -> str:
    out = work / "pruned"
    assert (out / "figures" / "pruning.png").is_file()
    return _digest(_run_outcome(out), _json_outcome(out / "results" / "pruning.json"))


def _study_outcome(work: Path) -> str:
    place = work / "studies" / "fig6" / "micro"
    assert (place / "fig6.svg").is_file() and (place / "fig6.csv").is_file()
    return _json_outcome(place / "fig6.json")


def _or_resume(out: str, *first: str) -> dict[str, Any]:
    def repeated(work: Path) -> list[str]:
        there = (work / out / "config.yaml").is_file()
        return ["train", "--resume", "--out", str(work / out)] if there else [*started(work)]

    def started(work: Path) -> list[str]:
        return ["train", *(each.format(work=work) for each in first), "--out", str(work / out)]

    return {"arguments": started, "repeated": repeated, "outcome": lambda work: _run_outcome(work / out)}


CACHED = ["--data", "npz:{work}/colour.npz", "--init", "{work}/trunk", "--method", "byol", "--views.cached", "4"]
RESNET = ["--model.backbone", "resnet-18", "--model.width", "4", "--model.stem", "cifar", "--model.norm", "batch"]
COMMANDS = {
    "train": Command(**_or_resume("new", "digits", *TRAIN, "--optim.epochs", "8")),
    "posthoc": Command(**_or_resume("new", "digits", "--method", "posthoc", "--init", "{work}/run", *TRAIN[:-2])),
    "view cache": Command(
        **_or_resume(
            "new",
            *("digits", *CACHED, *RESNET, "--model.frozen-until", "layer2", "--images", "24", "--calibration", "0"),
            *("--optim.batch-size", "8", "--optim.epochs", "4", "--monitor.checkpoint-steps", "2", *HEADS),
        )
    ),
    "evaluate": Command(
        lambda work: ["evaluate", str(work / "run"), "--draws", "2", "--threads", "1"], _evaluation_outcome
    ),
    "score": Command(
        lambda work: [
            *("score", str(work / "run"), str(work / "photos"), "--out", str(work / "odd.parquet")),
            *("--draws", "2", "--threads", "1"),
        ],
        _score_outcome,
    ),
    "prune": Command(
        lambda work: [
            *("prune", str(work / "run"), "--by", "snr", "--sparsity", "0.5", "--out", str(work / "pruned")),
            *("--epochs", "1", "--rounds", "2", "--curve", "0.9", "--threads", "1"),
        ],
        _prune_outcome,
    ),
    "study": Command(
        lambda work: ["study", "fig6", "--scale", "micro", "--jobs", "1", "--out", str(work / "studies")],
        _study_outcome,
    ),
}


def prepare(base: Path) -> None:
    """Make what all cases start from: a run, photographs, colour images, and a network with a trunk."""
    rng = np.random.default_rng(0)
    (base / "photos").mkdir(parents=True)
    for i in range(200):
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(base / "photos" / f"{i:03d}.png")
    colour = rng.integers(0, 256, (32, 8, 8, 3), dtype=np.uint8)
    np.savez(base / "colour.npz", x_train=colour, y_train=np.arange(32) % 4)
    _here(["train", "digits", *TRAIN, "--optim.epochs", "2", "--out", str(base / "run")])
    trunk = ["--images", "24", "--optim.batch-size", "8", "--optim.epochs", "1", "--calibration", "0", *RESNET, *HEADS]
    _here(["train", "digits", "--data", f"npz:{base}/colour.npz", "--method", "byol", *trunk, "--out", f"{base}/trunk"])


def _here(arguments: list[str]) -> None:
    """Run a command in this process, which also imports and compiles all it needs."""
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == DONE, f"byov {' '.join(arguments)} ended with {ended.code}"


# ----------------------------------------------------------------------------------------------------------- processes


@dataclasses.dataclass
class Ended:
    code: int
    """The exit code; negative: the signal that ended it."""
    said: str
    mib: float


class Started:
    """A command in a fork of this process."""

    def __init__(self, arguments: list[str], limit: int | None = None) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when it has ended)
        sys.stdout.flush()
        sys.stderr.flush()
        self.begun = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(arguments, limit)

    def _run(self, arguments: list[str], limit: int | None) -> None:
        os.dup2(self.output.fileno(), 1)
        os.dup2(self.output.fileno(), 2)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        code = 99
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 99
        except BaseException:  # a traceback for the report
            import traceback

            traceback.print_exc()
        finally:
            lock = sys.modules["byov._core.lock"]
            lock.release_all()  # as atexit does
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        while True:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - self.begun > MOST_SECONDS:
                self.send(signal.SIGKILL)
                os.wait4(self.pid, 0)
                return Ended(98, "it hangs", 0.0)
            time.sleep(0.005)
        self.output.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), self.output.read(), usage.ru_maxrss / 1024)


# ----------------------------------------------------------------------------------------------------------- campaigns


class Lost(Exception):
    """What a case has lost, in a sentence."""


class Chaos:
    """One run of all campaigns in a folder."""

    def __init__(self, folder: Path, seed: int, minutes: float, verbose: bool = False) -> None:
        self.verbose = verbose
        self.base, self.work, self.chance = folder / "base", folder / "work", random.Random(seed)
        self.end = time.monotonic() + 60 * minutes
        prepare(self.base)
        self.whole: dict[str, tuple[str, float]] = {}  # outcome and seconds of a command that is not stopped

    def fresh(self) -> Path:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.base, self.work)
        return self.work

    def reference(self, name: str) -> tuple[str, float]:
        if name not in self.whole:
            work, begun = self.fresh(), time.monotonic()
            ended = Started(COMMANDS[name].arguments(work)).wait()
            if ended.code != DONE:
                raise SystemExit(f"{name} does not even run: {ended.code}\n{ended.said}")
            self.whole[name] = COMMANDS[name].outcome(work), time.monotonic() - begun
        return self.whole[name]

    def repeated(self, name: str) -> list[str]:
        command = COMMANDS[name]
        return (command.repeated or command.arguments)(self.work)

    def finish(self, name: str) -> None:
        """Repeat a stopped command; it must end as if it had never been stopped, and leave nothing behind."""
        command = COMMANDS[name]
        again = True
        try:
            again = command.outcome(self.work) != self.reference(name)[0]
        except Exception:  # not finished
            again = True
        if again:
            proper(ended := Started(self.repeated(name)).wait())
            if ended.code != DONE:
                raise Lost(f"repeated, it ends with {ended.code}: {ended.said[-300:]}")
            if command.outcome(self.work) != self.reference(name)[0]:
                raise Lost("its results differ from those of a command that was never stopped")
        left = [path for pattern in (".*.tmp", "*.lock", ".*.partial") for path in self.work.rglob(pattern)]
        if left and again:
            raise Lost(f"{left[0].name} is left behind")

    def kills(self, name: str) -> None:
        """kill -9, up to three times in a row."""
        _, seconds = self.reference(name)
        self.fresh()
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            started = Started(self.repeated(name))
            time.sleep(self.chance.uniform(0, 1.05 * seconds))
            started.send(signal.SIGKILL)
            if (ended := started.wait()).code == DONE:
                break
            self.stops += 1
            if ended.code != -signal.SIGKILL:
                proper(ended)
                raise Lost(f"it ended by itself with {ended.code}: {ended.said[-300:]}")
        self.finish(name)

    study = kills

    def signals(self, name: str) -> None:
        """Ctrl-C or SIGTERM: saved, one sentence, exit code 130."""
        _, seconds = self.reference(name)
        self.fresh()
        started = Started(self.repeated(name))
        time.sleep(self.chance.uniform(0.1, seconds))
        with_ = self.chance.choice((signal.SIGINT, signal.SIGTERM))
        started.send(with_)
        proper(ended := started.wait())
        self.stops += 1
        if ended.code not in (DONE, INTERRUPTED):
            raise Lost(f"{with_.name} ends it with {ended.code}: {ended.said[-300:]}")
        self.finish(name)

    def full_disk(self, name: str) -> None:
        """No space on the disk of the work, a small tmpfs; then there is again."""
        self.reference(name)
        with self.small_disk() as resize:
            shutil.copytree(self.base, self.work, dirs_exist_ok=True)
            used = sum(path.stat().st_blocks * 512 for path in self.work.rglob("*") if path.is_file())
            resize(used + self.chance.randrange(4096, 200_000))
            proper(ended := Started(self.repeated(name)).wait())
            self.stops += 1
            if ended.code not in (DONE, BAD_INPUT) or (ended.code and "space" not in ended.said):
                raise Lost(f"a full disk ends it with {ended.code}: {ended.said[-300:]}")
            resize(1 << 28)
            self.finish(name)

    def read_only(self, name: str) -> None:
        """A disk that cannot be written: one sentence, and nothing changes."""
        self.reference(name)
        with self.small_disk() as resize:
            shutil.copytree(self.base, self.work, dirs_exist_ok=True)
            resize(None)
            proper(ended := Started(COMMANDS[name].arguments(self.work)).wait())
            self.stops += 1
            if ended.code != BAD_INPUT:
                raise Lost(f"a read-only disk ends it with {ended.code}: {ended.said[-300:]}")
            resize(1 << 28)
            self.finish(name)

    def two_processes(self, name: str) -> None:
        """The same command twice at a time: one works, the other stops with one sentence."""
        _, seconds = self.reference(name)
        self.fresh()
        first = Started(COMMANDS[name].arguments(self.work))
        time.sleep(self.chance.uniform(0, seconds))
        second = Started(self.repeated(name))
        both = [first.wait(), second.wait()]
        self.stops += 1
        for ended in both:
            proper(ended)
        if DONE not in (codes := [ended.code for ended in both]) or not set(codes) <= {DONE, FAILED, BAD_INPUT}:
            raise Lost(f"two at a time end with {codes}: {both[0].said[-200:]} | {both[1].said[-200:]}")
        self.finish(name)

    def lost_rank(self, name: str) -> None:
        """kill -9 for one of two processes that torchrun has started: both end; resumed, nothing is lost."""
        if name != "train":
            return
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "byov"]
        key = "train on two processes"
        env = os.environ | {"OMP_NUM_THREADS": "1"}

        def run() -> subprocess.Popen[str]:
            command = [*launch, *self.repeated(name)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

        if key not in self.whole:
            self.fresh()
            whole = run()
            said, _ = whole.communicate(timeout=MOST_SECONDS)
            assert whole.returncode == 0, said
            self.whole[key] = COMMANDS[name].outcome(self.work), 0.0
        self.fresh()
        group = run()
        log = self.work / "new" / "metrics.jsonl"
        until = time.monotonic() + MOST_SECONDS
        while not (log.is_file() and log.stat().st_size) and group.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(self.chance.uniform(0, 0.3))
        ranks = subprocess.run(["pgrep", "-P", str(group.pid)], capture_output=True, text=True).stdout.split()
        if len(ranks) == 2 and group.poll() is None:
            os.kill(int(self.chance.choice(ranks)), signal.SIGKILL)
        try:
            group.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired as late:
            group.kill()
            raise Lost("the other rank hangs") from late
        self.stops += 1
        again = run()
        said, _ = again.communicate(timeout=MOST_SECONDS)
        if again.returncode or COMMANDS[name].outcome(self.work) != self.whole[key][0]:
            raise Lost(f"resumed on two processes, it ends with {again.returncode}: {said[-300:]}")

    @contextmanager
    def small_disk(self) -> Iterator[Callable[[int | None], None]]:
        """Mount a tmpfs at the work folder; yields a function that sets its size, or makes it read-only (None)."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", self.work], check=True)

        def resize(size: int | None) -> None:
            how = "remount,ro" if size is None else f"remount,rw,size={size}"
            subprocess.run(["mount", "-o", how, self.work], check=True)

        try:
            yield resize
        finally:
            subprocess.run(["umount", "-l", self.work], check=True)

    def campaign(self, name: str, cases: int, commands: Sequence[str]) -> Row:
        """Run the cases of a campaign in turn over the commands, until there are enough or the time is over."""
        self.stops, lost, per, turn = 0, [], Counter[str](), 0
        one: Callable[[str], None] = getattr(self, name)
        while self.stops < cases and time.monotonic() < self.end:
            command, before = commands[turn % len(commands)], self.stops
            turn += 1
            begun = time.monotonic()
            try:
                one(command)
            except Lost as error:
                lost.append(f"{command}: {error}")
                print(f"  lost: {lost[-1]}", file=sys.stderr, flush=True)
            per[command] += self.stops - before
            if self.verbose:
                print(
                    f"  {name} {command}: {self.stops}, {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True
                )
        return Row(name, self.stops, len(lost), dict(per), lost)


@dataclasses.dataclass
class Row:
    campaign: str
    cases: int
    lost: int
    commands: dict[str, int]
    reasons: list[str]


def proper(ended: Ended) -> None:
    """Raise Lost if a command ended in a way that none may."""
    if ended.code in (98, 99) or "Traceback" in ended.said:
        raise Lost(f"{'it hangs' if ended.code == 98 else 'a traceback'}: {ended.said[-600:]}")
    if ended.mib > MOST_MIB:
        raise Lost(f"it took {ended.mib:,.0f} MiB")


CAMPAIGNS = {  # cases, and the commands
    "kills": (300, [name for name in COMMANDS if name != "study"]),
    "study": (6, ["study"]),  # each takes a minute: its runs are processes of their own
    "signals": (60, [name for name in COMMANDS if name != "study"]),
    "full_disk": (40, [name for name in COMMANDS if name != "study"]),
    "read_only": (6, [name for name in COMMANDS if name != "study"]),
    "two_processes": (30, [name for name in COMMANDS if name != "study"]),
    "lost_rank": (4, ["train"]),
}


def run(folder: Path, given: argparse.Namespace) -> list[Row]:
    """Run campaigns; each has its own random numbers, so that it can be repeated alone."""
    table.CHUNK_IMAGES = 64
    lab.SCALES["micro"] = lab.Scale("digits", "digits", 96, 1, 2, "seconds", epochs=1)
    torch.set_num_threads(1)
    chaos, rows = Chaos(folder, given.seed, given.minutes, given.verbose), []
    for name in given.campaign:
        chaos.chance.seed(f"{given.seed} {name}")
        most, commands = CAMPAIGNS[name]
        rows.append(row := chaos.campaign(name, given.cases or most, given.commands or commands))
        print(f"{row.campaign}: {row.cases} cases, {row.lost} lost {row.commands}", file=sys.stderr, flush=True)
    return rows


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--campaign", nargs="+", choices=CAMPAIGNS, default=list(CAMPAIGNS))
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, help="only these")
    parser.add_argument("--cases", type=int, help="per campaign; unset: 300 kills, fewer of the others")
    parser.add_argument("--minutes", type=float, default=60, help="no case is begun after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="name every case and its time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder), given)
    print("| campaign | cases | survived | lost | commands |\n|---|---|---|---|---|")
    for row in rows:
        commands = ", ".join(f"{name} {count}" for name, count in row.commands.items())
        print(f"| {row.campaign.replace('_', ' ')} | {row.cases} | {row.cases - row.lost} | {row.lost} | {commands} |")
    sys.exit(any(row.lost for row in rows))


if __name__ == "__main__":
    _main()
