"""What was found, and the tables of it in Markdown. What is missing says so: no row is left out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu import live, plan, step
from benchmarks.gpu.plan import CASES, PHASES, RANKS, Case
from benchmarks.report import cell, condense, number, table

MISSING = "not yet run on a GPU"
#: on a CPU, where a part was left out
LEFT_OUT = "not measured"
#: what else a result may have
OTHERS = ("victim", "leaving", "errors", "stderr", "parameters", "steps", "bytes")

Results = Mapping[str, Any]


def collect(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one request: all values, the medians of the phases, and what went wrong."""
    flat = [one for run in runs for one in _apart(run)]
    found = condense(flat) | {"runs": len(runs)}
    found["notes"] = {note: [run["note"] for run in runs].count(note) for note in {run["note"] for run in runs} if note}
    for name in OTHERS:
        if told := [run[name] for run in runs if run.get(name)]:
            found[name] = told
    return found


def _apart(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A run whose values are lists, as several runs with one value each."""
    lists = {name: value for name, value in run["values"].items() if isinstance(value, list)}
    if not lists:
        return [run]
    count = max(map(len, lists.values()))
    rest = {"note": run["note"]}
    return [
        rest | {"values": {name: value[at] for name, value in lists.items() if at < len(value)}} for at in range(count)
    ]


# --- tables -------------------------------------------------------------------------------------------------------


def tables(results: Results) -> str:
    """All of them, with what was measured on."""
    machine = results.get("machine")
    parts = [
        f"Measured on: {describe(machine) if machine else MISSING}.",
        "### Restarts\n\n" + restarts(results),
        "### Phases of a restart\n\n" + phases(results),
        "### A training step\n\n" + steps(results),
        "### A state of some GB\n\n" + states(results),
    ]
    return "\n\n".join(parts) + "\n"


def describe(machine: Mapping[str, Any]) -> str:
    """In one sentence."""
    gpus = machine["gpus"]
    device = f"{len(gpus)} x {gpus[0]}, driver {machine['driver']}" if gpus else "CPU, no GPU"
    libraries = f"torch {machine['torch']}, CUDA {machine['cuda'] or '-'}, NCCL {machine['nccl'] or '-'}"
    variables = _variables(machine["variables"])
    if machine["shared"]:
        variables += f", and where there are more ranks than GPUs {_variables(machine['shared'])}"
    return (
        f"{device}; {libraries}; Python {machine['python']}, {machine['system']}, {machine['cores']} cores; "
        f"{machine['date']}; backend {machine['backend']}; variables: {variables}"
    )


def _variables(found: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in found.items()) or "none"


def entry(results: Results, *words: str) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = results.get("entries", {}).get(" ".join(words))
    return found


def restarts(results: Results) -> str:
    """The whole, and what of it was waiting for a timeout; milliseconds."""
    headings = [
        "fault of one rank",
        "ranks",
        "fault to first all-reduce, ms",
        "of which timeouts waited for",
        "the rest: the restart, ms",
        "the same without a fault: group and first all-reduce at the start, ms",
        "its process",
    ]
    columns = ("total", "waited", "restart", "group at the start")
    body = []
    for case, ranks in _cases():
        found = entry(results, "restart", case.name, f"{ranks} ranks")
        cells = [cell(found, column) if found else "" for column in columns]
        body.append([case.label, str(ranks), *_or_note(results, found, cells), _victims(case, found)])
    return table(headings, body)


def _cases() -> list[tuple[Case, int]]:
    return [(case, ranks) for case in CASES for ranks in RANKS]


def _or_note(results: Results, found: Mapping[str, Any] | None, cells: Sequence[str]) -> Sequence[str]:
    """What happened instead of a measurement."""
    if found and any(cells):
        return cells
    return [_note(results, found), *[""] * (len(cells) - 1)]


def _note(results: Results, found: Mapping[str, Any] | None) -> str:
    if found:
        return "; ".join(found["notes"]) or LEFT_OUT
    return LEFT_OUT if results.get("machine", {}).get("device") == "cpu" else MISSING


def _victims(case: Case, found: Mapping[str, Any] | None) -> str:
    if not found:
        return ""
    return "goes on" if case.stays else ", ".join(dict.fromkeys(found.get("victim", ())))


def phases(results: Results) -> str:
    """Medians; each phase ends when the last rank is through."""
    body = []
    for case, ranks in _cases():
        found = entry(results, "restart", case.name, f"{ranks} ranks")
        medians = found["phases"] if found else {}
        cells = [number(medians[phase.name]) if phase.name in medians else "" for phase in PHASES]
        body.append([case.label, str(ranks), *_or_note(results, found, cells)])
    return table(["ms, median of each phase", "ranks", *(phase.name for phase in PHASES)], body)


def steps(results: Results) -> str:
    """The bare step, and what each part of the library adds to it."""
    headings = ["ranks", "bare step, ms", *(f"{name}: slower by, %" for name in step.VARIANTS[1:])]
    body = []
    for ranks in (1, 2):
        found = entry(results, "step", f"{ranks} ranks")
        names = ("ms", *step.VARIANTS[1:])
        cells = [cell(found, name) if found else "" for name in names]
        body.append([str(ranks), *_or_note(results, found, cells)])
    return table(headings, body) + _model(results)


def _model(results: Results) -> str:
    """What was trained."""
    found = entry(results, "step", "1 ranks") or entry(results, "step", "2 ranks")
    if not found or not found.get("parameters"):
        return ""
    every = plan.STEP[results["machine"]["device"]]["every"]
    return (
        f"\n\nA transformer of {found['parameters'][0] / 1e6:.3g} million parameters in bf16 (autocast), AdamW, "
        f"DistributedDataParallel; copies of both every {every} steps. A step is the mean of some, each figure the "
        "median (lowest to highest) of the turns."
    )


def states(results: Results) -> str:
    """Seconds, GB/s, and how that compares with the plain way."""
    body = []
    for size in _sizes(results):
        found = entry(results, "live", "2 ranks", f"{size:g} GB")
        for name in live.NAMES if found and found["values"] else (live.RECOVER, live.COPY):
            body.append([f"{size:g} GB", name, *_or_note(results, found, _state(found, name))])
    return table(["state", "", "s", "GB/s", "speed beside the plain way"], body)


def _sizes(results: Results) -> tuple[float, ...]:
    return plan.STATES[results.get("machine", {}).get("device", "cuda")]


def _state(found: Mapping[str, Any] | None, name: str) -> list[str]:
    taken = (found or {}).get("values", {})
    if found is None or name not in taken:
        return ["", "", ""]
    seconds, plain = statistics.median(taken[name]), live.BESIDE.get(name)
    speed = "" if name == live.BEGIN else f"{found['bytes'][0] / 1e9 / seconds:.2f}"
    beside = f"{statistics.median(taken[plain]) / seconds:.0%} of {plain}" if plain in taken else ""
    return [cell(found, name), speed, beside]
