"""What every rank did when, as one SVG: no scripts, no ids, nothing from elsewhere; pages may hold it as it is. Pure.

Time is cut into columns. In each, a rank has the color of what it did most, but a restart comes before everything
else, so that one of 20 ms can be seen in a job of a day. Ranks that look the same are drawn as one rectangle, which
keeps a picture of many ranks and restarts small. The colors are those of Okabe and Ito, which colour-blind people can
tell apart.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from inprocess.attribution import one_line
from inprocess.protocol.phases import Phase
from inprocess.reports.incident import Incident
from inprocess.reports.reading import Trail
from inprocess.reports.slices import ABORTING, FIRST_STEP, LEAVING, RESERVE, Lane, Slice, lanes, sizes

__all__ = ["svg"]

WIDTH, LEFT, RIGHT = 1000, 74, 14
COLUMNS = WIDTH - LEFT - RIGHT
#: lanes at most: of more ranks, several share one
MAX_LANES = 64
#: rows of labels above the lanes
LABEL_ROWS = 3
SIZE_HEIGHT = 46
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
TEXT, FAINT, GRID, BACK = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"

#: what a rank does -> (color, legend); what restarts it comes first
RUNNING, START, UNSEEN, ABORT, REGROUP, BEGIN, GONE = range(7)
STATES = {
    RUNNING: ("#56b4e9", "runs the function"),
    START: ("#c3c9d0", "starts, is in reserve or ends"),
    UNSEEN: ("#cc79a7", "a fault, not noticed yet"),
    ABORT: ("#d55e00", "is interrupted"),
    REGROUP: ("#f0e442", "waits for the others, gets its rank"),
    BEGIN: ("#009e73", "begins again, to the first step"),
    GONE: ("#8c959f", "gone"),
}
_OF_PHASE = {
    Phase.RUN.value: RUNNING,
    Phase.ABORT.value: ABORT,
    Phase.FINALIZE.value: ABORT,
    Phase.RECHECK.value: ABORT,
    Phase.END.value: REGROUP,
    Phase.FAILOVER.value: REGROUP,
    Phase.ASSIGN.value: REGROUP,
    Phase.START.value: REGROUP,
    Phase.INITIALIZE.value: BEGIN,
    Phase.CHECK.value: BEGIN,
}
_OF_PART = {FIRST_STEP: BEGIN, ABORTING: ABORT, LEAVING: ABORT, RESERVE: START}
Piece = tuple[float, float, int]


def svg(jobs: Sequence[tuple[Trail, list[Incident]]]) -> str:
    """World size, what every rank did, and each restart, over the time of all jobs of a directory."""
    picture = _Picture(jobs)
    if not picture.rows:
        return _document(60, "no events", [_text(16, 34, "no events", FAINT)])
    body = [*picture.head(), *picture.sizes(), *picture.marks(), *picture.lanes(), *picture.axis(), *picture.legend()]
    return _document(picture.height, picture.title, body)


@dataclass(frozen=True)
class _Row:
    """A lane of the picture: one rank, or several."""

    label: str
    ranks: tuple[int, ...]
    states: tuple[int | None, ...]


class _Picture:
    """Where everything is, from top to bottom."""

    def __init__(self, jobs: Sequence[tuple[Trail, list[Incident]]]) -> None:
        of_jobs = [(trail, lanes(trail)) for trail, _ in jobs]
        there = [lane for _, each in of_jobs for lane in each]
        self.begin = min((lane.begin for lane in there), default=0.0)
        self.span = max((lane.end for lane in there), default=0.0) - self.begin or 1.0
        found = (incident for _, each in jobs for incident in each)
        self.incidents = sorted(
            ((self._within(each.at), each.number, each) for each in found), key=lambda each: each[:2]
        )
        self._sizes = sorted((self._within(at), size) for trail, each in of_jobs for at, size in sizes(trail, each))
        self.rows = self._rows(there)
        self.ranks = len({lane.rank for lane in there})
        restarts = len(self.incidents)
        self.title = f"{_count(self.ranks, 'rank')}, {_count(restarts, 'restart')} in {_seconds(self.span)} s"
        self._labels = list(_labels(self.incidents))
        used = 1 + max((row for _, _, row, _ in self._labels), default=-1)
        self.top_sizes = 50
        self.top_marks = self.top_sizes + SIZE_HEIGHT + 8
        self.top = self.top_marks + 15 * used + 4
        number = len(self.rows)
        self.lane = 22 if number <= 8 else max(8, min(18, 512 // max(1, number)))
        self.bottom = self.top + self.lane * number
        used_states = {state for row in self.rows for state in row.states if state is not None}
        self._legend = [STATES[state] for state in STATES if state in used_states]
        self._legend_rows = list(_wrapped(self._legend))
        self.height = self.bottom + 40 + 20 * len(self._legend_rows) + 6

    def _within(self, at: float) -> float:
        """In columns, from 0 to the last."""
        share = (at - self.begin) / self.span
        return min(1.0, max(0.0, share)) * COLUMNS if math.isfinite(share) else 0.0

    # --- what is drawn ---------------------------------------------------------------------------------------------

    def head(self) -> Iterator[str]:
        yield _text(16, 26, self.title, TEXT, size=16, weight=600)

    def sizes(self) -> Iterator[str]:
        """A step line."""
        most = max((size for _, size in self._sizes), default=0)
        bottom = self.top_sizes + SIZE_HEIGHT
        yield _text(LEFT - 8, self.top_sizes + 9, str(most), FAINT, anchor="end")
        yield _text(LEFT - 8, self.top_sizes + 27, "world size", FAINT, anchor="end")
        yield _text(LEFT - 8, bottom + 1, "0", FAINT, anchor="end")
        yield f'<path d="M{LEFT} {bottom + 0.5}h{COLUMNS}" stroke="{GRID}" />'
        if not most:
            return
        points, last = [f"M{LEFT} {bottom}"], COLUMNS
        for x, size in _thinned(self._sizes):
            points.append(f"H{LEFT + x:.1f}V{bottom - size / most * (SIZE_HEIGHT - 4):.1f}")
        line = "".join([*points, f"H{LEFT + last}"])
        yield f'<path d="{line}V{bottom}Z" fill="#dfe6ee" />'
        yield f'<path d="{line}" fill="none" stroke="#3d4f63" stroke-width="1.5" />'

    def marks(self) -> Iterator[str]:
        """Each restart, above and across the lanes; those of one column together."""
        placed = {index: (text, row, is_left) for index, text, row, is_left in self._labels}
        for index, (x, group) in enumerate(_columns(self.incidents)):
            at = LEFT + x + 0.5
            text, row, is_left = placed.get(index, ("", 0, False))
            first = self.top_marks + 15 * row + 12
            told = "\n".join(self._told(each) for each in group[:20])
            top = first - 9 if text else self.top - 4
            path = (
                f'<path d="M{at} {top}V{self.bottom}" stroke="{TEXT}" stroke-opacity="0.55" stroke-dasharray="2 2" />'
            )
            label = _text(at + (-4 if is_left else 3), first, text, TEXT, anchor="end" if is_left else "start")
            lines = [f"<title>{_plain(told)}</title>", path, *([label] if text else [])]
            yield f"<g>{''.join(lines)}</g>"

    def lanes(self) -> Iterator[str]:
        every = math.ceil(11 / self.lane)
        for number, row in enumerate(self.rows):
            if number % every == 0:
                y = self.top + self.lane * number + self.lane / 2 + 4
                yield _text(LEFT - 8, y, row.label, TEXT, anchor="end", size=min(12, self.lane + 3))
        # the marks are below the bars
        for (x, until, state), first, count in _rectangles(self.rows):
            y, height = self.top + self.lane * first, self.lane * count
            color = STATES[state][0]
            yield f'<path d="M{LEFT + x} {y}h{until - x}v{height}h{x - until}z" fill="{color}" />'
        gaps = "".join(f"M{LEFT} {self.top + self.lane * number}h{COLUMNS}" for number in range(len(self.rows) + 1))
        yield f'<path d="{gaps}" stroke="{BACK}" stroke-width="{2 if self.lane > 10 else 1}" />'
        yield from self._gone()
        yield from self._culprits()

    def _gone(self) -> Iterator[str]:
        lines = []
        for number, row in enumerate(self.rows):
            y = self.top + self.lane * (number + 0.5)
            lines += [f"M{LEFT + x} {y}h{until - x}" for x, until, state in _runs(row.states) if state == GONE]
        if lines:
            yield f'<path d="{"".join(lines)}" stroke="{STATES[GONE][0]}" stroke-dasharray="3 3" />'

    def _culprits(self) -> Iterator[str]:
        """A cross where the rank was that failed first."""
        rows = {rank: number for number, row in enumerate(self.rows) for rank in row.ranks}
        arm = 4 if self.lane > 10 else 2.5
        crosses = {
            (int(x), rows[each.verdict.initial_rank])
            for x, _, each in self.incidents
            if each.verdict.initial_rank in rows and each.verdict.kind != "request"
        }
        lines = [
            f"M{LEFT + x + 0.5 - arm} {self.top + self.lane * (row + 0.5) - arm}l{2 * arm} {2 * arm}m0 {-2 * arm}"
            f"l{-2 * arm} {2 * arm}"
            for x, row in sorted(crosses)
        ]
        if lines:
            path = f'<path d="{"".join(lines)}" fill="none" '
            yield path + f'stroke="{BACK}" stroke-width="4" shape-rendering="auto" />'
            yield path + f'stroke="{TEXT}" stroke-width="1.8" shape-rendering="auto" />'

    def axis(self) -> Iterator[str]:
        """Seconds."""
        step = _step(self.span)
        yield f'<path d="M{LEFT} {self.bottom + 4.5}h{COLUMNS}" stroke="{FAINT}" />'
        for number in range(int(self.span / step) + 1):
            x = LEFT + number * step / self.span * COLUMNS
            is_last = x > WIDTH - RIGHT - 24
            yield f'<path d="M{x:.1f} {self.bottom + 4}v5" stroke="{FAINT}" />'
            text = _seconds(number * step) + " s" * (number == 0)
            yield _text(x, self.bottom + 22, text, FAINT, anchor="end" if is_last else "middle")

    def legend(self) -> Iterator[str]:
        for row, entries in enumerate(self._legend_rows):
            y = self.bottom + 40 + 20 * row
            for x, color, text in entries:
                if color == STATES[GONE][0]:
                    yield f'<path d="M{x} {y + 5.5}h14" stroke="{color}" stroke-dasharray="3 3" />'
                elif not color:
                    yield f'<path d="M{x + 3} {y + 2}l8 8m0 -8l-8 8" stroke="{TEXT}" stroke-width="1.8" />'
                else:
                    yield f'<rect x="{x}" y="{y}" width="14" height="11" fill="{color}" />'
                yield _text(x + 19, y + 10, text, TEXT)

    def _told(self, incident: Incident) -> str:
        verdict = incident.verdict
        who = "" if verdict.initial_rank is None else f" rank {verdict.initial_rank}:"
        where = f" at {verdict.where}" if verdict.where else ""
        return one_line(
            f"restart {incident.number}:{who} {verdict.kind}{where}; {incident.sizes} ranks; {verdict.message}", 300
        )

    # --- rows ------------------------------------------------------------------------------------------------------

    def _rows(self, there: Sequence[Lane]) -> list[_Row]:
        ranks = sorted({lane.rank for lane in there})
        each = math.ceil(len(ranks) / MAX_LANES)
        rows = []
        for first in range(0, len(ranks), each or 1):
            group = tuple(ranks[first : first + each])
            pieces = [piece for rank in group for piece in self._pieces([lane for lane in there if lane.rank == rank])]
            label = f"rank {group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}"
            rows.append(_Row(label, group, _states([(self._within(b), self._within(e), s) for b, e, s in pieces])))
        return rows

    def _pieces(self, there: Sequence[Lane]) -> Iterator[Piece]:
        """All processes of one rank."""
        faults = sorted(each.at for _, _, each in self.incidents)
        for index, lane in enumerate(there):
            yield from _of(lane, faults)
            following = there[index + 1].begin if index + 1 < len(there) else self.begin + self.span
            if lane.ended not in ("", "completed") and following > lane.end:
                yield lane.end, following, GONE


def _of(lane: Lane, faults: Sequence[float]) -> Iterator[Piece]:
    """What one process did; until its own first step it starts."""
    ran = False
    for phase in lane.phases:
        is_first_run = not ran and phase.name == Phase.RUN.value
        ran = ran or is_first_run
        state = _OF_PHASE.get(phase.name, START) if ran else START
        pieces = _divided(phase, state, faults)
        yield from ((b, e, START) if is_first_run and s == BEGIN else (b, e, s) for b, e, s in pieces)


def _divided(phase: Slice, state: int, faults: Sequence[float]) -> Iterator[Piece]:
    """A phase by what is inside it. Between a fault and what the rank does about it, it has not noticed it yet."""
    since = phase.begin
    for part in (*phase.parts, Slice(phase.end, phase.end, "")):
        if part.begin > since:
            yield since, part.begin, state
        since = part.end
        inside = _OF_PART.get(part.name, state)
        following = bisect.bisect_right(faults, part.begin)
        if inside == RUNNING and following < len(faults) and faults[following] < part.end:
            yield part.begin, faults[following], RUNNING
            yield faults[following], part.end, UNSEEN
        else:
            yield part.begin, part.end, inside


def _states(pieces: Iterable[Piece]) -> tuple[int | None, ...]:
    """Of each column: what lasted longest in it, but a restart before everything else."""
    weights: list[dict[int, float]] = [{} for _ in range(COLUMNS)]
    for begin, end, state in pieces:
        weight = 1e12 if UNSEEN <= state <= BEGIN else 1.0
        for column in range(int(begin), min(COLUMNS, math.ceil(end) if end > begin else int(begin) + 1)):
            share = min(end, column + 1) - max(begin, column) + 1e-9
            weights[column][state] = weights[column].get(state, 0.0) + share * weight
    return tuple(max(each, key=lambda state: each[state]) if each else None for each in weights)


def _runs(states: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    x = 0
    for state, group in itertools.groupby(states):
        until = x + len(list(group))
        if state is not None:
            yield x, until, state
        x = until


def _rectangles(rows: Sequence[_Row]) -> Iterator[tuple[tuple[int, int, int], int, int]]:
    """(columns and state, first row, rows): what is the same in rows that follow each other is one."""
    open_: dict[tuple[int, int, int], int] = {}
    for number, row in enumerate([*rows, _Row("", (), ())]):
        here = {run for run in _runs(row.states) if run[2] != GONE}
        for run in [each for each in open_ if each not in here]:
            first = open_.pop(run)
            yield run, first, number - first
        for run in here:
            open_.setdefault(run, number)


# --- labels and numbers ---------------------------------------------------------------------------------------------


def _columns(incidents: Sequence[tuple[float, int, Incident]]) -> list[tuple[int, list[Incident]]]:
    groups = itertools.groupby(incidents, lambda each: min(COLUMNS - 1, int(each[0])))
    return [(x, [incident for _, _, incident in group]) for x, group in groups]


def _labels(incidents: Sequence[tuple[float, int, Incident]]) -> Iterator[tuple[int, str, int, bool]]:
    """(column of restarts, text, row, whether it is left of its mark), where there is space: with the class, or not."""
    ends = [-1.0] * LABEL_ROWS
    for index, (x, group) in enumerate(_columns(incidents)):
        number = str(group[0].number) if len(group) == 1 else f"{group[0].number}-{group[-1].number}"
        kinds = {incident.verdict.kind for incident in group}
        for text in (f"{number} {next(iter(kinds))}" if len(kinds) == 1 else number, number):
            width = 8 + _width(text)
            is_left = x + width > COLUMNS + RIGHT
            begin = x - width if is_left else x
            row = next((row for row, used in enumerate(ends) if used < begin), None)
            if row is not None:
                ends[row] = begin + width
                yield index, text, row, is_left
                break


def _thinned(points: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Of the points of one column the lowest and the last."""
    for _, group in itertools.groupby(points, lambda point: int(point[0])):
        each = list(group)
        if len(each) > 2:
            yield min(each[:-1], key=lambda point: point[1])
            yield each[-1]
        else:
            yield from each


def _wrapped(legend: Sequence[tuple[str, str]]) -> Iterator[list[tuple[int, str, str]]]:
    row: list[tuple[int, str, str]] = []
    x = LEFT
    for color, text in [*legend, ("", "failed first")]:
        width = 19 + int(_width(text)) + 18
        if x + width > WIDTH and row:
            yield row
            row, x = [], LEFT
        row.append((x, color, text))
        x += width
    yield row


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten: at most ten in the span."""
    power = 10.0 ** math.floor(math.log10(span / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span / 10)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _width(text: str) -> float:
    """About so many pixels at 12."""
    return 6.4 * len(text)


def _plain(text: str) -> str:
    """For XML: whatever is not printable has been written as an escape by `one_line`."""
    return "\n".join(escape(one_line(line), {'"': "&quot;"}) for line in text.split("\n"))


def _text(x: float, y: float, text: str, color: str, size: float = 12, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{_plain(text)}</text>'
    )


def _document(height: float, title: str, body: Iterable[str]) -> str:
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" style="max-width:100%;height:auto" role="img" font-family="{FONT}" '
        'shape-rendering="crispEdges">'
    )
    back = f'<rect width="{WIDTH}" height="{height:g}" fill="{BACK}" />'
    return "\n".join([begin, f"<title>{_plain(title)}</title>", back, *body, "</svg>\n"])
