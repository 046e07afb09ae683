"""Two directives made from the phase table ``TRANSITIONS``: ``restart-diagram``, a picture, and ``restart-table``.

Only where the boxes stand is written here. A phase without a place stops the build, so the picture cannot lag behind.
"""

from __future__ import annotations

from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from inprocess.protocol.phases import TRANSITIONS, Event, Phase

P = Phase
#: phase -> (column, row)
PLACES = {phase: (0, row) for row, phase in enumerate((P.JOIN, P.ASSIGN, P.START, P.INITIALIZE, P.CHECK, P.RUN))}
PLACES |= {phase: (0, row) for row, phase in enumerate((P.FINISH, P.COMPLETE, P.LEAVE, P.OUT), start=6)}
PLACES |= {phase: (1, row) for row, phase in enumerate((P.FAILOVER, P.END, P.RECHECK, P.FINALIZE, P.ABORT), start=1)}

#: what is drawn: event -> (color, dashes, the words beside the arrow or none)
DRAWN = {
    Event.OK: ("#4a6fa5", "", ""),
    Event.COMPLETED: ("#3a7d44", "", "completed"),
    Event.INTERRUPTED: ("#c0392b", "5 3", "interrupted"),
    Event.NO_START: ("#b9770e", "2 3", "no start"),
    Event.LOST: ("#7d3c98", "4 2", "store lost"),
}
#: the call goes on in a new life
AGAIN = {(P.FAILOVER, Event.OK): P.JOIN}
#: where there are words beside an arrow: once per kind is enough
NAMED = (P.FINISH, P.START, P.END)
WIDTH, HEIGHT = 190, 30
COLUMN, ROW = 340, 56
MARGIN = 14


def corner(phase: Phase) -> tuple[int, int]:
    column, row = PLACES[phase]
    return MARGIN + column * COLUMN, MARGIN + row * ROW


def ends(source: Phase, target: Phase) -> tuple[tuple[int, int], tuple[int, int]]:
    """From border to border: sideways between columns, up or down within one."""
    (x, y), (to_x, to_y) = corner(source), corner(target)
    if x == to_x:
        down = to_y > y
        return (x + WIDTH // 2, y + HEIGHT * down), (to_x + WIDTH // 2, to_y + HEIGHT * (not down))
    right = to_x > x
    shift = 6 if right else -6  # there and back do not cover each other
    return (x + WIDTH * right, y + HEIGHT // 2 + shift), (to_x + WIDTH * (not right), to_y + HEIGHT // 2 + shift)


def arrow(source: Phase, event: Event, target: Phase) -> str:
    color, dashes, words = DRAWN[event]
    (x, y), (to_x, to_y) = ends(source, target)
    line = (
        f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{color}" stroke-width="1.6" '
        f'stroke-dasharray="{dashes}" marker-end="url(#tip-{event.name})"/>'
    )
    if words and source in NAMED:
        beside = 10 if x == to_x else 40
        line += f'<text x="{x + beside}" y="{y + 17}" fill="{color}">{words}</text>'
    return line


def box(phase: Phase) -> str:
    x, y = corner(phase)
    fill = "#fdf3d8" if phase is Phase.RUN else "#ffffff"
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#444"/>'
        f'<text x="{x + WIDTH // 2}" y="{y + 20}" text-anchor="middle" fill="#222">{phase.value}</text>'
    )


def tip(event: Event) -> str:
    return (
        f'<marker id="tip-{event.name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{DRAWN[event][0]}"/></marker>'
    )


def is_main(phase: Phase, event: Event) -> bool:
    """The store may be lost anywhere; that is drawn where a rank has left its function."""
    return (phase is not Phase.FAILOVER and event is not Event.LOST) or (phase, event) in ((P.END, Event.LOST), *AGAIN)


def svg() -> str:
    right = 2 * MARGIN + COLUMN + WIDTH
    bottom = 2 * MARGIN + max(row for _, row in PLACES.values()) * ROW + HEIGHT
    arrows = [
        arrow(phase, event, target)
        for (phase, event), target in (TRANSITIONS | AGAIN).items()
        if event in DRAWN and is_main(phase, event)
    ]
    parts = [f"<defs>{''.join(map(tip, DRAWN))}</defs>", *arrows, *map(box, Phase)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom}" role="img" font-size="14" '
        f'font-family="sans-serif" style="max-width: {right}px; background: #fff">'
        f"<title>Phases of a rank</title>{''.join(parts)}</svg>"
    )


class Diagram(Directive):
    """The main paths: an undisturbed call on the left, a restart on the right."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", svg(), format="html")]


class Table(Directive):
    """All transitions."""

    titles: ClassVar = ("phase", "event", "next phase")

    def run(self) -> list[nodes.Node]:
        group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in self.titles), cols=len(self.titles))
        group += nodes.thead("", self.row(*self.titles))
        group += nodes.tbody("", *(self.row(p.value, e.value, t.value) for (p, e), t in TRANSITIONS.items()))
        return [nodes.table("", group)]

    @staticmethod
    def row(*cells: str) -> nodes.row:
        return nodes.row("", *(nodes.entry("", nodes.paragraph(text=cell)) for cell in cells))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("restart-diagram", Diagram)
    app.add_directive("restart-table", Table)
    return {"parallel_read_safe": True}
