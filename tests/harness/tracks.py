"""A Perfetto trace, read back with its own messages: what each track has."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Track", "read_tracks", "share_covered"]


@dataclass
class Track:
    """One track: slices as (begin, end, name, depth), all in nanoseconds, and its other events."""

    name: str = ""
    slices: list[tuple[int, int, str, int]] = field(default_factory=list)
    instants: list[tuple[int, str, Any]] = field(default_factory=list)
    counted: list[tuple[int, int]] = field(default_factory=list)
    open: list[tuple[int, str]] = field(default_factory=list)

    def add(self, at: int, event: Any) -> None:
        if event.type == event.TYPE_SLICE_BEGIN:
            self.open.append((at, event.name))
        elif event.type == event.TYPE_SLICE_END:
            begin, name = self.open.pop()
            assert at >= begin
            self.slices.append((begin, at, name, len(self.open)))
        elif event.type == event.TYPE_COUNTER:
            self.counted.append((at, event.counter_value))
        else:
            self.instants.append((at, event.name, event))

    def at(self, name: str) -> list[int]:
        return [at for at, found, _ in self.instants if found == name]


def read_tracks(path: Path) -> dict[str, Track]:
    """Tracks by name. Slices nest, and the times of a track only grow."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

    trace = protos.Trace.FromString(path.read_bytes())
    found: dict[int, Track] = defaultdict(Track)
    last: dict[int, int] = defaultdict(int)
    for number, packet in enumerate(trace.packet):
        if packet.HasField("track_descriptor"):
            assert packet.track_descriptor.uuid not in found
            found[packet.track_descriptor.uuid].name = packet.track_descriptor.name
        elif packet.HasField("track_event"):
            event = packet.track_event
            assert packet.timestamp_clock_id == protos.BUILTIN_CLOCK_REALTIME
            assert event.track_uuid in found and packet.timestamp >= last[event.track_uuid]
            last[event.track_uuid] = packet.timestamp
            found[event.track_uuid].add(packet.timestamp, event)
        else:
            assert number == 0 and packet.clock_snapshot.primary_trace_clock == protos.BUILTIN_CLOCK_REALTIME
    assert not any(track.open for track in found.values())
    return {track.name: track for track in found.values()}


def share_covered(track: Track, since: int, until: int) -> float:
    """Which share of this time is within phases, which are those in an iteration."""
    covered, reached = 0, since
    for begin, end, _, depth in sorted(track.slices):
        if depth == 1 and end > reached and begin < until:
            covered += min(end, until) - max(begin, reached)
            reached = min(end, until)
    return covered / (until - since)
