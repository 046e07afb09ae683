"""How often a report is right: every kind of fault several times, and a table. Needs some minutes on two cores.

Fails where the rank that failed first is named in less than 95 % of the runs, its class in less than 90 %, where the
training was harmed once, or where a report came more than 10 s after the restart.
"""

from __future__ import annotations

import argparse
import sys
import time

from inprocess.testing.server import become_subreaper, preload, start_server
from tests.harness.launch import PRELOAD

from .kinds import KINDS
from .places import Unavailable
from .play import Score, play

CULPRIT, CLASS, REPORT_S = 0.95, 0.90, 10.0


def table(scores: dict[str, list[Score]], skipped: dict[str, str]) -> str:
    """As Markdown."""
    lines = ["| fault | runs | rank right | class right | seconds until the report | training unharmed |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    everything = [score for each in scores.values() for score in each]
    for name, each in scores.items():
        lines.append(_row(name, each))
    lines.append(_row("**all**", everything, percent=True))
    lines += [f"\nSkipped: {name}, since {why}." for name, why in skipped.items()]
    return "\n".join(lines)


def _row(name: str, scores: list[Score], percent: bool = False) -> str:
    counts = [sum(score.culprit for score in scores), sum(score.kind for score in scores)]
    counts.append(sum(score.unharmed for score in scores))
    shown = [f"{count / len(scores):.1%}" if percent else str(count) for count in counts]
    seconds = [score.seconds for score in scores]
    known = [each for each in seconds if each is not None]
    longest = "none" if len(known) < len(seconds) else f"{max(known):.1f}"
    return f"| {name} | {len(scores)} | {shown[0]} | {shown[1]} | {longest} | {shown[2]} |"


def passed(scores: list[Score]) -> bool:
    """Whether these are within the limits."""
    count = len(scores)
    return (
        sum(score.culprit for score in scores) >= CULPRIT * count
        and sum(score.kind for score in scores) >= CLASS * count
        and all(score.unharmed for score in scores)
        and all(score.seconds is not None and score.seconds <= REPORT_S for score in scores)
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), metavar="NAME", help=f"some of: {', '.join(KINDS)}")
    options = parser.parse_args(arguments)
    preload(*PRELOAD, "tests.campaign.training")
    become_subreaper()
    start_server()
    scores: dict[str, list[Score]] = {}
    skipped: dict[str, str] = {}
    for name in options.kind or KINDS:
        for number in range(1, options.runs + 1):
            begin = time.monotonic()
            try:
                score = play(KINDS[name])
            except Unavailable as error:
                skipped[name] = str(error)
                print(f"{name}: skipped: {error}", flush=True)
                break
            scores.setdefault(name, []).append(score)
            right = [word for word, is_so in (("rank", score.culprit), ("class", score.kind)) if not is_so]
            text = f"{' and '.join(right)} WRONG" if right else "right"
            text += "" if score.unharmed else ", HARMED"
            told = f" ({'; '.join(score.notes)})" if score.notes else ""
            print(f"{name} {number}/{options.runs}: {text}, {time.monotonic() - begin:.1f} s{told}", flush=True)
    everything = [score for each in scores.values() for score in each]
    print("", table(scores, skipped), sep="\n")
    return 0 if everything and passed(everything) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
