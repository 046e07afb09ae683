"""Findings about what grows with each restart, from what `inprocess.testing.growth` has counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from inprocess.doctor.findings import Finding
from inprocess.doctor.script_checks import found
from inprocess.doctor.script_places import places_in
from inprocess.doctor.script_runs import Seen

__all__ = ["findings"]

#: how a line about growth begins -> name of the check
_KINDS = {
    "threads named ": "threads",
    "descriptors of ": "descriptors",
    "child processes": "children",
    "the ": "containers",
    "results in the cache": "containers",
    "different ": "handlers",
}


def findings(seen: Seen, shown: Callable[[str], str]) -> Iterator[Finding]:
    """Of each rank that has run the function to the last; the same line of several ranks once."""
    last = max((event["iteration"] for _, event in seen.events("enter")), default=0)
    lines = [line for _, event in seen.events("grown", iteration=last) for line in event["lines"]]
    for line in dict.fromkeys(map(shown, lines)):
        check = next((name for begin, name in _KINDS.items() if line.startswith(begin)), "registrations")
        what, _, by = line.partition("; ")
        level = "warning" if check == "handlers" else "problem"
        told = f"; {by}" if by else ""
        yield found(check, f"more with each restart: {what}{told}", next(iter(places_in(by)), ""), level)
