"""What the doctor says: for a terminal, and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from inprocess.attribution import one_line
from inprocess.doctor.checks import Examined
from inprocess.doctor.figures import MACHINE
from inprocess.doctor.findings import Finding
from inprocess.doctor.trial import TRIALS, Measured

__all__ = ["VERSION", "status", "to_json", "to_text"]

#: of the JSON; another one means that a field was removed or changed its meaning
VERSION = 1
LEVELS = ("problem", "warning", "note")
WIDTH = 110


def status(found: Examined) -> int:
    """The exit code."""
    return 1 if any(finding.level == "problem" for finding in found.findings) else 0


def to_json(found: Examined, restarts: Sequence[Measured]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "checks": found.ran,
        "skipped": found.skipped,
        "findings": [
            {name: getattr(finding, name) for name in ("check", "level", "what", "why", "remedy", "where")}
            for finding in found.findings
        ],
        "restarts": {each.trial.name: each.seconds for each in restarts},
    }


def to_text(head: str, found: Examined, restarts: Sequence[Measured]) -> Iterator[str]:
    """The lines: one screen where nothing is wrong."""
    yield head
    failed = len({finding.check for finding in found.findings} & set(found.ran))
    told = f"{failed} of them found something" if failed else "none of them found anything"
    yield f"{len(found.ran)} checks ran, {told}"
    if found.skipped:
        yield from _wrapped("skipped: ", ", ".join(found.skipped))
    yield ""
    yield from _restarts(restarts)
    for level in LEVELS:
        for finding in found.findings:
            if finding.level == level:
                yield ""
                yield from _finding(finding)
    yield ""
    yield _verdict(found.findings)


def _restarts(restarts: Sequence[Measured]) -> Iterator[str]:
    yield f"{'restarts of a real job, Gloo on the CPU':<46}{'here':>10}{'docs/performance.md':>22}"
    done = {each.trial.name: each for each in restarts}
    for trial in TRIALS:
        measured = done.get(trial.name)
        if measured is None:
            shown = "not tried"
        else:
            shown = "failed" if measured.seconds is None else f"{measured.seconds * 1e3:.0f} ms"
        usual = "" if trial.figure is None else f"{trial.figure.median * 1e3:.0f} ms"
        since = "" if trial.begin == "fault" else f", from {trial.begin}"
        yield f"  {trial.what + since:<44}{shown:>10}{usual:>22}".rstrip()
    yield f"  to the function's entry on the last rank; the right column: {MACHINE}, the machine idle"


def _finding(finding: Finding) -> Iterator[str]:
    where = f"{finding.where}: " if finding.where else ""
    yield from _wrapped(f"{finding.level.upper()}  ", f"{finding.check}: {where}{one_line(finding.what, 500)}")
    yield from _wrapped("  why     ", one_line(finding.why, 500))
    yield from _wrapped("  remedy  ", one_line(finding.remedy, 500))


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * len(head)
    return textwrap.wrap(head + text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _verdict(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    told = [f"{number} {level}{'s' * (number > 1)}" for level, number in counts.items() if number]
    return ", ".join(told) if told else "nothing is wrong here"
