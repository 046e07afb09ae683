"""``inprocess report RUN_DIR``: the incidents of a job, for a terminal or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime

from inprocess.attribution import one_line, ranges
from inprocess.reports.accounting import Accounting, total
from inprocess.reports.history import History, histories
from inprocess.reports.incident import Incident
from inprocess.reports.reading import read
from inprocess.reports.summary import FOLDER, SUMMARY, accounted, gaps, numbered, read_summary
from inprocess.system.descriptors import shortage

__all__ = ["main"]

#: of a stack, the innermost so many lines are shown
LINES = 12


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit code: 0, or 2 where there is nothing to report on."""
    parser = argparse.ArgumentParser(
        prog="inprocess report", description="What happened in a job: its restarts, and why."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory with the events of the job")
    parser.add_argument("--incident", type=int, metavar="N", help="one incident, with stacks and evidence")
    parser.add_argument("--json", action="store_true", help="for programs; docs/report.md has the fields")
    given = parser.parse_args(list(arguments))
    try:
        trails, problems = read(given.run_dir)
    except OSError as error:
        print(f"inprocess report: {one_line(shortage(error) or str(error))}", file=sys.stderr)
        return 2
    summary = read_summary(given.run_dir)
    jobs = numbered(summary, trails)
    found = [incident for _, each in jobs for incident in each]
    told_before = dict(zip([incident.number for incident in found], histories(found), strict=True))
    times = accounted(summary, jobs)
    time, lost = total(times), gaps(found, times)
    if lost:
        problems.append(f"the events of incidents {lost} are gone, and {FOLDER}/{SUMMARY} does not know them")
    problems += _unread(found)
    if given.incident is not None:
        found = [incident for incident in found if incident.number == given.incident]
        if not found:
            text = f"there is no incident {given.incident} in {one_line(given.run_dir)}"
            print(f"inprocess report: {text}", file=sys.stderr)
            return 2
    for problem in problems:
        print(f"inprocess report: {problem}", file=sys.stderr)
    if given.json:
        told: dict[str, object] = {"incidents": [incident.to_json() for incident in found]}
        told |= {"goodput": time and time.goodput, "accounting": time and time.to_json(), "problems": problems}
        print(json.dumps(told, indent=2))
    elif given.incident is not None:
        print("\n".join(line for incident in found for line in _whole(incident, told_before[incident.number])))
    else:
        print("\n".join(_table(found, time)))
    return 0


def _unread(found: Sequence[Incident]) -> list[str]:
    """That there are records that a newer version may have written."""
    reasons = {incident.number: incident.evidence.unread for incident in found if incident.evidence.unread}
    if not reasons:
        return []
    count, why = sum(map(len, reasons.values())), one_line(next(iter(reasons.values()))[0], 200)
    return [f"incidents {ranges(reasons)}: {count} record{'s are' if count > 1 else ' is'} left out: {why}"]


def _table(found: Sequence[Incident], time: Accounting | None) -> list[str]:
    lines = [_line(incident) for incident in found]
    there = {incident.number for incident in found}
    remembered = [] if time is None else [loss.number for loss in time.losses if loss.number not in there]
    if remembered:
        lines.insert(0, f"incidents {ranges(remembered)}: their events are gone; {FOLDER}/ has those that are kept")
    lines = lines or ["no incidents"]
    if time is None:
        return lines
    return [*lines, *(_where_it_went(time) if time.losses else []), f"goodput {time.goodput:.1%}"]


def _where_it_went(time: Accounting) -> Iterator[str]:
    """A line for each part of the time that is not empty; what was lost by class, with its two longest phases."""
    yield f"of {time.seconds:.1f} s:"
    parts = [("productive", time.productive, ""), ("start", time.starting, "")]
    for kind, phases in sorted(time.lost.items(), key=lambda item: -sum(item[1].values())):
        longest = sorted(phases.items(), key=lambda item: -item[1])[:2]
        told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in longest)
        parts.append((f"lost: {kind}", sum(phases.values()), f"{time.restarts[kind]}x; {told}"))
    parts += [("steps done again", time.repeated, f"{time.repeated_steps} steps"), ("replacements", time.waiting, "")]
    for name, seconds, told in parts:
        if seconds:
            yield f"{name:>20} {seconds:10.2f} s {seconds / time.seconds:6.1%}  {told}".rstrip()


def _line(incident: Incident) -> str:
    verdict = incident.verdict
    when = datetime.fromtimestamp(incident.at).strftime("%H:%M:%S")
    who = "?" if verdict.initial_rank is None else f"rank {verdict.initial_rank}"
    also = f" (also {ranges(verdict.also)})" if verdict.also else ""
    where = f" at {one_line(verdict.where, 80)}" if verdict.where else ""
    waiting = f"; rank{'s' * (len(verdict.waiting) > 1)} {ranges(verdict.waiting)} waited" if verdict.waiting else ""
    lost = f"{incident.steps} step{'s' * (incident.steps_lost != 1)} lost"
    return (
        f"{incident.number:>4}  {when}  {who}{also}: {verdict.kind}{where}{waiting}; "
        f"{incident.sizes} ranks, {_milliseconds(incident.took)}, {lost} ({verdict.confidence:.0%} sure)"
    )


def _milliseconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _whole(incident: Incident, history: History) -> list[str]:
    verdict = incident.verdict
    lines = [_line(incident), "", f"  {one_line(verdict.message, 500)}"]
    lines += [f"  for it: {one_line(text, 500)}" for text in verdict.evidence]
    lines += [f"  missing: {one_line(text, 500)}" for text in verdict.against]
    lines += [f"  before: {one_line(text, 500)}" for text in history.lines()]
    lines += ["", f"  {one_line(incident.decision, 500)}; where the time went:"]
    lines += [f"    {name:<12}{'?' if s is None else f'{s * 1e3:10.1f} ms'}" for name, s in incident.phases.items()]
    for ranks, frames in incident.stacks():
        lines += ["", f"  rank{'s' * (len(ranks) > 1)} {ranges(ranks)}, innermost line first:"]
        lines += [f"    {one_line(frame, 200)}" for frame in frames[:LINES]] or ["    no stack"]
    return lines
