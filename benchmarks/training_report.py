"""What `python -m benchmarks.training` has measured: its table, what the documentation says of it, and where that is.

Standard library only. Times are in milliseconds.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import report

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks/training.json"
PAGE = ROOT / "docs/performance/training.md"
#: pages with sentences of these figures
QUOTING = (ROOT / "README.md", ROOT / "docs/index.md", ROOT / "docs/getting_started.md")

#: the revision that is measured
HERE = "this tree"
BODIES = ("training", "empty")
#: the first restart of each job, and all later ones
WHICH = ("first", "later")
#: until when: the entry of the function, and what it does first
VALUES = ("entry", "step")
ROWS = [(body, value, which) for body in BODIES for value in VALUES for which in WHICH]
#: what a training does, in this order, and the columns of the table of that; in an empty function only the ends
MARKS = ("entry", "group", "model", "batch", "step")
BETWEEN = ("entry to process group", "to model and optimizer", "to first batch", "to first optimizer step")
NOTHING = "not measured yet"
NUMBER = r"\d+(?:[.,]\d+)*"

#: revision -> body -> the result of each job: its restarts in their order, and why some are missing
Found = Mapping[str, Mapping[str, Sequence[Any]]]
#: what is kept of it: {"machine": ..., "revisions": {revision: {body: see `_condensed`}}}
Kept = Mapping[str, Any]


def condense(found: Found, machine: Mapping[str, str] | None = None) -> Kept:
    """Of each row all values, sorted; and what went wrong how often."""
    revisions = {name: {body: _condensed(jobs) for body, jobs in bodies.items()} for name, bodies in found.items()}
    return {"machine": dict(machine or {}), "revisions": revisions}


def _condensed(jobs: Sequence[Any]) -> dict[str, Any]:
    notes = [job["note"] for job in jobs if job["note"]]
    restarts = {
        "first": [each for job in jobs for each in job["restarts"] if each["first"]],
        "later": [each for job in jobs for each in job["restarts"] if not each["first"]],
    }
    return {
        "jobs": len(jobs),
        **{which: {value: sorted(each[value] for each in restarts[which]) for value in VALUES} for which in WHICH},
        "notes": {note: notes.count(note) for note in dict.fromkeys(notes)},
    }


def read(path: Path = KEPT) -> Kept:
    """What is kept; empty where nothing is."""
    kept: Kept = json.loads(path.read_text()) if path.exists() else {"machine": {}, "revisions": {}}
    return kept


def times(kept: Kept, name: str, row: tuple[str, str, str]) -> Sequence[float]:
    """Of one revision and one row, sorted; empty where nothing was measured."""
    body, value, which = row
    found: Sequence[float] = kept["revisions"].get(name, {}).get(body, {}).get(which, {}).get(value, ())
    return found


def median(kept: Kept, name: str, row: tuple[str, str, str]) -> float | None:
    found = times(kept, name, row)
    return statistics.median(found) if found else None


def label(row: tuple[str, str, str]) -> str:
    body, value, which = row
    until = {"entry": "entry", "step": "first optimizer step" if body == "training" else "first all-reduce"}[value]
    where = "in a training" if body == "training" else "empty function"
    return f"{where}: fault to {until}, {'first restart' if which == 'first' else 'later restarts'}"


def table(kept: Kept) -> str:
    """Medians with the least and the greatest value, how the first revision compares with others, and the bodies."""
    names = list(kept["revisions"])
    body = []
    for row in ROWS:
        medians = [median(kept, name, row) for name in names]
        cells = [cell(times(kept, name, row)) for name in names]
        body.append([label(row), *cells, *(ratio(other, medians[0]) for other in medians[1:])])
    for which in WHICH:
        ratios = [ratio(*(median(kept, name, (kind, "entry", which)) for kind in BODIES)) for name in names]
        restarts = "first restart" if which == "first" else "later restarts"
        body.append([f"training / empty function: fault to entry, {restarts}", *ratios, *("" for _ in names[1:])])
    headings = ["ms: median (least to greatest)", *names, *(f"{name} / {names[0]}" for name in names[1:])]
    return report.table(headings, body)


def steps(found: Found) -> str:
    """What the training does after its entry, until the last rank has done it: each since what is before it."""
    body = []
    for name, bodies in found.items():
        whole = [each for job in bodies["training"] for each in job["restarts"] if each.keys() >= {*MARKS}]
        for label, first in (("first restart", True), ("later restarts", False)):
            restarts = [each for each in whole if each["first"] is first]
            taken = (sorted(each[now] - each[before] for each in restarts) for before, now in pairwise(MARKS))
            body.append([f"{name}, {label}", *map(cell, taken)])
    return report.table(["in a training, ms", *BETWEEN], body)


def cell(found: Sequence[float]) -> str:
    if not found:
        return NOTHING
    return f"**{report.number(statistics.median(found))}** ({report.number(found[0])} to {report.number(found[-1])})"


def ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else ""


def page(kept: Kept) -> str:
    """For the documentation."""
    parts = [table(kept)]
    for name, bodies in kept["revisions"].items():
        counts = ", ".join(
            f"{entry['jobs']} jobs with {len(entry['first']['entry'])} first and {len(entry['later']['entry'])} later"
            f" restarts ({'in a training' if body == 'training' else 'empty function'})"
            for body, entry in bodies.items()
        )
        notes = [note for entry in bodies.values() for note in entry["notes"]]
        parts.append(f"{name}: {counts}." + (f" What failed: {'; '.join(notes)}." if notes else ""))
    return "\n\n".join([*parts, f"Measured: {where(kept)}."]) + "\n"


def where(kept: Kept) -> str:
    return ", ".join(f"{name} {value}" for name, value in kept["machine"].items()) or NOTHING


def quotes(kept: Kept) -> list[str]:
    """What the README and other pages say of a restart in a training; empty where something was not measured."""
    medians = {row: median(kept, HERE, row) for row in ROWS}
    if None in medians.values():
        return []
    of = {row: f"{value:.0f} ms" for row, value in medians.items()}
    first, later, step, step_later = (of["training", value, which] for value in VALUES for which in WHICH)
    return [
        "**In a training** of 2 ranks (a GPT in DistributedDataParallel, AdamW, a million objects in each process), one"
        " raises while the other is in the backward pass. From the fault to the function's entry it takes"
        f" **{first}** at the first restart of a job and {later} at later ones, to the first optimizer step {step} and"
        f" {step_later}. In a function that does nothing but an all-reduce it takes {of['empty', 'entry', 'first']} and"
        f" {of['empty', 'entry', 'later']} to the entry.",
    ]


def caption(kept: Kept) -> str:
    """What is said beside the picture of a restart; empty where something was not measured."""
    first, later = (median(kept, HERE, ("training", "entry", which)) for which in WHICH)
    if first is None or later is None:
        return ""
    return (
        f"In a training of 2 ranks, one of which raises: {first:.0f} ms at the first restart,"
        f" {later:.0f} ms at later ones"
    )


def renewed(text: str, quote: str) -> str:
    """The text with the numbers of a quote in place of those that it has; its lines stay as they are."""
    words = quote.split()
    pattern = r"\s+".join(
        "".join(NUMBER if part[:1].isdigit() else re.escape(part) for part in re.split(f"({NUMBER})", word))
        for word in words
    )

    def put(found: re.Match[str]) -> str:
        spaces = [*re.findall(r"\s+", found[0]), ""]
        return "".join(word + space for word, space in zip(words, spaces, strict=True))

    return re.sub(pattern, put, text)


def write(kept: Kept) -> None:
    """Keep it, and renew what the documentation says of it."""
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))
    results = json.loads((ROOT / "benchmarks/results.json").read_text())
    report.write_summary(results, PAGE.parent, quotes(kept), where(kept))
    for path in QUOTING:
        text = path.read_text()
        for quote in (*quotes(kept), caption(kept)):
            text = renewed(text, quote) if quote else text
        path.write_text(text)
