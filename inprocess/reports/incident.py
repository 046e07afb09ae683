"""From the events of a job to its incidents: who failed, where the time of each restart went, what was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inprocess.attribution import LONGEST
from inprocess.protocol.phases import Phase
from inprocess.reports.cuts import Cut, cuts
from inprocess.reports.evidence import Evidence, gather
from inprocess.reports.launches import launches
from inprocess.reports.reading import Entry, Trail
from inprocess.reports.verdict import Verdict, judge

__all__ = ["PHASES", "Incident", "all_incidents", "incidents"]

#: from the last sign of life until the fault was noticed; the parts of a restart in order, the first from then to the
#: interruption of the slowest rank; and what the function needs to its first step
PHASES = (
    "standstill",
    "detect",
    "abort",
    "leave",
    "finalize",
    "end_round",
    "assign",
    "start_round",
    "initialize",
    "first_step",
)
#: of these, what is no part of the restart
AROUND = ("standstill", "first_step")
#: what is in the next iteration
_AFTERWARDS = {Phase.ASSIGN.value, Phase.START.value, Phase.INITIALIZE.value, "run", "first_step"}
ENDED = "the job ended"
STOPS = "the events end here: the job is still at it, or could not write what followed"


@dataclass(frozen=True)
class Incident:
    """One interruption of a job, and the restart after it.

    Attributes:
        number: of the restart, as in the log; counted on over several launches in one directory.
        at: when it began (seconds since 1970).
        verdict: who failed, and how.
        before: active ranks in the iteration that was interrupted; None: not known.
        after: and in the next one; 0: there is none; None: not known.
        phases: seconds for each of `PHASES`, on the rank that was the last to leave the function; None: not known.
        steps_lost: steps that are done again: those since the last ``atomic()``, or what `LiveState` says; None: not
            known, since no rank says how many it had done: the disk was full.
        decision: ``restart``, or why the job ended.
        evidence: what the ranks and monitors said.
        took: how long the restart took, without the standstill before and the first step after it (s): what the line of
            the log says; None: not known.
        call: calls of wrapped functions in the process before this one.
        iteration: the one that was interrupted.
        launch: launches of the job before, under the same name.
    """

    number: int
    at: float
    verdict: Verdict
    before: int | None
    after: int | None
    phases: Mapping[str, float | None]
    steps_lost: int | None
    decision: str
    evidence: Evidence
    call: int = 0
    iteration: int = 0
    took: float | None = None
    launch: int = 0

    @property
    def sizes(self) -> str:
        """Active ranks before and after, such as ``4 -> 3``; ``?`` where that is not known."""
        before, after = ("?" if size is None else str(size) for size in (self.before, self.after))
        return f"{before} -> {after}"

    @property
    def steps(self) -> str:
        """`steps_lost`; ``?`` where that is not known."""
        return "?" if self.steps_lost is None else str(self.steps_lost)

    @property
    def host(self) -> str:
        """Where the first rank that failed ran; empty: not known."""
        rank = self.verdict.initial_rank
        return self.evidence.witnesses[rank].host if rank in self.evidence.witnesses else ""

    @property
    def hosts(self) -> frozenset[str]:
        """Of all ranks of which something is known."""
        return frozenset(witness.host for witness in self.evidence.witnesses.values())

    @property
    def failed_after(self) -> int | None:
        """How many steps the first rank that failed had begun in that iteration."""
        witness = self.evidence.witnesses.get(-1 if self.verdict.initial_rank is None else self.verdict.initial_rank)
        pings = None if witness is None else witness.of("raised").get("pings", witness.pings)
        return pings if isinstance(pings, int) else None

    @property
    def is_whole(self) -> bool:
        """Nothing more is to be expected."""
        return self.decision.startswith(ENDED) or all(seconds is not None for seconds in self.phases.values())

    def stacks(self) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
        """Ranks with the same stack, and the stack, innermost line first; those that stand alone come first."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank, witness in sorted(self.evidence.witnesses.items()):
            groups.setdefault(tuple(witness.frames), []).append(rank)
        return [(tuple(ranks), frames) for frames, ranks in sorted(groups.items(), key=lambda item: len(item[1]))]

    def ranks_to_json(self) -> list[dict[str, Any]]:
        """What is known of each rank."""
        return [
            {
                "initial_rank": rank,
                "host": witness.host,
                "pid": witness.pid or None,
                "pings": witness.pings,
                "records": [record.to_dict() for record in witness.records],
                "stack": witness.frames,
                "threads": witness.of("stacks").get("threads", []),
                "process": dict(witness.of("process")),
                "died": dict(witness.of("died")),
            }
            for rank, witness in sorted(self.evidence.witnesses.items())
        ]

    def to_json(self) -> dict[str, Any]:
        """As ``inprocess report --json`` prints it."""
        verdict = self.verdict
        return {
            "number": self.number,
            "verdict": {
                "initial_rank": verdict.initial_rank,
                "class": verdict.kind,
                "confidence": verdict.confidence,
                "where": verdict.where,
                "waiting": list(verdict.waiting),
                "also": list(verdict.also),
            },
            "world_size": {"before": self.before, "after": self.after},
            "phases": {name: None if value is None else round(value, 6) for name, value in self.phases.items()},
            "steps_lost": self.steps_lost,
            "details": {
                "wall_time": self.at,
                "message": verdict.message,
                "evidence": list(verdict.evidence),
                "against": list(verdict.against),
                "decision": self.decision,
            },
        }


def incidents(trail: Trail, first: int = 0) -> list[Incident]:
    """All of one job, by time; ``first``: of the restarts in launches before."""
    found: list[Incident] = []
    each = launches(trail)
    for number, launch in enumerate(each):
        offset, last = found[-1].number if found else first, 0
        since, begun = 0.0, len(found)
        parts = cuts(launch)
        for index, cut in enumerate(parts):
            if cut.number <= last and len(found) > begun:  # another call, or a launch of which too little is known
                offset = found[-1].number
            last = cut.number
            following = parts[index + 1].at if index + 1 < len(parts) else float("inf")
            # the decision before tells of the restart before, although some rank may have learned of it later
            window = launch.between(since, following)
            one = _incident(cut, offset + cut.number, window, _steps_before(launch, since))
            found.append(replace(one, launch=number))
            since = max(entry.at for entry in cut.entries)
        if len(found) > begun and found[-1].decision in (ENDED, STOPS) and launch is not each[-1]:
            found[-1] = replace(found[-1], decision=f"{ENDED}, and was started anew", after=0)
    return found


# --- one incident -------------------------------------------------------------------------------------------------


def _incident(cut: Cut, number: int, window: Sequence[Entry], start: int) -> Incident:
    # what came through the store says less of what all ranks agreed on
    told = next((entry for entry in cut.entries if "records" in entry.event.attributes), cut.entries[0])
    is_decided = told.kind in ("restart", "abort")
    if not is_decided:  # the next call of the same processes tells of something else
        window = [entry for entry in window if entry.event.call == cut.call]
    decided = max(entry.at for entry in cut.entries) if is_decided else float("inf")
    attributes = told.event.attributes if is_decided else {}
    # what came after the decision tells of the restart, not of the fault
    before = [entry for entry in window if entry.at <= decided and entry.kind not in ("run", "call", "watching")]
    before = [entry for entry in before if entry.kind != "first_step"] or [told]
    why = str(attributes.get("why", ""))
    evidence = gather(before, attributes.get("records"), attributes.get("stuck"), why)
    if told.kind == "restart":
        evidence.missing = _missing(cut, window)
    goes_on = told.kind == "restart"
    runs = [entry for entry in window if entry.kind == "run" and entry.at > cut.at] if goes_on else []
    fault, noticed = _fault(before, runs)
    phases = _phases(window, fault, noticed, cut.at, _entered(runs))
    parts = [seconds for name, seconds in phases.items() if name not in AROUND and seconds is not None]
    ended = {"abort": f"{ENDED}: {why}", "restart": "restart"}.get(told.kind, _without_a_decision(window))
    is_over = ended.startswith(ENDED)
    return Incident(
        number,
        fault,
        judge(evidence),
        next((size for entry in runs if (size := _size(entry, "before"))), None) or _size_before(window, cut.at),
        next((size for entry in runs if (size := _size(entry, "world_size"))), 0 if is_over else None),
        phases,
        _steps_lost(window, evidence, start),
        ended,
        evidence,
        cut.call,
        told.event.iteration - goes_on,
        sum(parts) if parts else None,
    )


def _size_before(window: Sequence[Entry], until: float) -> int | None:
    """With how many ranks the function, or at least the call, was entered for the last time."""
    entered = [entry for entry in window if entry.kind in ("call", "run") and entry.at < until]
    sizes = [_size(entry, "world_size") for entry in entered]
    return sizes[-1] if sizes else None


def _missing(cut: Cut, window: Sequence[Entry]) -> tuple[int, ...]:
    """Training processes that say nothing any more, and of which nobody says how they ended."""
    known = {entry.rank for entry in window if not entry.source.is_monitor and entry.at < cut.at}
    accounted = {
        entry.rank for entry in window if entry.kind in ("restart", "run", "died", "left") and entry.at >= cut.at
    }
    ended = {entry.rank for entry in window if entry.kind in ("died", "left", "killed")}
    return tuple(sorted(known - accounted - ended))


def _without_a_decision(window: Sequence[Entry]) -> str:
    """Where no rank has said what was decided: it may be that none could."""
    over = {entry.rank for entry in window if entry.kind in ("left", "died")}
    if over >= {entry.rank for entry in window} or any(entry.kind == "store_lost" for entry in window):
        return ENDED
    return STOPS


def _size(entry: Entry, name: str) -> int:
    value = entry.event.attributes.get(name)
    return value if isinstance(value, int) else 0


def _fault(entries: Sequence[Entry], runs: Sequence[Entry]) -> tuple[float, float]:
    """When it began, and when it was noticed: a rank that hangs did so long before.

    The ranks that go on say when it was noticed, each by the record of whoever noticed it first. Where none does, it
    was with the first event that tells of it.
    """
    moments = [(entry.at, _seconds(entry, "silent_for")) for entry in entries if entry.kind in _TELLING]
    told = [(entry.at - took, _seconds(entry, "silent")) for entry in runs if (took := _seconds(entry, "took"))]
    noticed = min((at for at, _ in told or moments), default=entries[0].at)
    begun = min((at - silent for at, silent in [*moments, *told]), default=noticed)
    return min(begun, noticed), noticed


#: events that tell of a fault
_TELLING = frozenset({"raised", "died", "killed", "no_progress", "interrupted", "store_lost"})


def _seconds(entry: Entry, name: str) -> float:
    value = entry.event.attributes.get(name)
    return float(value) if isinstance(value, int | float) and 0.0 <= value < LONGEST else 0.0


def _entered(runs: Sequence[Entry]) -> float | None:
    """When the rank that logs the restart, the first one, entered the function. None: none says how long it took."""
    active = [entry for entry in runs if _seconds(entry, "took") and not entry.event.attributes.get("reserve")]
    return min(active, key=lambda entry: entry.event.rank).at if active else None


def _phases(
    window: Sequence[Entry], fault: float, noticed: float, decided: float, entered: float | None
) -> dict[str, float | None]:
    """Of the rank that was the last to leave the function, for which the others waited in the end round; they end with
    the entry on the rank that logs the restart, so that they add up to what the log says."""
    ranks: dict[int, dict[str, float]] = {}
    for entry in window:
        name = entry.event.phase if entry.kind == "phase" else entry.kind
        # the iteration that was interrupted may have begun on this rank when it had failed on another one already
        since = decided if name in _AFTERWARDS else noticed
        if entry.source.is_monitor or entry.at < since:
            continue
        ranks.setdefault(entry.rank, {}).setdefault(name, entry.at)
    whole = {rank: at for rank, at in ranks.items() if Phase.END.value in at and "run" in at}
    if not whole:
        return dict.fromkeys(PHASES)
    at = max(whole.values(), key=lambda each: each[Phase.END.value])
    interrupted = at.get("interrupted", at.get(Phase.ABORT.value, noticed))
    left = at.get(Phase.FINALIZE.value, at[Phase.END.value])
    aborted = min(at.get("aborted", interrupted), left)
    entered = at["run"] if entered is None else entered
    before: list[float | None] = [
        fault,
        noticed,
        interrupted,
        aborted,
        left,
        at[Phase.END.value],
        at.get(Phase.ASSIGN.value),
        at.get(Phase.START.value),
        at.get(Phase.INITIALIZE.value),
    ]
    moments = [*(None if moment is None else min(moment, entered) for moment in before), entered, at.get("first_step")]
    pairs = zip(PHASES, moments, moments[1:], strict=False)
    return {name: None if a is None or b is None else max(0.0, b - a) for name, a, b in pairs}


def _steps_before(trail: Trail, until: float) -> int:
    """The step with which the interrupted iteration began, as `LiveState` said."""
    steps = [entry.event.attributes.get("step") for entry in trail.of("recovered") if entry.at <= until]
    return next((step for step in reversed(steps) if isinstance(step, int)), 0)


def _steps_lost(window: Sequence[Entry], evidence: Evidence, start: int) -> int | None:
    ranks = evidence.witnesses.values()
    pings = max((witness.pings for witness in ranks if witness.pings is not None), default=None)
    if pings is None:
        return None
    saved = max((witness.kept for witness in ranks), default=0)  # often one rank saves for all
    steps = [entry.event.attributes.get("step") for entry in window if entry.kind == "recovered"]
    kept = next((step for step in steps if isinstance(step, int)), None)
    return max(0, pings - saved) if kept is None else max(0, start + pings - kept)


def all_incidents(trails: Sequence[Trail]) -> Iterator[tuple[Trail, list[Incident]]]:
    """Of each job of a directory, numbered on."""
    first = 0
    for trail in trails:
        found = incidents(trail, first)
        first = found[-1].number if found else first
        yield trail, found
