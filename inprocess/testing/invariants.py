"""The invariants I2, I4 and I5 of the design, read from the events that real ranks reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .outcome import RankResult

Iterations = dict[tuple[int, int], list[dict[str, Any]]]


def broken(results: Sequence[RankResult], fenced: Collection[int] = ()) -> list[str]:
    """One line for each invariant that does not hold. ``fenced``: ranks that had stood still when the others went on;
    for them a function that is left later has ended in time."""
    entries = _collect(results, "enter")
    exits = _collect([result for result in results if result.rank not in fenced], "leave")
    return [*_exclusion(entries, exits), *_ranks(entries), *_agreement(results, entries), *_processes(results)]


def _collect(results: Sequence[RankResult], name: str) -> Iterations:
    found: Iterations = defaultdict(list)
    for result in results:
        for event in result.of(name):
            found[event["call"], event["iteration"]].append(event | {"initial": result.rank})
    return found


def _exclusion(entries: Iterations, exits: Iterations) -> list[str]:
    lines = []
    for (call, iteration), entered in sorted(entries.items()):
        first = min(entered, key=lambda event: event["t"])
        late = [
            event
            for (other, earlier), events in exits.items()
            for event in events
            if other == call and earlier < iteration and event["t"] > first["t"]
        ]
        lines += [
            f"I2: initial rank {event['initial']} was in iteration {event['iteration']} of call {call} for "
            f"{event['t'] - first['t']:.4f} s after initial rank {first['initial']} had entered iteration {iteration}"
            for event in late
        ]
    return lines


def _ranks(entries: Iterations) -> list[str]:
    lines = []
    for (call, iteration), events in sorted(entries.items()):
        ranks = sorted(event["rank"] for event in events)
        sizes = {event["world_size"] for event in events}
        if len(sizes) != 1 or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(max(sizes))):
            lines.append(f"I4: call {call}, iteration {iteration}: ranks {ranks}, world sizes {sorted(sizes)}")
    return lines


def _agreement(results: Sequence[RankResult], entries: Iterations) -> list[str]:
    lines = []
    returned: dict[int, set[int]] = defaultdict(set)
    for result in results:
        for event in result.of("returned"):
            if event["value"] is not None:
                returned[event["call"]].add(event["iteration"])
    for call, iterations in returned.items():
        if len(iterations) > 1:
            lines.append(f"I5: call {call} returned from different iterations: {sorted(iterations)}")
        events = entries[call, max(iterations)]  # none where the test's own function does not report
        if events and sorted(event["rank"] for event in events) != list(range(events[0]["world_size"])):
            lines.append(f"I4: call {call} completed without all ranks: {[event['rank'] for event in events]}")
    return lines


def _processes(results: Sequence[RankResult]) -> list[str]:
    return [
        f"initial rank {result.rank} entered in process {event['pid']}, but was started as {result.pid}"
        for result in results
        for event in result.of("enter")
        if event["pid"] != result.pid
    ]
