"""What must have come out of a job, given the faults that really struck. Pure: results and log in, lines out."""

from __future__ import annotations

import itertools
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.schedule import HARD, HEARTBEAT, Job, Signal, Strike, ends_store
from tests.chaos.training import SAVE_EVERY, Line, exact, surviving
from tests.harness import Exit, HoldGIL, Kill, Raise, RankResult, Ranks, SlowDown

#: how a rank ended: an exit code, the name of an exception, or SURVIVES
FailoverOutcome = int | str
SURVIVES = "survives"
KILLED = frozenset({-signal.SIGTERM, -signal.SIGKILL})
#: seconds for which monitors may stay after the last rank
LINGER = 10.0
#: a rank that stood still for this share of a timeout may have been given up
SHARE = 0.5
#: seconds; shorter stops of a monitor do not add up with others
NOTICEABLE = 0.5
#: what all others are told where a Ctrl-C hits that hook
_INITIALIZE = re.compile(r"rank (\d+)(?: \(initial rank (\d+)\))?: initialize raised KeyboardInterrupt")


@dataclass(frozen=True)
class Facts:
    """What happened in a job."""

    job: Job
    ranks: Ranks
    #: number of the strike -> when a signal was sent (monotonic)
    sent: Mapping[int, float]
    log: Sequence[Line]

    def struck(self, rank: int) -> dict[int, float]:
        """Strikes that hit a rank: number -> when."""
        inside = {event["strike"]: event["t"] for event in self.ranks[rank].of("struck")}
        return inside | {number: t for number, t in self.sent.items() if self.job.strikes[number].rank == rank}

    @property
    def founders(self) -> Sequence[RankResult]:
        """By initial rank; those that joined stand behind them."""
        return self.ranks[: self.job.world_size]

    @property
    def joiners(self) -> Sequence[RankResult]:
        return self.ranks[self.job.world_size :]

    @property
    def all_struck(self) -> list[Strike]:
        return [self.job.strikes[number] for result in self.founders for number in self.struck(result.rank)]

    @property
    def restarts(self) -> int:
        return max((iteration for result in self.ranks for iteration, _, _ in result.entries()), default=0)

    @property
    def store_lost(self) -> bool:
        return bool(self.job.host) and any(s.rank == 0 and ends_store(s.fault) for s in self.all_struck)

    @property
    def ended_by_initialize(self) -> bool:
        """Whether a Ctrl-C hit ``initialize``, where it ends the job: the rank that the others name has left so."""
        named = [_INITIALIZE.search(result.message) for result in self.ranks if fate(result) == "RestartAbort"]
        return any(found and fate(self.ranks[int(found[2] or found[1])]) == "KeyboardInterrupt" for found in named)


def offences(facts: Facts) -> list[str]:
    """One line for each thing that must not be."""
    return [
        *_left_behind(facts),
        *_wrong(facts.ranks),
        *_fates(facts),
        *_values(facts),
        *_log(facts),
        *_rosters(facts),
    ]


def _left_behind(facts: Facts) -> list[str]:
    """Nothing may be left, but the monitor of a rank that left early: it tells the others, or serves their store."""
    early = [result.rank for result in facts.ranks if fate(result) != SURVIVES]
    own = tuple(f"rank {rank} left behind: process " for rank in early)
    lines = [line for line in facts.ranks.problems if not line.startswith((*own, *_beside(facts)))]
    if facts.ranks.lingered > LINGER:
        lines.append(f"monitors stayed for {facts.ranks.lingered:.1f} s after the last rank")
    return lines


def _wrong(ranks: Ranks) -> list[str]:
    return [f"rank {result.rank}: {event['text']}" for result in ranks for event in result.of("wrong")]


# --- how each rank ended ----------------------------------------------------------------------------------------


def fate(result: RankResult) -> FailoverOutcome:
    if not result.done or result.exitcode != 0:
        return result.exitcode if result.exitcode is not None else "running"
    return result.exception or SURVIVES


def fates(strike: Strike) -> set[FailoverOutcome]:
    """How a rank may end that this strike hit."""
    fault = strike.fault
    if isinstance(fault, Signal):
        return _signal_fates(fault)
    if isinstance(fault, Kill):
        return {-fault.signum}
    if isinstance(fault, Exit):
        return {fault.code}
    if isinstance(fault, HoldGIL) and fault.seconds > HARD:
        return set(KILLED)
    if isinstance(fault, Raise):
        return _raise_fates(strike.place, fault)
    return {SURVIVES}


def _signal_fates(fault: Signal) -> set[FailoverOutcome]:
    if fault.signum == signal.SIGINT:
        return {"KeyboardInterrupt"}
    if fault.signum == signal.SIGSTOP:
        if fault.target == "host":
            return {SURVIVES, *((*KILLED, "Fenced") if fault.seconds > SHARE * HEARTBEAT else ())}
        return {SURVIVES, *(KILLED if fault.target == "training" and fault.seconds > SHARE * HARD else ())}
    if fault.target == "monitor":
        return {SURVIVES}
    if fault.signum == signal.SIGTERM:  # it leaves after its step, if there is one, and the signal came inside the call
        return {"Preempted", SURVIVES, -signal.SIGTERM}
    return {-fault.signum}


def _raise_fates(place: str, fault: Raise) -> set[FailoverOutcome]:
    if not issubclass(fault.kind, Exception):
        return {fault.kind.__name__}
    if place == "finalize":
        return {fault.kind.__name__}
    # what these raise in an iteration that is over already counts as interrupted
    if place == "health_check":  # before a run a restart; after a fault its end
        return {SURVIVES, "HealthCheckError"}
    return {SURVIVES, fault.kind.__name__} if place == "rank_assignment" else {SURVIVES}


def allowed(facts: Facts, rank: int) -> set[FailoverOutcome]:
    """How this rank may end."""
    each = [fates(facts.job.strikes[number]) for number in facts.struck(rank)]
    found = set().union(*each)
    if all(SURVIVES in some for some in each):
        found.add(SURVIVES)
    else:
        found.discard(SURVIVES)
    if facts.job.assignment == "pairs" and fate(facts.ranks[rank ^ 1]) != SURVIVES:
        found.add("RankDiscarded")
    if _without_monitor(facts, rank):
        found |= {"Fenced", "StoreLost", *KILLED}  # StoreLost: the host goes when it has declared the last one dead
    if facts.job.active(_remaining(facts)) == 0:
        found.add("RestartError")
    if facts.store_lost:
        found |= {"StoreLost", *KILLED}
    if facts.ended_by_initialize and SURVIVES in found:  # on all ranks, without exception
        found = found - {SURVIVES} | {"RestartAbort"}
    return found


def _remaining(facts: Facts) -> int:
    """Ranks that did not die and did not leave by themselves."""
    return sum(fate(result) in (SURVIVES, "RestartError", "RestartAbort") for result in facts.ranks)


def _without_monitor(facts: Facts, rank: int) -> bool:
    """Whether its monitors were killed or stopped one after the other, so that no heartbeat came for long."""
    struck = facts.struck(rank).items()
    times = sorted(t for number, t in struck if _silences_monitor(facts.job.strikes[number].fault))
    return any(second - first < HEARTBEAT for first, second in itertools.pairwise(times))


def _silences_monitor(fault: object) -> bool:
    if not isinstance(fault, Signal) or fault.target == "training":
        return False
    return fault.signum == signal.SIGKILL or fault.seconds > NOTICEABLE


def allowed_late(facts: Facts) -> set[FailoverOutcome]:
    """How a process that joined may end, or one that came when all was over."""
    found: set[FailoverOutcome] = {SURVIVES}
    if facts.job.assignment == "pairs":
        found.add("RankDiscarded")
    if facts.job.active(_remaining(facts)) == 0:
        found.add("RestartError")
    if facts.store_lost:
        found |= {"StoreLost", "TimeoutError", *KILLED}
    return found | {"RestartAbort"} if facts.ended_by_initialize else found


def _fates(facts: Facts) -> list[str]:
    lines = []
    for number, result in enumerate(facts.ranks):
        may = allowed(facts, result.rank) if number < facts.job.world_size else allowed_late(facts)
        if fate(result) not in may:
            expected = sorted(map(str, may))
            lines.append(f"rank {result.rank}: {fate(result)} ({result.message[:200]}), expected one of {expected}")
    return lines


def _stood_still(facts: Facts, rank: int) -> bool:
    """Whether its host was stopped for so long that the others may have gone on without it."""
    return any("Fenced" in fates(facts.job.strikes[number]) for number in facts.struck(rank))


def _beside(facts: Facts) -> tuple[str, ...]:
    """A known limit (docs/limits.md): such a rank may run on for a moment while the others run already."""
    return tuple(f"I2: initial rank {r.rank} was in" for r in facts.ranks if _stood_still(facts, r.rank))


def limits(facts: Facts) -> list[str]:
    """Known limits that a job met, for the table."""
    beside = [line for line in facts.ranks.problems if line.startswith("I2")] or late_lines(facts.log)
    return [
        *["store lost"] * facts.store_lost,
        *["stood still and ran beside the others for a moment"] * len(beside),
    ]


# --- the training -----------------------------------------------------------------------------------------------


def _values(facts: Facts) -> list[str]:
    """Whoever returned a value returned that of the last commit."""
    commits = surviving(list(facts.log), facts.job.live)
    last = [commits[-1].step, commits[-1].value] if commits else None
    return [
        f"rank {result.rank} returned {result.value}, the last commit is {last}"
        for result in facts.ranks
        if result.value is not None and result.value != last
    ]


def _log(facts: Facts) -> list[str]:
    """Every step once, in order, with the exact value, by the iteration's own rank 0."""
    lines, commits = _steps_lost(facts), surviving(list(facts.log), facts.job.live)
    values = exact(len(commits))
    for place, line in enumerate(commits, 1):
        if line.step != place or line.value != values[place]:
            lines.append(f"commit {place} of the log is {line}, expected step {place} with {values[place]}")
            break
    writers: dict[int, set[int]] = defaultdict(set)
    for line in facts.log:
        writers[line.iteration].add(line.member)
    lines += [f"iteration {i} had several writers: {who}" for i, who in writers.items() if len(who) > 1]
    lines += [
        f"written after a newer iteration had begun: {line}"
        for line in late_lines(facts.log)
        if not _stood_still(facts, line.member)
    ]
    return [*lines, *_cut_saves(facts)]


def _steps_lost(facts: Facts) -> list[str]:
    """A LiveState: only the step in flight, unless all ranks that had a newer one are gone; then up to two periods."""
    if not facts.job.live:
        return []
    lines = []
    for number, line in enumerate(facts.log):
        if line.what != "resume":
            continue
        commits = surviving(list(facts.log[:number]), live=True)
        before = commits[-1].step if commits else 0
        if not before - 2 * SAVE_EVERY <= line.step <= before + 1:
            lines.append(f"resumed at step {line.step} after {before}: {line}")
    return lines


def late_lines(log: Sequence[Line]) -> list[Line]:
    newest, found = -1, []
    for line in log:
        newest = max(newest, line.iteration)
        found += [line] if line.iteration < newest else []
    return found


def _cut_saves(facts: Facts) -> list[str]:
    """A save that began and did not end: only where its rank died, left, or had a fault in the middle of it (I6)."""
    lines = []
    for line, following in zip(facts.log, [*facts.log, None][1:], strict=True):
        if line.what != "open" or (following is not None and following.what == "commit"):
            continue
        result = facts.ranks[line.member]
        strikes = [facts.job.strikes[number] for number in facts.struck(line.member)]
        raised = any(strike.place == "atomic" and not isinstance(strike.fault, SlowDown) for strike in strikes)
        if fate(result) == SURVIVES and not raised:
            lines.append(f"a save was cut in half: {line}")
    return lines


# --- ranks ------------------------------------------------------------------------------------------------------


def _rosters(facts: Facts) -> list[str]:
    """All ranks of an iteration gathered the same members, in the order of the assignment."""
    found: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for result in facts.ranks:
        for event in result.of("roster"):
            found[event["iteration"]].add(tuple(event["members"]))
    lines = [f"iteration {i}: the ranks gathered {sorted(some)}" for i, some in found.items() if len(some) > 1]
    rosters = {iteration: min(found[iteration]) for iteration in sorted(found)}
    begun = [
        (result.rank, min(e["iteration"] for e in entered)) for result in facts.ranks if (entered := result.of("enter"))
    ]
    processes = Counter(result.rank for result in facts.ranks)
    # one that comes later may have got the place of another: its own was not free yet
    founders = {name for name, count in processes.items() if count == 1}
    lines += [f"order of ranks: {roster}" for roster in rosters.values() if not _ordered(facts.job, roster, founders)]
    for (earlier, before), (later, after) in itertools.pairwise(rosters.items()):
        # then everybody is back in its place; a process that replaces another one has its name
        joins = set(after).difference(before) or [name for name, first in begun if earlier < first <= later]
        if facts.job.assignment in ("gaps", "tree") and not joins and not _keeps_places(before, after):
            lines.append(f"{facts.job.assignment}: {before} became {after}")
    sizes = {facts.job.active(members) for members in range(1, facts.job.world_size + 1)}
    counts = map(len, rosters.values())
    lines += [f"{count} ranks, expected one of {sorted(sizes)}" for count in counts if count not in sizes]
    return lines


def _ordered(job: Job, roster: tuple[int, ...], founders: Collection[int]) -> bool:
    old = [member for member in roster if member in founders]
    kept = job.assignment in ("gaps", "tree") or old == sorted(old)
    whole = job.assignment != "pairs" or all(member ^ 1 in roster for member in roster)
    return kept and whole and len(set(roster)) == len(roster)


def _keeps_places(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Survivors whose rank is below the new size stay where they were."""
    stay = [(rank, member) for rank, member in enumerate(before) if rank < len(after) and member in after]
    return all(after[rank] == member for rank, member in stay)
