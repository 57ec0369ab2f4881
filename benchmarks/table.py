"""Render results.md: every row with its bar, from the numbers in results.json; misses are marked and explained.

All bars are in this file. `rows` holds what the project promised; `details` shows the numbers behind it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bayesian_step import PEERS

Part = dict[str, Any]

# Why a bar is missed, by the row's name. A miss without a sentence here is reported as unexplained.
WHY: dict[str, str] = {
    "posterior predictive, 1,000 images x 4 draws, byov, reference set not cached / deterministic forward: its rate": (
        "a new draw also encodes the 1,000 reference images: twice the work for as many images. Their features are "
        "cached, so the next call costs as much as the row above."
    ),
    "posterior predictive, 4,000 images x 4 draws, byov, reference set not cached / deterministic forward: its rate": (
        "as with 1,000 images: a quarter more work."
    ),
    "posterior predictive, 4,000 images x 4 draws, byov, reference set cached / bayesian-torch: times faster": (
        "byov is at the rate of the plain forward pass, and bayesian-torch, with few draws for so many images, is "
        "within a seventh of that: only the forward pass itself is left to gain."
    ),
    "Bayesian step, 21M parameters, batch 16 / deterministic step": (
        "the draw, its gradients and the KL read and write 60 bytes per weight besides the noise, and a batch of 16 "
        "does little else. Adding the KL's gradient in the draw's backward pass would save 24 of them; not built."
    ),
    "peak memory of training BYOV, 21M parameters, batch 16 / our BYOL": (
        "the state is 40 bytes per weight (means, log-variances, their gradients and moments, a draw, the teacher) "
        "compared with BYOL's 20 (docs/scale.md): 415 MiB more for 21.8M weights. A batch of 16 has few activations."
    ),
    "peak memory of training BYOV, 21M parameters, batch 128 / our BYOL": (
        "as with a batch of 16: the same bytes, with more activations."
    ),
    "`byov score`, 500 x 375 pixels (ImageNet's), 20 draws / PIL + DataLoader: times faster": (
        "21 forward passes take most of the time, and both loops do the same."
    ),
}

DETERMINISTIC_BARS = {"2.7M": 1.15, "0.8M": 1.05, "21M": 1.20}
VIEWS_BARS = {"32": 3.0, "224": 1.5}
STRAIGHT = 0.98  # R^2 from which growth counts as a straight line
FLAT = 1.10  # largest over smallest time that counts as no growth
PREDICTIVE_RATE = 0.9  # of the deterministic forward pass, in images x draws per second
GAIN = 1.02  # below it the gain of a trick, or of torch.compile, is noise
REFERENCE = {  # the reference set was called "bank" when results.json was written
    "byov, bank cached": "byov, reference set cached",
    "byov, bank made too": "byov, reference set not cached",
}


class Bar(NamedTuple):
    """At most or at least `limit`."""

    limit: float
    most: bool

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit


class Row(NamedTuple):
    what: str
    against: str
    value: float
    unit: str = "x"
    spread: tuple[float, float] | None = None
    bar: Bar | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.what} / {self.against}" if self.against else self.what

    @property
    def missed(self) -> bool:
        return self.bar is not None and not self.bar.holds(self.value)


def most(limit: float) -> Bar:
    return Bar(limit, True)


def least(limit: float) -> Bar:
    return Bar(limit, False)


def _row(
    what: str, against: str, summary: Iterable[float], bar: Bar | None = None, note: str = "", unit: str = "x"
) -> Row:
    value, low, high = summary
    return Row(what, against, value, unit, (low, high), bar, note)


# ---------------------------------------------------------------------------------------------------------------- rows


def _bayesian_rows(part: Part) -> Iterable[Row]:
    for task, bar in DETERMINISTIC_BARS.items():
        if task not in part:
            continue
        it = part[task]
        what = f"Bayesian step, {task} parameters, batch {it['batch']}"
        # Older results chose ours by the measured run itself.
        note = it["ours"] + ("" if it.get("ours_chosen_before") else ", the better of two in this run")
        yield _row(what, "deterministic step", it["ratio"][it["ours"]], most(bar), note)
        if "to_kept" in it:
            note = "for information: byov's draws make glibc keep freed memory, which helps any step"
            yield _row(what, "deterministic step, freed memory kept", it["to_kept"], None, note)
        for peer in PEERS:
            note = f"{peer} takes {it['ratio'][peer][0]:.2f}x the deterministic step"
            note += f" ({it['bayesian_torch']})" if peer == "bayesian-torch" else ""
            yield _row(what, f"{peer}: times faster", it["speedup"][peer], least(1.2) if task == "2.7M" else None, note)
        other = next(name for name in it["speedup"] if name not in PEERS)
        yield _row(what, f"{other}: times faster", it["speedup"][other], None, "for information")


def _byol_rows(part: Part) -> Iterable[Row]:
    what = f"whole BYOV step, batch {part['batch']}"
    yield _row(what, "our BYOL", part["byov_to_our_byol"], most(1.05))
    yield _row(what, "plain BYOL in torch, our views", part["ratio"]["byov, method byov"])
    yield _row("our BYOL step", "plain BYOL in torch, our views", part["ratio"]["byov, method byol"])
    yield _row(what, "lightly's BYOL: times its images/s", part["speedup_over_lightly"], least(1.3), part["lightly"])
    yield _row("views, share of that step", "", part["views_share"], most(0.10), unit="")


def _views_rows(part: Part) -> Iterable[Row]:
    for side, bar in VIEWS_BARS.items():
        if side not in part:
            continue
        it = part[side]
        best = min(it["speedup"], key=lambda name: it["speedup"][name][0])
        for name, speedup in it["speedup"].items():
            library, _, setting = name.partition(", ")
            rates = (f"{it['images_per_second'][which]:,.0f}" for which in ("byov", name))
            note = f"{setting}; {' against '.join(rates)} images/s"
            limit = least(bar) if name == best else None
            yield _row(f"views, {side} px", f"{library}: times faster", speedup, limit, note)


def _memory_rows(part: Part) -> Iterable[Row]:
    byov, byol, plain = "byov, method byov", "byov, method byol", "plain BYOL in torch"
    what = "peak memory of training"
    yield _memory_row(f"{what} BYOV", plain, part, byov, plain, most(1.10))
    yield _memory_row(f"{what} our BYOL", plain, part, byol, plain)
    for batch, it in part.get("large", {}).items():
        yield _memory_row(f"{what} BYOV, 21M parameters, batch {batch}", "our BYOL", it, byov, byol, most(1.10))


def _memory_row(what: str, against: str, it: Part, ours: str, other: str, bar: Bar | None = None) -> Row:
    """Its spread is the least and most of all runs; older results have none."""
    note = f"{it['peak_mib'][ours]:.0f} against {it['peak_mib'][other]:.0f} MiB"
    note += f"; above the imports {it['ratio_above_imports'][ours]:.2f}x"
    return Row(what, against, it["ratio"][ours], spread=it.get("spread", {}).get(ours), bar=bar, note=note)


def _updates_rows(part: Part) -> Iterable[Row]:
    for task, it in part.items():
        for name, speedup in it["speedup"].items():
            note = f"{it['milliseconds']['flat']:.1f} against {it['milliseconds'][name]:.1f} ms"
            yield _row(f"optimizer + EMA + KL, flat, {task} parameters", f"{name}: times faster", speedup, None, note)


def _startup_rows(part: Part) -> Iterable[Row]:
    yield _row("`byov --help`", "", part["seconds"]["byov --help"], most(0.3), unit=" s")
    note = "with its first use: byov imports torch only then"
    yield _row("`import byov`", "`import torch`", part["import_ratio"], most(1.3), note)


def _listing_rows(part: Part) -> Iterable[Row]:
    note = "empty files, just made: it takes longer if the disk has to be read"
    yield _row(f"indexing a folder, {part['paths']:,} paths", "", part["seconds"], most(60), note, unit=" s")


def _growth_rows(part: Part) -> Iterable[Row]:
    for name, it in part.items():
        slope = f"{it['intercept']:.0f} ms + {it['slope']:.3g} ms per {it['unit']}"
        if name == "images stored":
            grown = max(it["milliseconds"]) / min(it["milliseconds"])
            yield Row("growth with images stored", "no growth", grown, bar=most(FLAT), note=slope)
        else:
            yield Row(f"growth with {name}", "straight line: R²", it["r2"], "", None, least(STRAIGHT), slope)


def _processes_rows(part: Part) -> Iterable[Row]:
    rates = part["images_per_second"]
    note = "; ".join(f"{name}: {rate:,.0f} images/s" for name, rate in rates.items())
    what = "2 processes x 1 thread"
    yield _row(what, "1 process x 2 threads: times its images/s", part["processes_to_threads"], None, note)
    yield _row(what, "1 process x 1 thread: times its images/s", part["speedup_of_two_processes"])
    yield _row(f"{what}: share of communication", "", part["communication_share"], unit="")
    yield _growth_with_processes(rates["1 process x 1 thread"], rates[what], part["speedup_of_two_processes"])


def _growth_with_processes(one: float, two: float, speedup: Iterable[float]) -> Row:
    """Of one thread each. Through two points every line is straight: no bar."""
    note = f"{one:,.0f} and {two:,.0f} images/s with 1 and 2 processes of one thread: {two - one:,.0f} images/s per "
    note += "process; 2 cores allow no third point"
    efficiency = [times / 2 for times in speedup]
    return _row("growth with processes", "as many times one process: efficiency", efficiency, None, note, unit="")


def _tricks_rows(part: Part) -> Iterable[Row]:
    for name, it in part.items():
        yield _row(f"trick: {name}", "without: times faster", it["gain"], least(GAIN))


def _compiled_rows(part: Part) -> Iterable[Row]:
    for task, it in part.items():
        gains = it["gain"][0] >= GAIN
        note = "gains, but needs a C++ compiler: not offered; " if gains else "gains nothing: not offered; "
        note += " against ".join(f"{it['milliseconds'][name]:.0f}" for name in ("compiled", "eager")) + " ms"
        yield _row(
            f"deterministic step, {task} parameters, torch.compile", "eager: times faster", it["gain"], None, note
        )


def _inference_rows(part: Part) -> Iterable[Row]:
    """The bar is on the fastest of timm's loops: what is written by hand must gain over what exists."""
    for side, it in part.items():
        what, rates = f"features of EfficientNet-Lite0, {side} px", it["images_per_second"]
        best = min(it["speedup"], key=lambda name: it["speedup"][name][0])
        for name, speedup in it["speedup"].items():
            note = f"{rates['byov']:,.0f} against {rates[name]:,.0f} images/s; {it['loops'][name]}"
            bar = least(GAIN) if name == best else None
            yield _row(what, f"{name}: times faster", speedup, bar, note)
        note = f"{rates['byov, one draw']:,.0f} images/s; stages after blocks.4, cached activations before them"
        yield _row(f"{what}, one weight draw", "all stages: times faster", it["draw"], None, note)


def _scoring_rows(part: Part) -> Iterable[Row]:
    for what, it in part.items():
        ours, theirs = it["images_per_second"].values()
        note = f"{ours:,.0f} against {theirs:,.0f} images/s; {it['loop']}"
        yield _row(f"`byov score`, {what}", "PIL + DataLoader: times faster", it["speedup"], least(1.5), note)


def _predictive_rows(part: Part) -> Iterable[Row]:
    for it in part["speed"].values():
        what = f"posterior predictive, {it['images']:,} images x {it['draws']} draws"
        for kind, rate in it["rate"].items():
            note = f"{it['images_per_second'][kind]:,.0f} images x draws/s"
            if kind != "byov, bank cached":
                counted = rate[0] * (1 + it["bank"] / it["images"])
                note += f"; {_number(counted)}x if the {it['bank']:,} reference images are counted too"
            named = f"{what}, {REFERENCE[kind]}"
            yield _row(named, "deterministic forward: its rate", rate, least(PREDICTIVE_RATE), note)
        for peer, speedup in it["speedup"].items():
            yield _row(f"{what}, byov, reference set cached", f"{peer}: times faster", speedup, least(1.2))
    few, many = part["memory"]["draws"]
    note = " against ".join(f"{peak:.0f}" for peak in reversed(part["memory"]["peak_mib"])) + " MiB"
    what = f"peak memory of the posterior predictive, {many} draws"
    spread = part["memory"].get("spread")  # older results have none
    yield Row(what, f"{few} draws", part["memory"]["ratio"], spread=spread, bar=most(1.05), note=note)


# Every part of `run.PARTS`, in the order of the table.
MAKERS: dict[str, Callable[[Part], Iterable[Row]]] = {
    "bayesian_step": _bayesian_rows,
    "byol_step": _byol_rows,
    "views": _views_rows,
    "memory": _memory_rows,
    "updates": _updates_rows,
    "startup": _startup_rows,
    "listing": _listing_rows,
    "growth": _growth_rows,
    "processes": _processes_rows,
    "tricks": _tricks_rows,
    "compiled": _compiled_rows,
    "inference": _inference_rows,
    "scoring": _scoring_rows,
    "predictive": _predictive_rows,
}


def rows(parts: dict[str, Part]) -> list[Row]:
    """The promised rows, of the parts that were measured."""
    return [row for name, make in MAKERS.items() if name in parts for row in make(parts[name])]


# ------------------------------------------------------------------------------------------------------------ markdown


def render(results: dict[str, Any], accuracy: Path) -> str:
    """results.md."""
    parts = {name: entry["numbers"] for name, entry in results["parts"].items()}
    table = rows(parts)
    sections = [
        _header(results),
        _table(table),
        _below(parts),
        _misses(table),
        _details(parts),
        _accuracy(accuracy, parts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _header(results: dict[str, Any]) -> str:
    machine, entries = results["machine"], list(results["parts"].values())
    lines = ["# Benchmarks", ""]
    if any(entry["quick"] for entry in entries):
        lines += ["**A quick run: few rounds, not for the record.**", ""]
    if any(entry["busy"] for entry in entries):
        lines += ["**Made on a busy machine (waiting threads sleep instead of spinning): not for the record.**", ""]
    measured = {name for name, entry in results["parts"].items() if entry["numbers"]}
    lacking = [name for name in MAKERS if name not in measured]
    if lacking:
        lines += [f"**Not measured yet: {', '.join(lacking)}.**", ""]
    dates = sorted({entry["date"] for entry in entries})
    threads = sorted({entry["threads"] for entry in entries})
    lines += [
        f"`make bench`, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, "
        f"{sum(entry['seconds'] for entry in entries) / 60:.0f} minutes; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']:.0f} GiB, {', '.join(map(str, threads))} threads, Python {machine['python']}.",
        ", ".join(f"{name} {version}" for name, version in machine["versions"].items()) + ".",
        "",
        "Every variant runs in a separate process. In each round all variants have a turn, in rotating order.",
        "A ratio is the median of the ratios within a round; its spread is the quartiles.",
        "For memory it is the ratio of the lowest peaks; its spread is the lowest and highest of all runs.",
        "byov and its peers use their best settings, found in a short run before.",
        "bayesian-torch, torch-uncertainty and blitz make Linear and convolution layers Bayesian, byov all parameters.",
        "kornia, torchvision and lightly resize bilinearly, byov bicubically.",
    ]
    return "\n".join(lines)


def _table(table: list[Row]) -> str:
    lines = ["| what | compared with | measured | spread | bar | note |", "|---|---|---|---|---|---|"]
    for row in table:
        spread = "" if row.spread is None else f"{_number(row.spread[0])} - {_number(row.spread[1])}"
        bar = "" if row.bar is None else f"{'≤' if row.bar.most else '≥'} {row.bar.limit:g}{row.unit}"
        bar += "" if row.bar is None else ": **MISS**" if row.missed else ": met"
        cells = (row.what, row.against, f"{_number(row.value)}{row.unit}", spread, bar, row.note)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _below(parts: dict[str, Part]) -> str:
    blur = "Views: at 32 px blur is off for all libraries, since it would leave nothing to see; at 224 px it is on."
    return blur if "views" in parts else ""


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 2 else f"{value:.2f}"


def _misses(table: list[Row]) -> str:
    missed = [row for row in table if row.missed]
    if not missed:
        return "Every bar above is met."
    return "\n".join(["## Misses", "", *(f"- {row.name}: {_why(row)}" for row in missed)])


def _why(row: Row) -> str:
    within = row.bar is not None and row.spread is not None and row.spread[0] <= row.bar.limit <= row.spread[1]
    return WHY.get(row.name, "by less than its own spread." if within else "not explained yet.")


def _details(parts: dict[str, Part]) -> str:
    """Milliseconds of every variant, and the growth's points."""
    timed = [(f"Bayesian step, {task}", it) for task, it in parts.get("bayesian_step", {}).items()]
    timed += [("whole step", parts["byol_step"])] if "byol_step" in parts else []
    if not timed and "growth" not in parts:
        return ""
    lines = ["## Behind the table", "", "| part | variant | ms per step | ratio to the first |", "|---|---|---|---|"]
    for name, it in timed:
        for variant, milliseconds in it["milliseconds"].items():
            aside = " (for information)" if variant.startswith("byov,") and it.get("ours", variant) != variant else ""
            lines.append(f"| {name} | {variant}{aside} | {milliseconds:.1f} | {_number(it['ratio'][variant][0])} |")
    if "growth" in parts:
        lines += ["", "| growth with | points | ms per step | R² |", "|---|---|---|---|"]
        for name, it in parts["growth"].items():
            x, y = (", ".join(f"{v:.3g}" for v in it[key]) for key in ("x", "milliseconds"))
            lines.append(f"| {name} ({it['unit']}) | {x} | {y} | {it['r2']:.4f} |")
    return "\n".join(lines)


def _accuracy(folder: Path, parts: dict[str, Part]) -> str:
    """What `make bench-accuracy` has finished so far."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))]
    if not runs:
        return ""
    lines = [
        "## Probe accuracy after the same time",
        "",
        *(
            [f"**Not finished: {len(runs)} of 9 runs; the same command makes the others.**", ""]
            if len(runs) < 9
            else []
        ),
        f"`make bench-accuracy`: CIFAR-10, as many steps as each method makes in {runs[0]['minutes']:g} minutes.",
        "All use the same ViT, optimizer settings and schedules; lightly with its own modules, transform and loop.",
        f"byov clips gradients (`optim.clip` {runs[0]['settings']['optim.clip']}); lightly's documented loop does not.",
        _rates(folder, parts),
        "",
        "| method | steps | images | top-1, mean ± deviation | of each seed |",
        "|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(run["method"] for run in runs):
        own = sorted((run for run in runs if run["method"] == method), key=lambda run: run["seed"])
        top1 = [100 * run["top1"] for run in own]
        deviation = f" ± {statistics.stdev(top1):.1f}" if len(top1) > 1 else ""
        name = "lightly's BYOL" if method == "lightly" else f"byov, method {method}"
        each = ", ".join(f"{value:.1f}" for value in top1)
        steps, images = own[0]["steps"], own[0]["images"]
        lines.append(f"| {name} | {steps:,} | {images:,} | {statistics.mean(top1):.1f}{deviation} | {each} |")
    return "\n".join(lines)


def _rates(folder: Path, parts: dict[str, Part]) -> str:
    """How the number of steps of `make bench-accuracy` was found, to show that lightly has no handicap."""
    rates = json.loads((folder / "rates.json").read_text())
    seconds = rates["seconds"]
    how = ""
    if "date" in rates:  # older rates have none
        how = f" ({rates['date']}, {rates['threads']} threads{', a busy machine' if rates['busy'] else ''})"
    text = f"All were timed interleaved{how}: "
    text += f"a step of lightly's (its best, {rates['lightly_workers']} workers) took {seconds['lightly']:.3f} s, "
    text += f"{seconds['lightly'] / seconds['byov']:.2f} times BYOV's"
    if "byol_step" in parts:
        whole = parts["byol_step"]
        text += f"; in the table's whole step (batch {whole['batch']}) {whole['speedup_over_lightly'][0]:.2f} times"
    return f"{text}. {rates.get('note', '')}".rstrip()
