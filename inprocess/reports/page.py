"""One incident as a page: a single file of HTML that loads nothing and runs nothing, whatever the texts in it hold."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from inprocess.attribution import one_line, ranges
from inprocess.reports.accounting import Accounting
from inprocess.reports.history import History
from inprocess.reports.incident import PHASES, Incident
from inprocess.reports.verdict import CLASSES

__all__ = ["headline", "incident_page", "index_page", "page", "safe"]

#: of a stack, and of a text (characters)
MAX_LINES, MAX_TEXT = 60, 1000
#: one colour for each phase, told apart also where colours are not seen well; the numbers stand beside them
COLOURS = ("#d9d9d9", "#e69f00", "#d55e00", "#cc79a7", "#8c6bb1", "#0072b2", "#56b4e9", "#999999", "#009e73", "#b8b000")
STYLE = """
:root { --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --back: #ffffff; --panel: #f6f8fa; --bad: #b42318 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa4af; --line: #30363d; --back: #0d1117; --panel: #161b22; --bad: #ff7b72 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 64rem; padding: 2rem 1.25rem 4rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.3; margin: .25rem 0 1rem; overflow-wrap: anywhere }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem }
.over { color: var(--soft); font-size: .9rem }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr)); gap: .75rem; margin: 1rem 0 }
.facts div { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .75rem;
  overflow-wrap: anywhere }
.facts b { display: block; font-size: .8rem; font-weight: normal; color: var(--soft) }
.kind { color: var(--bad) }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .75rem; overflow-x: auto;
  font: 13px/1.45 ui-monospace, monospace; margin: .25rem 0 }
pre.message { white-space: pre-wrap; overflow-wrap: anywhere }
pre .own { font-weight: bold }
a { color: inherit }
.bar { display: flex; height: 1.75rem; border-radius: 6px; overflow: hidden; border: 1px solid var(--line) }
.bar span { min-width: 1px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: .2rem 1.25rem .2rem 0; vertical-align: top }
td.number { text-align: right }
.dot { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin-right: .5rem }
.picture { overflow-x: auto } .picture svg { display: block; width: 100%; min-width: 40rem; height: auto }
ul { padding-left: 1.2rem; margin: .25rem 0 } li { overflow-wrap: anywhere }
summary { cursor: pointer }
"""
#: lines of these are not the program's own
_FOREIGN = ("site-packages", "/lib/python", "<frozen", "/inprocess/")
_WHAT = {
    "standstill": "from the last sign of life until it was noticed; not in the bar",
    "detect": "from the fault to the interruption",
    "abort": "groups and connections are closed",
    "leave": "the function is left",
    "finalize": "finalize hook, health check",
    "end_round": "all ranks have left",
    "assign": "new ranks are assigned",
    "start_round": "all ranks have theirs",
    "initialize": "initialize hook, health check",
    "first_step": "until the first ping()",
}


def safe(text: str, limit: int = MAX_TEXT) -> str:
    """Any text as one line of HTML."""
    return html.escape(one_line(text, limit))


def headline(incident: Incident) -> str:
    """What happened, in one line of plain text."""
    verdict = incident.verdict
    who = "Nobody can be named" if verdict.initial_rank is None else f"Rank {verdict.initial_rank}"
    also = f" (and {_ranks(verdict.also)})" if verdict.also else ""
    where = f" at {verdict.where}" if verdict.where else ""
    waiting = f"; {_ranks(verdict.waiting)} waited" if verdict.waiting else ""
    return f"{who}{also}: {verdict.kind}{where}{waiting}"


def incident_page(incident: Incident, history: History, job: str) -> str:
    """The whole page. ``job``: as in the header of the events."""
    verdict = incident.verdict
    when = _when(incident, "%Y-%m-%d %H:%M:%S UTC")
    witness = incident.evidence.witnesses.get(-1 if verdict.initial_rank is None else verdict.initial_rank)
    facts = {
        "class": f'<span class="kind">{safe(verdict.kind)}</span>',
        "how sure": f"{verdict.confidence:.0%}",
        "ranks": safe(incident.sizes).replace("-&gt;", "&rarr;"),
        "restart": safe(_milliseconds(incident.took)),
        "steps lost": incident.steps,
        "host": safe(incident.host or "?", 200),
        "process": safe(str(witness.pid) if witness is not None and witness.pid else "?"),
    }
    body = [
        f'<p class="over">Incident {incident.number} of job {safe(job, 200)}, {when}</p>',
        f"<h1>{safe(headline(incident))}</h1>",
        f"<p>{safe(CLASSES.get(verdict.kind, ''))}</p>",
        '<div class="facts">' + "".join(f"<div><b>{name}</b>{value}</div>" for name, value in facts.items()) + "</div>",
        *([f'<pre class="message">{safe(verdict.message, 4000)}</pre>'] if verdict.message else []),
        "<h2>Where the time went</h2>",
        *_phases(incident),
        "<h2>Evidence</h2>",
        _list(verdict.evidence or ("none",)),
        *(["<p>Missing:</p>", _list(verdict.against)] if verdict.against else []),
        "<h2>Before</h2>",
        _list(history.lines()),
        "<h2>What was done</h2>",
        f"<p>{safe(incident.decision)}</p>",
        "<h2>Where everybody was</h2>",
        '<p class="over">Innermost line first, before anything was unwound. '
        "Ranks with the same stack are shown together.</p>",
        *_stacks(incident),
    ]
    return page(f"{incident.number}: {headline(incident)}", body)


def index_page(
    jobs: Sequence[tuple[str, Sequence[Incident]]], time: Accounting | None, folder: str, picture: str
) -> str:
    """All incidents of a run directory, the latest first, with links to their pages below ``folder``.

    ``picture``: the timeline as SVG, which becomes a part of the page as it is.
    """
    found = [incident for _, incidents in jobs for incident in incidents]
    known = [incident.steps_lost for incident in found if incident.steps_lost is not None]
    kinds = Counter(incident.verdict.kind for incident in found)
    facts = {
        "goodput": "?" if time is None else f"{time.goodput:.1%}",
        "incidents": str(len(found)),
        "of them": safe(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"),
        "steps lost": f"{sum(known)}{' + ?' if len(known) < len(found) else ''}",
    }
    rows = [
        f'<tr><td class="number">{incident.number}</td><td>{_when(incident, "%H:%M:%S")}</td>'
        f'<td><a href="{folder}/{incident.number:04d}/incident.html">{safe(headline(incident), 300)}</a></td>'
        f"<td>{safe(incident.sizes).replace('-&gt;', '&rarr;')}</td>"
        f'<td class="number">{_milliseconds(incident.took)}</td>'
        f'<td class="number">{incident.steps}</td></tr>'
        for incident in reversed(found)
    ]
    names = safe(", ".join(job for job, _ in jobs), 300)
    head = "<tr><th>#</th><th>UTC</th><th>what</th><th>ranks</th><th>restart</th><th>steps lost</th></tr>"
    body = [
        f'<p class="over">Job {names}</p>',
        "<h1>What happened</h1>",
        '<div class="facts">' + "".join(f"<div><b>{name}</b>{value}</div>" for name, value in facts.items()) + "</div>",
        f'<div class="picture">{picture}</div>',
        f"<table>{head}{''.join(rows)}</table>" if rows else "<p>No incidents.</p>",
        *([] if time is None else ["<h2>Where the time went</h2>", _time(time)]),
    ]
    return page("What happened", body)


#: phases that took a smaller share of the whole are one row for each kind of fault
WORTH_A_ROW = 0.005


def _time(time: Accounting) -> str:
    """The parts of the whole, with what was lost by class and phase."""
    parts = [("productive", "", time.productive), ("start", "until the function was called", time.starting)]
    for kind, phases in time.lost.items():
        long = {name: seconds for name, seconds in phases.items() if seconds >= WORTH_A_ROW * time.seconds}
        parts += [(f"lost: {kind}", name, seconds) for name, seconds in long.items()]
        rest = ", ".join(name for name in phases if name not in long)
        parts += [(f"lost: {kind}", rest, sum(phases.values()) - sum(long.values()))] if rest else []
    parts += [("repeated", f"{time.repeated_steps} steps", time.repeated), ("replacements", "waiting", time.waiting)]
    rows = [
        f'<tr><td>{safe(name)}</td><td>{safe(what)}</td><td class="number">{seconds:.2f} s</td>'
        f'<td class="number">{seconds / time.seconds:.1%}</td></tr>'
        for name, what, seconds in parts
        if seconds
    ]
    return f"<table>{''.join(rows)}</table>"


def page(title: str, body: Iterable[str]) -> str:
    """A document of these parts, which are HTML; ``title`` is plain text."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title, 200)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def _when(incident: Incident, form: str) -> str:
    return datetime.fromtimestamp(incident.at, timezone.utc).strftime(form)


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{safe(line)}</li>" for line in lines) + "</ul>"


def _phases(incident: Incident) -> list[str]:
    """A bar of the restart and the first step, since a hang is noticed after a minute, and a table of all."""
    whole = (incident.took or 0.0) + (incident.phases.get("first_step") or 0.0)
    colours = dict(zip(PHASES, COLOURS, strict=True))
    bar = [
        f'<span style="background:{colours[name]};flex:{seconds / whole:.4f}" title="{name}"></span>'
        for name, seconds in incident.phases.items()
        if seconds and whole and name != "standstill"
    ]
    rows = [
        f'<tr><td><span class="dot" style="background:{colours[name]}"></span>{name}</td>'
        f'<td class="number">{_milliseconds(seconds)}</td><td>{_WHAT[name]}</td></tr>'
        for name, seconds in incident.phases.items()
    ]
    return [f'<div class="bar">{"".join(bar)}</div>' if bar else "", f"<table>{''.join(rows)}</table>"]


def _stacks(incident: Incident) -> Iterable[str]:
    for ranks, frames in incident.stacks():
        lines = [
            f'<span class="{"lib" if any(part in frame for part in _FOREIGN) else "own"}">{safe(frame, 300)}</span>'
            for frame in frames[:MAX_LINES]
        ]
        text = "\n".join(lines) or "no stack"
        yield f"<details open><summary>{_ranks(ranks)}</summary><pre>{text}</pre></details>"
