"""One run of one kind: is the report right, when was it there, and was the training left as it should be."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from inprocess.reports.incident import Incident, all_incidents
from inprocess.reports.reading import read
from tests.harness import Deadline, RankResult, Ranks, Run

from . import training
from .kinds import Kind

__all__ = ["Score", "play"]

#: the directory is read again after so long (seconds)
LOOK_S = 0.2
DEADLINE_S = 60.0
#: in what the harness says of a file that is left there
_TEMPORARY = "tmp/"
#: what a report of a directory with too little in it is at most sure of
UNSURE = 0.5


@dataclass
class Score:
    """What came of one run."""

    culprit: bool = False
    kind: bool = False
    #: from the function's next call to the report that stays; None: there is none
    seconds: float | None = None
    unharmed: bool = False
    #: what is wrong, and what was said
    notes: list[str] = field(default_factory=list)


@dataclass
class _Reader:
    """Looks into the directory while the job runs."""

    run_dir: Path
    looked: float = 0.0
    #: what was found, when
    seen: list[tuple[float, list[str]]] = field(default_factory=list)

    def __call__(self) -> float:
        """For `Run.wait`: answers when it wants to be called again."""
        if time.monotonic() >= self.looked + LOOK_S:
            self.look()
        return self.looked + LOOK_S

    def look(self) -> list[Incident]:
        found, _ = _reported(self.run_dir)
        self.looked = time.monotonic()
        self.seen.append((self.looked, [_in_words(incident) for incident in found]))
        return found

    def settled(self) -> float:
        """Since when it has said what it says now."""
        last = self.seen[-1][1]
        since = self.seen[-1][0]
        for at, words in reversed(self.seen):
            if words != last:
                break
            since = at
        return since


def play(kind: Kind) -> Score:
    """Run it once.

    Raises:
        Unavailable: this machine cannot do it.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        with _place(kind, run_dir) as place:
            return _play(kind, run_dir, kind.on_ranks or place)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def _place(kind: Kind, run_dir: Path) -> contextlib.AbstractContextManager[object]:
    rank = next((at.rank for at in kind.faults), 0)
    return contextlib.nullcontext() if kind.place is None else kind.place(run_dir, rank)


def _play(kind: Kind, run_dir: Path, place: object) -> Score:
    score, reader = Score(), _Reader(run_dir)
    options = {**kind.options, "run_dir": str(run_dir)}
    try:
        with _running(kind, options, place) as run:
            ranks = run.wait(DEADLINE_S, act=reader, check=False)
    except Deadline as error:
        score.notes.append(error.headline)
        ranks = Ranks(error.ranks)
    problems = [text for text in ranks.problems if not (kind.leaves_files and _TEMPORARY in text)]
    score.notes += [*_harm(kind, ranks), *problems]
    score.unharmed = not score.notes
    found = reader.look()
    _judge(kind, score, found, _reported(run_dir)[1])
    # a job that ends by it has no next call: from its last word
    again = [event["t"] for rank in ranks for event in rank.of("enter") if event["iteration"]]
    ends = [event["t"] for rank in ranks for event in rank.of("done")]
    since = min(again, default=min(ends, default=reader.looked))
    score.seconds = max(0.0, reader.settled() - since) if found or not kind.incidents else None
    return score


@contextlib.contextmanager
def _running(kind: Kind, options: dict[str, object], place: object) -> Iterator[Run]:
    with contextlib.redirect_stdout(io.StringIO()):
        run = Run(
            training.run,
            kind.size,
            faults=kind.faults,
            wrapper=options,
            args=kind.args,
            place=place,  # type: ignore[arg-type]
        )
        try:
            yield run
        finally:
            run.close()


@functools.cache
def _wanted(size: int) -> list[object]:
    """What a training without faults returns."""
    kind = Kind({}, (), size=size)
    with _running(kind, dict(kind.options), None) as run:
        return list(run.wait(DEADLINE_S)[0].value)


def _harm(kind: Kind, ranks: Ranks) -> list[str]:
    """What the fault did to those that it should have left alone."""
    left = [rank for rank in ranks if rank.rank not in kind.gone]
    if kind.ends:
        return [f"rank {rank.rank} went on" for rank in left if rank.exception is None]
    wanted = _wanted(kind.size - len(kind.gone))
    wrong = [each for each in left if each.value != wanted]
    return [f"rank {each.rank} returned {each.value}, not {wanted}{_why(each)}" for each in wrong]


def _why(rank: RankResult) -> str:
    return f": {rank.exception}: {rank.message}\n{rank.trace}" if rank.exception else ""


def _judge(kind: Kind, score: Score, found: list[Incident], problems: list[str]) -> None:
    verdicts = [incident.verdict for incident in found]
    pairs = list(zip(kind.incidents, verdicts, strict=False))
    complete = len(kind.incidents) == len(verdicts)
    score.culprit = complete and all(
        verdict.initial_rank in told.ranks
        and (len(told.ranks) == 1 or None in told.ranks or {verdict.initial_rank, *verdict.also} == told.ranks)
        for told, verdict in pairs
    )
    score.kind = complete and all(verdict.kind in told.classes for told, verdict in pairs)
    if kind.lossy and not (score.culprit and score.kind):
        named = {rank for verdict in verdicts for rank in (verdict.initial_rank, *verdict.also)} - {None}
        meant = {rank for told in kind.incidents for rank in told.ranks}
        missing = problems or [text for verdict in verdicts for text in verdict.against]
        if named <= meant and missing and all(verdict.confidence <= UNSURE for verdict in verdicts):
            score.culprit = score.kind = True
            score.notes.append("the report says what is missing")
    if not (score.culprit and score.kind):
        score.notes += [_in_words(incident) for incident in found] or ["no incident"]
        score.notes += problems[:2]


def _reported(run_dir: Path) -> tuple[list[Incident], list[str]]:
    try:
        trails, problems = read(str(run_dir))
    except OSError as error:
        return [], [str(error)]
    return [incident for _, found in all_incidents(trails) for incident in found], problems


def _in_words(incident: Incident) -> str:
    verdict = incident.verdict
    also = f" and {', '.join(map(str, verdict.also))}" if verdict.also else ""
    sure = f"{verdict.confidence:.0%} sure"
    return f"rank {verdict.initial_rank}{also}: {verdict.kind} at {verdict.where or '?'}, {sure}, {incident.decision}"
