"""The pictures of the README and of the documentation's first page. Standard library only; the same input gives the
same files.

    python -m benchmarks.pictures            draws them anew, into docs/pictures
    python -m benchmarks.pictures --record   first runs the example of the README, and keeps what it prints

`restart-light.svg` and `restart-dark.svg` show one restart to scale, from benchmarks/results.json, and say below how
long one takes in a training, from benchmarks/training.json. `terminal.svg` shows `terminal.txt`, which is what the
example printed. No scripts, fonts or images from elsewhere, as GitHub wants it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks import report, training_report
from benchmarks.plan import OURS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
RECORDING = FOLDER / "terminal.txt"

# --- a restart, to scale ----------------------------------------------------------------------------------------------

#: the rank that is killed in it, of so many
VICTIM, RANKS = 0, 4
CASE = f"restart_kill: SIGKILL of rank {VICTIM}, in an all-reduce"
#: what a part of the restart is called in the picture -> the phases that were measured of it
PARTS = {
    "noticed": ("detect",),
    "interrupted": ("abort", "leave function"),
    "regrouped": ("end round", "assign", "start round", "enter"),
}
#: background of nothing: the page's own
LIGHT = {"text": "#1f2328", "faint": "#59636e", "line": "#afb8c1", "run": "#4269d0", "on": "#ffffff", "dead": "#cf222e",
         "noticed": "#c3d0f2", "interrupted": "#ff725c", "regrouped": "#efb118"}  # fmt: skip
DARK = {"text": "#f0f6fc", "faint": "#9198a1", "line": "#59636e", "run": "#4269d0", "on": "#ffffff", "dead": "#ff7b72",
        "noticed": "#2f3f70", "interrupted": "#ff725c", "regrouped": "#efb118"}  # fmt: skip
SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
#: pixels: of a millisecond, of a lane, and where lanes and time begin; milliseconds before and after the restart
SCALE, LANE, TOP, ZERO, BEFORE, AFTER = 17.5, 34, 74, 226, 8, 11


def restart(results: Mapping[str, Any], colors: Mapping[str, str], below: str = "") -> str:
    """One restart as lanes of ranks over time; ``below``: a last line."""
    entry = results["cases"][CASE][OURS.name]
    ends = [0.0, *itertools.accumulate(sum(entry["phases"][phase] for phase in PARTS[part]) for part in PARTS)]
    total = f"{report.median(entry, 'entry'):.0f}"
    right, bottom = ZERO + (ends[-1] + AFTER) * SCALE, TOP + RANKS * LANE
    text = f"Rank {VICTIM} of {RANKS} is killed: the others run the function again after {total} ms"
    lanes = (_lane(rank, ends, right, colors) for rank in range(RANKS))
    body = [
        _text(16, 26, text, colors["text"], size=17, weight=600),
        _text(16, 47, "in the same processes, with new ranks and a new process group", colors["faint"], size=14),
        *itertools.chain.from_iterable(lanes),
        *_parts(ends, bottom, colors),
    ]
    if below:
        body.append(_text(16, bottom + 76, below, colors["faint"], size=14))
    return _svg(right + 16, bottom + (92 if below else 66), text, body)


def _lane(rank: int, ends: list[float], right: float, colors: Mapping[str, str]) -> Iterator[str]:
    y, begin = TOP + rank * LANE, ZERO - BEFORE * SCALE
    yield _text(16, y + 18, f"rank {rank}", colors["text"])
    yield _bar(begin, ZERO, y, colors["run"], "train()", colors["on"])
    if rank == VICTIM:
        yield f'<path d="M{ZERO - 7} {y + 6}l14 14m0 -14l-14 14" stroke="{colors["dead"]}" stroke-width="3.5" />'
        yield _text(ZERO + 16, y + 18, "SIGKILL", colors["dead"], weight=600)
        return
    for part, (start, end) in zip(PARTS, itertools.pairwise(ends), strict=True):
        text = "waits in an all-reduce" if part == "noticed" else ""
        yield _bar(ZERO + start * SCALE, ZERO + end * SCALE, y, colors[part], text, colors["text"])
    now = f"train()  rank {rank - (rank > VICTIM)} of {RANKS - 1}"
    yield _bar(ZERO + ends[-1] * SCALE, right, y, colors["run"], now, colors["on"])


def _parts(ends: list[float], y: float, colors: Mapping[str, str]) -> Iterator[str]:
    """Below the lanes: what each part is, and how long it took."""
    for part, (start, end) in zip(PARTS, itertools.pairwise(ends), strict=True):
        x, width = ZERO + start * SCALE, (end - start) * SCALE
        yield f'<path d="M{x + 1:.1f} {y + 4}v6h{width - 2:.1f}v-6" fill="none" stroke="{colors["line"]}" />'
        middle = x + width / 2
        yield _text(middle, y + 28, part, colors["text"], anchor="middle", size=12)
        yield _text(middle, y + 46, f"{end - start:.1f} ms", colors["faint"], anchor="middle", size=12)


def _bar(left: float, right: float, y: float, fill: str, text: str = "", color: str = "") -> str:
    bar = f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="{LANE - 8}" fill="{fill}" />'
    return bar + (_text((left + right) / 2, y + 18, text, color, anchor="middle") if text else "")


def _text(x: float, y: float, text: str, fill: str, size: int = 14, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'xml:space="preserve">{escape(text)}</text>'
    )


def _svg(width: float, height: float, title: str, body: Iterable[str], family: str = SANS) -> str:
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="{family}">\n'
        f"<title>{escape(title)}</title>\n{inside}\n</svg>\n"
    )


# --- a terminal -------------------------------------------------------------------------------------------------------

MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
#: characters in a line, pixels of one and of a line, and of the frame
COLUMNS, CHARACTER, ROW, EDGE, BAR = 100, 7.8, 19, 16, 30
SCREEN, FRAME, PLAIN, PROMPT = "#0d1117", "#30363d", "#c9d1d9", "#7ee787"
#: a line that begins so -> its color; the first that fits
COLORED = {
    r"\$ ": "#ffffff",
    r"restart \d+: ": "#ffa657",
    "step ": "#8b949e",
    "starting ": "#8b949e",
    "accuracy|faults survived": PROMPT,
}
#: seconds between two lines, where the reader lets pictures move
PACE = 0.3


def terminal(recording: str) -> str:
    """The lines appear one after the other, once. Where nothing moves all of them are there from the beginning."""
    lines = recording.splitlines()
    rows = [(number, row) for number, line in enumerate(lines) for row in _wrapped(line)]
    body = [
        "<style>@media (prefers-reduced-motion: no-preference) { g { animation: show 0.2s linear both } }",
        "@keyframes show { from { opacity: 0 } to { opacity: 1 } }</style>",
    ]
    width, height = EDGE * 2 + COLUMNS * CHARACTER, BAR + len(rows) * ROW + EDGE
    frame = f'width="{width - 1:.0f}" height="{height - 1}" rx="8" stroke="{FRAME}"'
    body.append(f'<rect x="0.5" y="0.5" {frame} fill="{SCREEN}" />')
    body += [f'<circle cx="{EDGE + 4 + 18 * i}" cy="16" r="5" fill="{FRAME}" />' for i in range(3)]
    y = BAR
    for number, line in enumerate(lines):
        color = next((color for start, color in COLORED.items() if re.match(start, line)), PLAIN)
        body.append(f'<g style="animation-delay: {number * PACE:.1f}s">')
        for row in _wrapped(line):
            y += ROW
            body.append(_row(row, y - 4, color))
        body.append("</g>")
    return _svg(width, height, "What the example prints", body, MONO)


def _row(row: str, y: float, color: str) -> str:
    """Each row has the width that its number of characters has, whatever the font is."""
    text = row.lstrip(" ")
    left = EDGE + (len(row) - len(text)) * CHARACTER
    return (
        f'<text x="{left:.1f}" y="{y}" fill="{color}" font-size="13" textLength="{len(text) * CHARACTER:.1f}" '
        f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(text)}</text>'
    )


def _wrapped(line: str) -> list[str]:
    """As a shell wants it where it is the command, otherwise with an indent."""
    if not line.startswith("$ "):
        return textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
    rows = textwrap.wrap(line, COLUMNS - 2, subsequent_indent="      ", break_on_hyphens=False)
    return [*(f"{row} \\" for row in rows[:-1]), rows[-1]]


def record() -> str:
    """What the first command of the README prints, without tracebacks: they name folders of this machine."""
    (command,) = re.findall(r"&& \.venv/bin/(python examples/.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = [sys.executable, *shlex.split(command)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return "\n".join([f"$ {command}", *without_tracebacks(done.stdout.splitlines())]) + "\n"


def without_tracebacks(lines: Iterable[str]) -> Iterator[str]:
    """A traceback, the line that announces it, and the exception at its end are left out."""
    inside = False
    for line in lines:
        if line.endswith("its traceback, once:"):
            inside = True
        elif not inside:
            yield line
        elif not line.startswith((" ", "Traceback")):
            inside = False


def pictures() -> dict[Path, str]:
    """All of them, with what is to be in them."""
    results = json.loads((ROOT / "benchmarks/results.json").read_text())
    below = training_report.caption(training_report.read())
    return {
        FOLDER / "restart-light.svg": restart(results, LIGHT, below),
        FOLDER / "restart-dark.svg": restart(results, DARK, below),
        FOLDER / "terminal.svg": terminal(RECORDING.read_text()),
    }


def write() -> None:
    for path, text in pictures().items():
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the example, and keep what it prints")
    if parser.parse_args().record:
        RECORDING.write_text(record())
    write()


if __name__ == "__main__":
    main()
