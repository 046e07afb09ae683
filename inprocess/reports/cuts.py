"""Where one incident of a launch ends and the next begins: with a decision, or where nobody is left to decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inprocess.reports.reading import Entry, Trail

__all__ = ["Cut", "cuts"]

#: two ranks' events of one restart are at most so far apart (seconds)
SPREAD_S = 600.0
#: events that tell of a fault
_FAILED = ("raised", "no_progress", "killed", "died", "store_lost", "interrupted")


@dataclass(frozen=True)
class Cut:
    """The events of one restart: where they end, and what was agreed then."""

    call: int
    number: int
    entries: tuple[Entry, ...]

    @property
    def at(self) -> float:
        return min(entry.at for entry in self.entries)


def cuts(trail: Trail) -> list[Cut]:
    """Restarts, and ends of a call for everybody; each with what all ranks said of it."""
    found: list[list[Entry]] = []
    for entry in trail.of("restart", "abort"):
        attributes = entry.event.attributes
        for group in reversed(found[-8:]):
            one = group[0]
            same = (one.kind, one.event.call, one.event.attributes.get("restart"), one.event.iteration)
            is_same = same == (entry.kind, entry.event.call, attributes.get("restart"), entry.event.iteration)
            is_there = any(entry.source is each.source for each in group)
            if is_same and not is_there and entry.at - one.at < SPREAD_S:
                group.append(entry)
                break
        else:
            found.append([entry])
    decided = [Cut(group[0].event.call, _number(group[0]), tuple(group)) for group in found]
    return sorted([*decided, *_without_decision(trail, decided)], key=lambda cut: cut.at)


def _number(entry: Entry) -> int:
    number = entry.event.attributes.get("restart")
    return number if isinstance(number, int) and not isinstance(number, bool) else entry.event.iteration + 1


def _without_decision(trail: Trail, decided: Sequence[Cut]) -> Iterator[Cut]:
    """What ended a call without a decision: nobody was left, or nobody could reach the others."""
    for call in sorted({entry.event.call for entry in trail.of(*_FAILED)}):
        before = [cut for cut in decided if cut.call == call]
        if before and before[-1].entries[0].kind == "abort":
            continue
        since = max((entry.at for cut in before for entry in cut.entries), default=0.0)
        failed, left = (
            [entry for entry in trail.of(*kinds) if entry.event.call == call and entry.at > since]
            for kinds in (_FAILED, ("left",))
        )
        failed = [entry for entry in failed if entry.event.iteration >= 0]
        if failed and all(entry.event.attributes.get("how") != "completed" for entry in left):
            yield Cut(call, failed[0].event.iteration + 1, tuple(failed))
