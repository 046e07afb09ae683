"""Tables and the picture, from the results of `python -m benchmarks`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan import (
    CASES,
    GOODPUT,
    NVRX,
    NVRX_TUNED,
    OURS,
    PHASES,
    STARTUP,
    TORCHFT,
    TORCHFT_TUNED,
    TORCHRUN,
    WAITS,
    Case,
)

Results = Mapping[str, Any]

#: what the tables show of each script, with its heading
COLUMNS = {
    "restart": {"entry": "to the entry, ms", "reduced": "to the first all-reduce (in a training: step), ms"},
    "idle": {
        "percent": "CPU, % of a core",
        "main_percent": "of which training process",
        "monitor_percent": "of which monitor",
        "monitor_mb": "memory of the monitor, MB",
        "store_operations": "store operations per second",
    },
    "step": {"median_percent": "median step slower by, %", "mean_percent": "mean step slower by, %"},
    "calls": {
        "ping_wall": "ping, ns",
        "ping_cpu": "CPU time, ns",
        "atomic_wall": "atomic, ns",
        "atomic_cpu": "CPU time, ns",
    },
    "goodput": {"percent": "goodput, %", "faults": "faults"},
}
#: where the time of a round trip is, and the case whose phases are shown in that unit
CALLS, UNIT_CASE = "calls: ping and atomic", "4 ranks, in an all-reduce"
COLORS = ("#4269d0", "#ff725c", "#efb118", "#6cc5b0", "#97bbf5", "#a463f2", "#9c6b4e", "#bbbbbb")


def key(case: Case) -> str:
    return f"{case.benchmark}: {case.label}"


def condense(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each value all measurements, sorted; of the phases the medians; and what went wrong how often."""
    names = dict.fromkeys(name for run in runs for name in run["values"])
    phases = dict.fromkeys(name for run in runs for name in run.get("phases", {}))
    notes = [run["note"] for run in runs if not run["values"]]
    return {
        "runs": len(runs),
        "values": {name: sorted(run["values"][name] for run in runs if name in run["values"]) for name in names},
        "phases": {
            name: round(statistics.median(run["phases"][name] for run in runs if run.get("phases")), 3)
            for name in phases
        },
        "notes": {note: notes.count(note) for note in dict.fromkeys(notes)},
    }


def median(entry: Mapping[str, Any] | None, name: str) -> float | None:
    values = (entry or {}).get("values", {}).get(name)
    return statistics.median(values) if values else None


def number(value: float) -> str:
    """Three digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def cell(entry: Mapping[str, Any], name: str) -> str:
    """Median and spread, or what happened instead."""
    values = entry["values"].get(name)
    if not values:
        return ""
    failed = sum(entry["notes"].values())
    text = f"**{number(statistics.median(values))}** ({number(values[0])} to {number(values[-1])})"
    return text + (f"; {failed} of {entry['runs']} fail" if failed else "")


def failure(entry: Mapping[str, Any], columns: int) -> list[str]:
    return ["; ".join(entry["notes"]), *[""] * (columns - 1)]


def rows(results: Results, cases: Sequence[Case]) -> list[list[str]]:
    found = []
    for case in cases:
        entries = results["cases"].get(key(case))
        if not entries:
            continue
        ours = entries.get(OURS.name)
        for name, entry in entries.items():
            columns = COLUMNS[case.script]
            row = [case.label if entry is next(iter(entries.values())) else "", name]
            row += [cell(entry, column) for column in columns] if entry["values"] else failure(entry, len(columns))
            row.append(ratio(ours, entry, columns))
            row.append(verdict(case, entry) if name == OURS.name else "")
            found.append(row)
    return found


def ratio(ours: Mapping[str, Any] | None, entry: Mapping[str, Any], columns: Iterable[str]) -> str:
    """How many times ours it is, in the first column that both have. Of what is a difference, nothing is said."""
    both = ((name, median(ours, name), median(entry, name)) for name in columns)
    name, here, there = next((found for found in both if found[1] and found[2]), ("", None, None))
    if entry is ours or not here or not there or name.endswith("_percent"):
        return ""
    return f"{there / here:.3g}x"


def verdict(case: Case, entry: Mapping[str, Any]) -> str:
    """Each target, and whether it was reached."""
    return ", ".join(reached(limit, median(entry, name)) for name, limit in case.targets.items())


def reached(limit: float, value: float | None) -> str:
    return f"{number(limit)} {'met' if value is not None and value <= limit else 'MISSED'}"


def table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def startup(results: Results) -> str:
    body = []
    for size in (2, 4, 8):
        entries = results["cases"].get(f"restart_exception: {size} ranks, in {WAITS['loop']}", {})
        for name, entry in entries.items():
            value = median(entry, "startup")
            if value is not None and name != TORCHRUN.name:
                target = reached(STARTUP[size], value) if name == OURS.name and size in STARTUP else ""
                body.append([f"{size} ranks", name, cell(entry, "startup"), target])
    return table(["", "library", "from the call to the entry, ms", "target"], body)


def goodput(results: Results) -> str:
    """The share of the time that went into steps that count."""
    body = []
    for name, entry in results["cases"].get(key(GOODPUT), {}).items():
        shares, faults = (entry["values"].get(value, []) for value in ("percent", "faults"))
        share = f"**{statistics.median(shares):.1f} %**" if shares else ""
        body.append([name, share, ", ".join(f"{value:g}" for value in faults), "; ".join(entry["notes"])])
    return table(["library", "goodput", "faults in each run", "note"], body)


def phases(results: Results) -> str:
    """The medians, and for each phase how many round trips to the store would take as long."""
    shown = [entry for case in CASES if (entry := _phases_of(results, case))]
    body = [[label, *(number(found[phase]) for phase in PHASES)] for label, found in shown]
    unit = median(results["cases"].get(CALLS, {}).get(OURS.name), "store_wall")
    if unit and shown:
        label, found = next((entry for entry in shown if entry[0] == UNIT_CASE), shown[0])
        trips = [number(found[phase] * 1e6 / unit) for phase in PHASES]
        body.append([f"the case '{label}' in store round trips ({unit / 1e3:.0f} us)", *trips])
    return table(["ms, median of each phase", *PHASES], body)


def _phases_of(results: Results, case: Case) -> tuple[str, Mapping[str, float]] | None:
    entry = results["cases"].get(key(case), {}).get(OURS.name, {})
    return (case.label, entry["phases"]) if case.script == "restart" and entry.get("phases") else None


def tables(results: Results) -> str:
    """All tables, in Markdown."""
    parts = []
    for benchmark in ("restart_exception", "restart_kill", "restart_hot_spare", "calls", "steady_state"):
        cases = [case for case in CASES if case.benchmark == benchmark]
        for script in dict.fromkeys(case.script for case in cases):
            body = rows(results, [case for case in cases if case.script == script])
            if body:
                headings = ["case", "library", *COLUMNS[script].values(), "against ours", "target"]
                parts.append(f"### {benchmark}\n\n" + table(headings, body))
    parts += ["### startup\n\n" + startup(results), "### phases\n\n" + phases(results)]
    parts.append("### goodput\n\n" + goodput(results))
    return "\n\n".join(parts) + "\n"


def quotes(results: Results) -> list[str]:
    """What the README says about speed; a test compares."""

    def of(case: str, name: str = OURS.name, value: str = "entry") -> float:
        return median(results["cases"][case][name], value) or float("nan")

    loop, wait = "restart_exception: 4 ranks, in a Python loop", "restart_exception: 4 ranks, in an all-reduce"
    first, second = (f"restart_kill: SIGKILL of rank {rank}, in an all-reduce" for rank in (0, 1))
    ours, default, tuned = (of(loop, contender.name) for contender in (OURS, NVRX, NVRX_TUNED))
    torchft, torchft_tuned = (of(second, contender.name, "reduced") for contender in (TORCHFT, TORCHFT_TUNED))
    idle = of("steady_state: idle rank", value="percent")
    ping, atomic = (of(CALLS, value=f"{name}_wall") for name in ("ping", "atomic"))
    return [
        f"**One of 4 ranks raises**: the function runs again on all of them after **{of(wait):.0f} ms** where the"
        f" others sat in an all-reduce, {ours:.0f} ms where they computed in Python. In the latter case"
        f" nvidia-resiliency-ext takes {default / 1e3:.2g} s by default ({default / ours:.0f} times as long) and"
        f" {tuned / 1e3:.2g} s tuned ({tuned / ours:.0f} times), torchrun"
        f" {of(loop, TORCHRUN.name) / 1e3:.2g} s.",
        f"**Rank 0 of 4 is killed** in the middle of an all-reduce: **{of(first):.0f} ms**; nvidia-resiliency-ext does"
        f" not go on without rank 0. Where rank 1 is killed, torchft takes {torchft / 1e3:.2g} s by default and"
        f" {torchft_tuned:.0f} ms tuned to its next all-reduce, this library {of(second, value='reduced'):.0f} ms.",
        f"**While nothing happens** a rank costs **{idle:.2g} % of a core**, its monitor included; `ping()` takes"
        f" {ping:.0f} ns and `atomic()` {atomic:.0f} ns.",
    ]


def write(results: Results, folder: Path, more: Sequence[str] = (), where: str = "") -> None:
    """Tables and picture for the documentation; ``more``, ``where``: see `write_summary`."""
    folder.mkdir(exist_ok=True)
    (folder / "tables.md").write_text(tables(results))
    write_summary(results, folder, more, where)
    if any(_phases_of(results, case) for case in CASES):
        picture(results, folder / "restart.svg")


def write_summary(results: Results, folder: Path, more: Sequence[str] = (), where: str = "") -> None:
    """``more``: sentences from a training, and ``where`` these were measured."""
    try:
        lines = quotes(results)
    except KeyError as missing:
        print(f"no summary: {missing} was not measured")
        return
    here = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    measured = f"Measured: {here}." + (f" In a training: {where}." if more else "")
    text = "\n".join(f"* {line}" for line in [*more, *lines])
    (folder / "summary.md").write_text(f"{text}\n\n{measured}\n")


def picture(results: Results, path: Path) -> None:
    """Above: where the time of a restart goes. Below: all libraries, on a logarithmic scale."""
    import matplotlib  # noqa: PLC0415  (the scripts run without it)

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "inprocess"
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (above, below) = pyplot.subplots(2, figsize=(9, 8.5), height_ratios=(1, 1.25), layout="constrained")
    _draw_phases(above, results)
    _draw_peers(below, results)
    figure.savefig(path, metadata={"Date": None})


def _draw_phases(axes: Any, results: Results) -> None:
    wanted = ("4 ranks", "rank 1, in", "rank 1 in a training")
    shown = [found for case in CASES if any(part in case.label for part in wanted)
             if (found := _phases_of(results, case))][::-1]  # fmt: skip
    left = [0.0] * len(shown)
    labels = [label.replace("`", "") for label, _ in shown]
    for phase, color in zip(PHASES, COLORS, strict=True):
        widths = [found[phase] for _, found in shown]
        axes.barh(labels, widths, left=left, color=color, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("milliseconds from the fault to the new group's first all-reduce")
    axes.set_title("Where the time of a restart goes (inprocess, 4 ranks)", loc="left")
    axes.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.4, -0.2), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_peers(axes: Any, results: Results) -> None:
    wanted = ("4 ranks, in a Python loop", "4 ranks, in an all-reduce", "SIGKILL of rank 1, in an all-reduce")
    bars = []
    for case in CASES:
        if case.label in wanted:
            for name, entry in results["cases"].get(key(case), {}).items():
                if (value := median(entry, "reduced")) is not None:
                    bars.append((f"{case.label}: {name}", value, name == OURS.name))
    bars.reverse()
    drawn = axes.barh([bar[0] for bar in bars], [bar[1] for bar in bars],
                      color=[COLORS[1] if bar[2] else COLORS[-1] for bar in bars])  # fmt: skip
    axes.bar_label(drawn, [f"{number(bar[1])} ms" for bar in bars], padding=3, fontsize="small")
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("milliseconds, logarithmic")
    axes.set_title("From the fault to the new group's first all-reduce", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
