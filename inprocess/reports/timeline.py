"""``inprocess timeline RUN_DIR -o FILE``: what every rank did when, as a Perfetto trace, or as a picture (``.svg``).

Times in a trace are nanoseconds since 1970 (``REALTIME`` is its primary clock), not offsets from its begin: so it can
be laid beside another trace of the same job, such as torch's profiler's, which also counts from 1970. All tracks are
custom ones and none is a process of Perfetto's: ids of processes are those of one host, and ranks have many.

A flow begins at the moment ``fault`` of the rank that failed first, not at the event that tells of it: its death may be
seen a moment after others saw their connections to it close.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from inprocess.attribution import one_line
from inprocess.reports.drawing import svg
from inprocess.reports.incident import Incident
from inprocess.reports.reading import Entry, Trail, read
from inprocess.reports.slices import Lane, Slice, lanes, sizes
from inprocess.reports.summary import numbered, read_summary
from inprocess.system.descriptors import shortage

__all__ = ["NotInstalledError", "main", "write_trace"]

#: packets in one piece of a file
BATCH = 5_000
#: characters of a name, and of an annotation
NAME, TEXT = 200, 4_000
Job = tuple[Trail, list[Incident]]


class NotInstalledError(Exception):
    """The package with Perfetto's messages is missing; says how to get it."""


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit code: 0, or 2 where nothing was written."""
    parser = argparse.ArgumentParser(
        prog="inprocess timeline", description="What every rank did when: for ui.perfetto.dev, or as a picture."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory with the events of the job")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="a picture where it ends in .svg, else a Perfetto trace"
    )
    given = parser.parse_args(list(arguments))
    try:
        trails, problems = read(given.run_dir)
        jobs = numbered(read_summary(given.run_dir), trails)
        if given.output.endswith(".svg"):
            picture = svg(jobs).encode()
            with _open(given.output) as file:
                file.write(picture)
        else:
            _messages()  # before a file is made
            with _open(given.output) as file:
                write_trace(jobs, file)
    except (OSError, NotInstalledError) as error:
        print(f"inprocess timeline: {one_line(shortage(error) or str(error))}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"inprocess timeline: {problem}", file=sys.stderr)
    return 0


def _open(path: str) -> IO[bytes]:
    """It has messages and places of the user's program."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def write_trace(jobs: Iterable[Job], file: IO[bytes]) -> None:
    """Write all jobs of a directory.

    Raises:
        NotInstalledError: the extra ``timeline`` is not installed.
    """
    trace = _Trace(file)
    for number, (trail, incidents) in enumerate(jobs):
        _job(trace, number, trail, incidents)
    trace.close()


def _messages() -> tuple[Any, Any]:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2  # noqa: PLC0415  (an extra)
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder  # noqa: PLC0415
    except ImportError as error:
        raise NotInstalledError(
            f'a trace needs the package perfetto ({one_line(str(error), 200)}): pip install "inprocess[timeline]". '
            "A picture needs nothing: -o timeline.svg"
        ) from None
    return perfetto_trace_pb2, TraceProtoBuilder


class _Trace:
    """Packets, written in pieces: pieces of a trace one after the other are a trace."""

    def __init__(self, file: IO[bytes]) -> None:
        self.protos, self._make = _messages()
        self._file, self._builder, self._left = file, self._make(), BATCH
        self._flows = itertools.count(1)
        self.realtime = self.protos.BUILTIN_CLOCK_REALTIME
        self._is_first = True

    def packet(self, at: float | None = None) -> Any:
        if not self._left:
            self.close()
        self._left -= 1
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = 1
        if at is not None:
            packet.timestamp, packet.timestamp_clock_id = nanoseconds(at), self.realtime
        return packet

    def clock(self, at: float) -> None:
        """Once, before everything that has a time."""
        if not self._is_first:
            return
        self._is_first = False
        packet = self.packet()
        packet.sequence_flags = self.protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.clock_snapshot.primary_trace_clock = self.realtime
        for clock in (self.realtime, self.protos.BUILTIN_CLOCK_BOOTTIME):
            told = packet.clock_snapshot.clocks.add()
            told.clock_id, told.timestamp = clock, nanoseconds(at)

    def track(self, of: object, name: str, parent: int | None = None, order: int = 0) -> Any:
        """Its descriptor. ``of`` tells it from all others."""
        track = self.packet().track_descriptor
        track.uuid = int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "little") | 1
        track.name = one_line(name, NAME)
        track.sibling_order_rank = order
        track.sibling_merge_behavior = track.SIBLING_MERGE_BEHAVIOR_NONE
        if parent is not None:
            track.parent_uuid = parent
        return track

    def event(
        self, at: float, track: int, kind: str, name: str = "", annotations: Mapping[str, object] | None = None
    ) -> Any:
        event = self.packet(at).track_event
        event.type, event.track_uuid = getattr(event, f"TYPE_{kind}"), track
        if name:
            event.name = one_line(name, NAME)
        for key, value in (annotations or {}).items():
            _annotate(event.debug_annotations.add(), key, value)
        return event

    def flow(self) -> int:
        return next(self._flows)

    def close(self) -> None:
        """Write what is there."""
        self._file.write(self._builder.serialize())
        self._builder, self._left = self._make(), BATCH


def nanoseconds(at: float) -> int:
    """Since 1970."""
    return round(at * 1e9)


def _annotate(annotation: Any, name: str, value: object) -> None:
    annotation.name = one_line(name, NAME)
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        annotation.string_value = one_line(text, TEXT)


# --- a job --------------------------------------------------------------------------------------------------------


def _job(trace: _Trace, number: int, trail: Trail, incidents: Sequence[Incident]) -> None:
    found = lanes(trail)
    if not found:
        return
    begin = min(lane.begin for lane in found)
    trace.clock(begin)
    job = trace.track((number, trail.job), f"job {trail.job}")
    job.child_ordering = job.EXPLICIT
    restarts = trace.track((number, trail.job, "restarts"), "restarts", job.uuid, 1)
    size = trace.track((number, trail.job, "size"), "world size", job.uuid, 2)
    size.counter.unit_name = "ranks"
    for at, value in sizes(trail, found):
        trace.event(at, size.uuid, "COUNTER").counter_value = value
    flows = _Flows(trace, begin, incidents)
    for order, lane in enumerate(found):
        who = f"{lane.host or '?'}, pid {lane.pid}" if lane.pid else "its monitor alone"
        of = (number, trail.job, lane.rank, lane.host, lane.pid, lane.begin)
        track = trace.track(of, f"rank {lane.rank} ({who})", job.uuid, 3 + order)
        _lane(trace, track.uuid, lane, flows)
    _restarts(trace, restarts.uuid, flows, max(lane.end for lane in found))


class _Flows:
    """From each incident's fault to the ranks that were interrupted for it."""

    def __init__(self, trace: _Trace, begin: float, incidents: Sequence[Incident]) -> None:
        #: when it began, never before the job, and not before the incident before it
        self.incidents: list[tuple[float, Incident]] = []
        self.starts: dict[int, list[int]] = {}
        self.ends: dict[int, list[int]] = {}
        last = begin
        for index, incident in enumerate(incidents):
            last = incident.at if last < incident.at < 1.8e10 else last
            self.incidents.append((last, incident))
            seen: set[int] = set()
            for entry in incident.evidence.entries:
                if entry.kind == "interrupted" and entry.rank not in seen:
                    seen.add(entry.rank)
                    flow = trace.flow()
                    self.starts.setdefault(index, []).append(flow)
                    self.ends.setdefault(id(entry), []).append(flow)
        self.placed: set[int] = set()

    def of(self, lane: Lane) -> Iterator[tuple[float, int, Incident]]:
        """The incidents that this process began."""
        for index, (at, incident) in enumerate(self.incidents):
            its = incident.verdict.initial_rank == lane.rank and lane.begin <= at <= lane.end
            if its and index not in self.placed:
                self.placed.add(index)
                yield at, index, incident


def _restarts(trace: _Trace, track: int, flows: _Flows, end: float) -> None:
    """One slice for each, with the phases of the rank that was the last; those of one that failed end with the next."""
    for index, (at, incident) in enumerate(flows.incidents):
        following = flows.incidents[index + 1][0] if index + 1 < len(flows.incidents) else end
        verdict = incident.verdict
        who = "" if verdict.initial_rank is None else f": rank {verdict.initial_rank}"
        parts, since = [], at
        for name, seconds in incident.phases.items():
            until = min(since + (seconds or 0.0), following)
            parts += [Slice(since, until, name)] if until > since else []
            since = until
        told = {
            "class": verdict.kind,
            "message": verdict.message,
            "where": verdict.where,
            "confidence": verdict.confidence,
            "steps lost": "?" if incident.steps_lost is None else incident.steps_lost,
            "decision": incident.decision,
            "ranks": incident.sizes,
        }
        name = f"restart {incident.number}{who}: {verdict.kind}"
        for moment, kind, each in _walk(Slice(at, since, name, tuple(parts), told)):
            event = _edge(trace, moment, track, kind, each)
            if each.name == name and kind == "SLICE_BEGIN" and index not in flows.placed:
                event.flow_ids.extend(flows.starts.get(index, ()))


def _lane(trace: _Trace, track: int, lane: Lane, flows: _Flows) -> None:
    walked = itertools.chain.from_iterable(map(_walk, lane.iterations))
    faults = ((at, "fault", (index, incident)) for at, index, incident in flows.of(lane))
    moments = ((entry.at, "moment", entry) for entry in lane.moments)
    merged: Iterator[tuple[float, str, Any]] = heapq.merge(walked, faults, moments, key=lambda each: each[0])
    for at, kind, what in merged:
        if kind == "fault":
            index, incident = what
            told = {"restart": incident.number, "class": incident.verdict.kind, "message": incident.verdict.message}
            event = trace.event(at, track, "INSTANT", f"fault: {incident.verdict.kind}", told)
            event.flow_ids.extend(flows.starts.get(index, ()))
        elif kind == "moment":
            _moment(trace, track, what, flows)
        else:
            _edge(trace, at, track, kind, what)


def _walk(slice_: Slice) -> Iterator[tuple[float, str, Slice]]:
    yield slice_.begin, "SLICE_BEGIN", slice_
    for part in slice_.parts:
        yield from _walk(part)
    yield slice_.end, "SLICE_END", slice_


def _edge(trace: _Trace, at: float, track: int, kind: str, slice_: Slice) -> Any:
    """An end has no name."""
    is_begin = kind == "SLICE_BEGIN"
    return trace.event(at, track, kind, slice_.name if is_begin else "", slice_.attributes if is_begin else None)


def _moment(trace: _Trace, track: int, entry: Entry, flows: _Flows) -> None:
    name = entry.kind.replace("_", " ")
    event = trace.event(entry.at, track, "INSTANT", name, entry.event.attributes)
    event.terminating_flow_ids.extend(flows.ends.get(id(entry), ()))
