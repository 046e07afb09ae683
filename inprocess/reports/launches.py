"""A job that was started anew under the same name: its trail, cut into its launches.

Where all ranks die, a launcher starts all workers again, and nothing in their events says so. But a rank begins once in
a launch: a process that calls for the first time, and has the first iteration, where its rank has had it before, is of
the next launch. A process that joins has a later iteration first; a call that goes on over another store has moved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from inprocess.reports.reading import Entry, Trail

__all__ = ["launches"]


def launches(trail: Trail) -> list[Trail]:
    """Of one job, the first first; the trail itself, where there was one launch."""
    #: of each source, its first event in an iteration
    entered: dict[int, Entry] = {}
    for entry in trail.entries:
        if entry.event.iteration >= 0:
            entered.setdefault(id(entry.source), entry)
    begins = list(_begins(trail, entered))
    if not begins:
        return [trail]
    found = [Trail(trail.job) for _ in range(len(begins) + 1)]
    launch_of: dict[int, int] = {}
    for entry in trail.entries:
        source = id(entry.source)
        if source not in launch_of:
            # all ranks have called before one has an iteration; the last word of a monitor may come in the next launch
            first = entry if entry.source.is_monitor else entered.get(source, entry)
            launch_of[source] = bisect_right(begins, first.at)
        found[launch_of[source]].entries.append(entry)
    for launch in found:
        launch.settle()
    return found


def _begins(trail: Trail, entered: dict[int, Entry]) -> Iterator[float]:
    """When all launches but the first one began."""
    ranks: set[int] = set()
    moved: set[tuple[str, int, int]] = set()
    for entry in trail.of("call", "left"):
        process = (entry.source.header.host, entry.source.header.pid, entry.rank)
        if entry.kind == "left":
            if entry.event.attributes.get("how") == "moved":
                moved.add(process)
            continue
        if process in moved:
            moved.remove(process)
            continue
        first = entered.get(id(entry.source))
        if entry.event.call or first is None or first.event.iteration:
            continue
        if entry.rank in ranks:
            yield entry.at
            ranks.clear()
        ranks.add(entry.rank)
