"""The verdict by itself: a job that went well has no offences, and each thing that must not be is one."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from tests.chaos.schedule import Job, Signal, Strike
from tests.chaos.training import Line, exact
from tests.chaos.verdict import Facts, offences
from tests.harness import HoldGIL, Kill, Raise, RankResult, Ranks, SlowDown

SIZE = 4
VALUES = exact(3)
ROSTER = [0, 1, 2, 3]


def save(step: int, iteration: int = 0, member: int = 0, value: int | None = None) -> list[Line]:
    value = VALUES[step] if value is None else value
    return [Line(what, iteration, member, step, value) for what in ("open", "commit")]


def resume(iteration: int, member: int = 0) -> list[Line]:
    return [Line("resume", iteration, member, 0, 0)]


LOG = [*resume(0), *save(1), *resume(1), *save(2, 1), *save(3, 1)]


def result(rank: int, **other: object) -> RankResult:
    events = [
        {"event": "roster", "iteration": 0, "members": ROSTER, "t": 1.0},
        {"event": "done", "t": 2.0},
        {"event": "ended", "t": 2.1},
    ]
    made = RankResult(rank, 100 + rank, 0, [3, VALUES[3]], None, "", "", events, [], "")
    return dataclasses.replace(made, **other)  # type: ignore[arg-type]


def died(rank: int, exitcode: int, *strikes: int) -> RankResult:
    struck = [{"event": "struck", "strike": number, "t": 1.5} for number in strikes]
    return result(rank, exitcode=exitcode, value=None, events=[*struck, {"event": "ended", "t": 2.0}])


def job(*strikes: Strike, assignment: str = "shift") -> Job:
    return Job(0, SIZE, assignment, 10.0, strikes)


def judge(job: Job, *ranks: RankResult, log: list[Line] | None = None, sent: dict[int, float] | None = None) -> str:
    given = {rank.rank: rank for rank in ranks}
    results = Ranks(given.get(rank, result(rank)) for rank in range(SIZE))
    return "\n".join(offences(Facts(job, results, sent or {}, LOG if log is None else log)))


def test_a_job_that_went_well():
    assert judge(job()) == ""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ([*resume(0), *save(1), *save(3)], "commit 2 of the log"),
        ([*resume(0), *save(1), *save(2), *save(2), *save(3)], "commit 3 of the log"),
        ([*resume(0), *save(1), *save(2, value=5), *save(3)], "commit 2 of the log"),
        ([*resume(0), *save(1), *save(2)], "the last commit is [2,"),
        ([], "the last commit is None"),
        ([*resume(0), *save(1), *resume(1, 1), *save(2, 1, 1), *save(2), *save(3, 1, 1)], "after a newer iteration"),
        ([*resume(0), *save(1), *save(2, 0, 1), *save(3)], "several writers"),
        ([*resume(0), *save(1), save(2)[0], *save(2), *save(3)], "cut in half"),
    ],
    ids=["lost", "doubled", "wrong", "not the last", "none", "late", "two writers", "cut"],
)
def test_steps(log, words):
    assert words in judge(job(), log=log)


def test_what_a_fenced_rank_writes_later_does_not_count():
    log = [*resume(0), *save(1), *resume(1, 1), *save(2, 0, 0), *save(2, 1, 1), *save(3, 1, 1)]
    lines = judge(job(), log=log).splitlines()
    assert lines
    assert all("after a newer iteration" in line for line in lines)


def test_a_rank_that_nothing_happened_to():
    assert "rank 2: -9" in judge(job(), died(2, -9))
    assert "rank 2: StoreLost" in judge(job(), result(2, exception="StoreLost", value=None))
    assert "rank 2 returned [3, 7]" in judge(job(), result(2, value=[3, 7]))


@pytest.mark.parametrize(
    ("fault", "exitcode"),
    [(Kill(), -9), (Kill(signal.SIGTERM), -15), (HoldGIL(), -15), (HoldGIL(), -9)],
)
def test_deadly_faults(fault, exitcode):
    deadly = job(Strike(1.0, 1, "step", fault))
    assert judge(deadly, died(1, exitcode, 0)) == ""
    assert "rank 1: 5" in judge(deadly, died(1, 5, 0))
    survived = result(1, events=[*result(1).events, {"event": "struck", "strike": 0, "t": 1.0}])
    assert "rank 1: survives" in judge(deadly, survived)


def test_a_death_excuses_nobody_else():
    assert "rank 2: -9" in judge(job(Strike(1.0, 1, "step", Kill())), died(1, -9, 0), died(2, -9))


def test_ctrl_c_inside_initialize_ends_the_job_for_everybody():
    interrupted = job(Strike(1.0, 1, "outside", Signal(signal.SIGINT)))
    told = "rank 1: initialize raised KeyboardInterrupt"
    left = result(1, exception="KeyboardInterrupt", value=None)
    others = [result(rank, exception="RestartAbort", message=told, value=None) for rank in (0, 2, 3)]
    assert judge(interrupted, left, *others, sent={0: 1.0}) == ""
    assert "rank 3: survives" in judge(interrupted, left, *others[:2], sent={0: 1.0})
    assert "rank 1: survives" in judge(interrupted, *others, sent={0: 1.0}), "the rank that they name went on"
    assert "rank 0: RestartAbort" in judge(interrupted, *others, sent={0: 1.0}), "and so should they"
    elsewhere = [dataclasses.replace(other, message="the user asked for it") for other in others]
    assert "rank 0: RestartAbort" in judge(interrupted, left, *elsewhere, sent={0: 1.0})
    assert "rank 1: KeyboardInterrupt" in judge(job(), left, *others)


def test_gentle_faults_kill_nobody():
    for fault in (Raise(), SlowDown(), HoldGIL(0.5)):
        assert "rank 1: -9" in judge(job(Strike(1.0, 1, "step", fault)), died(1, -9, 0))


def test_only_a_long_stop_may_be_given_up():
    def stop(seconds):
        return job(Strike(1.0, 1, "outside", Signal(signal.SIGSTOP, "training", seconds)))

    assert "rank 1: -9" in judge(stop(0.2), died(1, -9), sent={0: 1.0})
    assert judge(stop(4.0), died(1, -9), sent={0: 1.0}) == ""
    assert "rank 1: -9" in judge(stop(4.0), died(1, -9)), "it was never sent"


def test_a_healthy_rank_that_is_killed_is_an_offence_also_after_a_death():
    assert "rank 2: -9" in judge(job(Strike(1.0, 1, "step", Kill())), died(1, -9, 0), died(2, -9))


def test_who_stood_still_may_run_beside_the_others_for_a_moment():
    def stop(target):
        return job(Strike(1.0, 0, "outside", Signal(signal.SIGSTOP, target, 6.0)))

    log = [*resume(0), *save(1), *resume(1, 1), *save(2, 0, 0), *save(2, 1, 1), *save(3, 1, 1)]
    fenced = result(0, exception="Fenced", value=None)
    assert judge(stop("host"), fenced, log=log, sent={0: 1.0}) == ""
    assert "after a newer iteration" in judge(stop("training"), log=log, sent={0: 1.0})


@pytest.mark.parametrize(
    ("assignment", "rosters", "words"),
    [
        ("shift", [[0, 1, 2, 3], [0, 3, 2]], "order of ranks"),
        ("shift", [[0, 1, 1, 3]], "order of ranks"),
        ("gaps", [[0, 1, 2, 3], [0, 2, 3]], "gaps: "),
        ("pairs", [[0, 1, 2]], "order of ranks"),
        ("even", [[0, 1, 2]], "expected one of"),
    ],
)
def test_ranks(assignment, rosters, words):
    events = [{"event": "roster", "iteration": i, "members": roster, "t": 1.0} for i, roster in enumerate(rosters)]
    others = [result(rank, events=result(rank).events[1:]) for rank in (1, 2, 3)]
    assert words in judge(job(assignment=assignment), result(0, events=[*events, *result(0).events[1:]]), *others)


def test_who_comes_later_may_have_got_the_slot_of_another():
    """Rank 3 died and came back before it was missed, while the slot of rank 0 was free."""
    events = [{"event": "roster", "iteration": 1, "members": [3, 1, 2], "t": 1.0}]
    ranks = [result(0, events=[*events, *result(0).events[1:]])]
    ranks += [result(rank, events=result(rank).events[1:]) for rank in (1, 2, 3)]
    again = dataclasses.replace(ranks[3], pid=200)
    said = ["\n".join(offences(Facts(job(), Ranks(some), {}, LOG))) for some in (ranks, [*ranks, again])]
    assert "order of ranks" in said[0] and "order of ranks" not in said[1]


def test_ranks_that_disagree():
    events = [{"event": "roster", "iteration": 0, "members": [0, 1, 2], "t": 1.0}, *result(1).events[1:]]
    assert "the ranks gathered" in judge(job(), result(1, events=events))


def test_what_the_harness_finds():
    ranks = Ranks(result(rank) for rank in range(SIZE))
    ranks.problems, ranks.lingered = ["rank 1 left behind: process 7: S python"], 20.0
    lines = offences(Facts(job(), ranks, {}, LOG))
    assert [words in line for words, line in zip(("left behind", "stayed for 20"), lines, strict=True)] == [True, True]
