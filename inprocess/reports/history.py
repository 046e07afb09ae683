"""Has it happened before? What the incidents of a directory have in common, the later ones seen from the earlier."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inprocess.attribution import ranges
from inprocess.reports.incident import Incident

__all__ = ["History", "histories"]

#: what differs between two errors that are the same: numbers, addresses
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
#: so many incidents that agree in everything, one after the other, are no chance
REPEATS = 3
#: not failures
_NO_FAULT = ("request", "preemption")


@dataclass(frozen=True)
class History:
    """The earlier incidents, by number, to which one is similar.

    Attributes:
        same_error: of the same class, with the same message except for numbers.
        same_place: at the same line of the program.
        same_host: on the same host.
        in_a_row: how many incidents up to this one, without another one between them, had the same error at the same
            place after the same number of steps.
    """

    same_error: tuple[int, ...] = ()
    same_place: tuple[int, ...] = ()
    same_host: tuple[int, ...] = ()
    in_a_row: int = 1

    @property
    def is_deterministic(self) -> bool:
        """Each attempt ended in the same way: the next one will, too."""
        return self.in_a_row >= REPEATS

    def lines(self) -> list[str]:
        """In words, for people."""
        told = []
        if self.is_deterministic:
            told.append(
                f"deterministic: the same error at the same place after the same number of steps, {self.in_a_row} "
                "times in a row. A restart does not help; the input or the code of that step is at fault"
            )
        elif self.same_error:
            told.append(f"the same error before, not always at the same step: incidents {ranges(self.same_error)}")
        if self.same_place and self.same_place != self.same_error:
            told.append(f"the same place before: incidents {ranges(self.same_place)}")
        if self.same_host:
            told.append(f"the same host before: incidents {ranges(self.same_host)}")
        return told or ["nothing like it before"]

    def to_json(self) -> dict[str, Any]:
        return {
            "same_error": list(self.same_error),
            "same_place": list(self.same_place),
            "same_host": list(self.same_host),
            "in_a_row": self.in_a_row,
            "deterministic": self.is_deterministic,
        }


def histories(incidents: Sequence[Incident]) -> list[History]:
    """Of each incident of a directory, in their order."""
    errors: dict[object, list[int]] = {}
    places: dict[str, list[int]] = {}
    hosts: dict[str, list[int]] = {}
    found: list[History] = []
    last: object = None
    for incident in incidents:
        verdict = incident.verdict
        error = (verdict.kind, _VARYING.sub("#", verdict.message), verdict.where)
        host = incident.host if len(incident.hosts) > 1 else ""  # where there is one, it says nothing
        same = None if verdict.kind in _NO_FAULT else (error, incident.failed_after)
        in_a_row = found[-1].in_a_row + 1 if found and same is not None and same == last else 1
        last = same
        history = History(
            tuple(errors.get(error, ())),
            tuple(places.get(verdict.where, ())) if verdict.where else (),
            tuple(hosts.get(host, ())) if host else (),
            in_a_row,
        )
        if same is None:
            found.append(History())
            continue
        found.append(history)
        errors.setdefault(error, []).append(incident.number)
        places.setdefault(verdict.where, []).append(incident.number)
        hosts.setdefault(host, []).append(incident.number)
    return found
