"""The monitor's rules, second by second, without a clock. soft 60, hard 90, lease 27 (0.9 * 30), barrier 120."""

from __future__ import annotations

import dataclasses

import pytest

from inprocess.attribution import Interruption
from inprocess.monitor import policy
from inprocess.monitor.policy import Action, Kill, Report, Snapshot, Timeouts, View
from inprocess.protocol.phases import Phase

S = 1_000_000_000
VIEW = View(member=5, limits=Timeouts.of(60, 90, 30, barrier_timeout=120), iteration=2)
RUN = Snapshot(progress=0, iteration=2, phase=Phase.RUN, rank=3)


def at(seconds: float, seen: Snapshot = RUN, view: View = VIEW) -> list[str]:
    """What is decided, in short, for example ["report 2 soft_timeout", "kill hard_timeout"]."""
    return [short(action) for action in policy.decide(int(seconds * S), seen, view)]


def short(action: Action) -> str:
    if isinstance(action, Report):
        return f"report {action.iteration} {action.record.interruption.value}"
    return f"kill {action.record.interruption.value}{' at once' if action.at_once else ''}"


def seen(**changes: object) -> Snapshot:
    return dataclasses.replace(RUN, **changes)  # type: ignore[arg-type]


def view(**changes: object) -> View:
    return dataclasses.replace(VIEW, **changes)  # type: ignore[arg-type]


SOFT = "report 2 soft_timeout"
HARD = "kill hard_timeout"
FENCE = "kill unresponsive at once"


@pytest.mark.parametrize(
    ("case", "seconds", "snapshot", "knows", "expected"),
    [
        ("progress is fresh", 59, RUN, VIEW, []),
        ("no progress", 60, RUN, VIEW, [SOFT]),
        ("no progress, in any phase", 60, seen(phase=Phase.CHECK), VIEW, [SOFT]),
        ("no progress on a reserve, for which nobody waits", 89, seen(reserve=True), VIEW, []),
        ("a reserve hangs for good", 90, seen(reserve=True), VIEW, [HARD]),
        ("no progress on a reserve in the end round", 60, seen(reserve=True, phase=Phase.END), VIEW, [SOFT]),
        ("no progress, already reported", 60, RUN, view(reported=2), []),
        ("no progress, reported for the iteration before", 60, RUN, view(reported=1), [SOFT]),
        ("no progress, already interrupted", 60, RUN, view(interrupted_at=50 * S), []),
        ("no progress, not protected", 1000, seen(hang_protection=False), VIEW, []),
        ("no progress while joining", 60, seen(iteration=-1, phase=Phase.JOIN), view(iteration=-1), []),
        ("no progress, its monitor is ahead", 60, seen(phase=Phase.END), view(iteration=3), ["report 3 soft_timeout"]),
        ("no progress, its monitor is behind", 60, RUN, view(iteration=1, interrupted_at=1), [SOFT]),
        ("no progress, a longer section", 60, seen(soft_timeout=100 * S), VIEW, []),
        ("no progress, a longer section is over", 100, seen(soft_timeout=100 * S), VIEW, [SOFT]),
        ("no progress, a shorter section", 10, seen(soft_timeout=10 * S), VIEW, [SOFT]),
        ("no progress, the monitor was stopped too", 100, RUN, view(awake_since=50 * S), []),
        ("ping is fresh", 100, seen(progress=100 * S, ping=50 * S), VIEW, []),
        ("no ping", 110, seen(progress=110 * S, ping=50 * S), VIEW, [SOFT]),
        ("ping was never used", 500, seen(progress=500 * S), VIEW, []),
        ("no ping outside the function", 110, seen(progress=110 * S, ping=50 * S, phase=Phase.FINISH), VIEW, []),
        ("no ping on a reserve", 110, seen(progress=110 * S, ping=50 * S, reserve=True), VIEW, []),
        ("no ping, not protected", 110, seen(progress=110 * S, ping=50 * S, hang_protection=False), VIEW, []),
        ("hangs for good", 90, RUN, view(reported=2), [HARD]),
        ("hangs for good, interrupted just now", 90, RUN, view(interrupted_at=89 * S), [HARD]),
        ("hangs for good, a longer section", 129, seen(soft_timeout=100 * S), view(reported=2), []),
        ("hangs for good, a longer section is over", 130, seen(soft_timeout=100 * S), view(reported=2), [HARD]),
        ("released by the abort", 90, seen(progress=61 * S, answered=2), view(interrupted_at=60 * S), []),
        ("no ping, no answer", 209, seen(progress=209 * S, ping=50 * S), view(interrupted_at=120 * S), []),
        ("no ping, no answer for long", 210, seen(progress=210 * S, ping=50 * S), view(interrupted_at=120 * S), [HARD]),
        ("no ping, answered", 140, seen(progress=140 * S, ping=50 * S, answered=2), view(interrupted_at=120 * S), []),
        ("no answer", 200, seen(progress=200 * S), view(interrupted_at=110 * S), [HARD]),
        ("no answer yet", 199, seen(progress=199 * S), view(interrupted_at=110 * S), []),
        ("no answer, longer section", 215, seen(soft_timeout=300 * S), view(interrupted_at=110 * S), [HARD]),
        ("no answer yet, longer section", 214, seen(soft_timeout=300 * S), view(interrupted_at=110 * S), []),
        ("no answer, unprotected", 200, seen(progress=0, hang_protection=False), view(interrupted_at=110 * S), [HARD]),
        ("no answer, in atomic()", 300, seen(progress=300 * S, atomic=True), view(interrupted_at=110 * S), []),
        ("no answer, atomic() ended", 300, seen(progress=300 * S), view(interrupted_at=110 * S, atomic_at=250 * S), []),
        ("no answer long after", 340, seen(progress=340 * S), view(interrupted_at=110 * S, atomic_at=250 * S), [HARD]),
        ("answered: further on", 200, seen(progress=200 * S, iteration=3), view(interrupted_at=110 * S), []),
        ("answered: finalizing", 200, seen(progress=200 * S, phase=Phase.FINALIZE), view(interrupted_at=110 * S), []),
        ("answered an older one", 200, seen(progress=200 * S, answered=1), view(interrupted_at=110 * S), [HARD]),
        ("has not come there", 200, seen(progress=200 * S, iteration=1), view(interrupted_at=110 * S), [HARD]),
        ("no heartbeat", 127, seen(progress=127 * S), view(lease_until=127 * S), [FENCE]),
        ("no heartbeat for a while", 126, seen(progress=126 * S), view(lease_until=127 * S), []),
        ("never a heartbeat", 500, seen(progress=500 * S), VIEW, []),
        ("no heartbeat, not protected", 127, seen(hang_protection=False), view(lease_until=127 * S), [FENCE]),
        ("no heartbeat while leaving", 127, seen(progress=127 * S, phase=Phase.LEAVE), view(lease_until=127 * S), []),
        ("store lost", 126, seen(progress=126 * S), view(lease_until=127 * S, cut_off_at=101 * S), []),
        ("store lost by us alone", 99, seen(progress=99 * S), view(lease_until=99 * S, cut_off_at=98 * S), [FENCE]),
        ("store lost: goes", 99, seen(progress=99 * S, phase=Phase.ABORT), view(lease_until=9, cut_off_at=10 * S), []),
        ("store lost, stays", 100, seen(progress=99 * S, phase=Phase.ABORT), view(lease_until=9, cut_off_at=S), [HARD]),
        ("store lost, nobody else", 191, seen(progress=191 * S), view(cut_off_at=101 * S), [HARD]),
        ("store lost as it joins", 191, seen(progress=191 * S, phase=Phase.JOIN), view(cut_off_at=101 * S), []),
        ("left", 1000, seen(left=True), view(lease_until=27 * S, cut_off_at=0, interrupted_at=0), []),
        ("is being killed", 1000, RUN, view(killed=True, lease_until=27 * S), []),
    ],
)  # fmt: skip
def test_rules(case: str, seconds: float, snapshot: Snapshot, knows: View, expected: list[str]) -> None:
    assert at(seconds, snapshot, knows) == expected, case


def test_a_lease_ends_before_the_others_lose_patience() -> None:
    assert 0 < Timeouts.of(60, 90, heartbeat_timeout=30).lease < 30 * S


def reported_at(stands_still: int, questions: range, pace: int, blocked: bool = False) -> int:
    """When a rank is reported that does not run any more from one moment on, with a watchdog that asks at `questions`.

    ``blocked``: the interpreter lock is held from that moment, and the watchdog does not run either. In ns.
    """
    answered = max(moment for moment in questions if moment <= stands_still)
    asked = [moment for moment in questions if not blocked and moment > stands_still]
    knows = view(limits=Timeouts.of(2, 90, 30, pace / S))
    moment = policy.wake_at(seen(progress=answered, question=answered), knows)
    assert moment is not None
    return max([moment, *(asked[:1] and [asked[0] + 2 * S])])


@pytest.mark.parametrize("blocked", [False, True])
def test_a_standstill_is_reported_neither_early_nor_late(blocked: bool) -> None:
    """After soft_timeout, and at most half a second later, wherever it begins between two questions."""
    pace = S // 2
    for begin in range(10 * S, 11 * S, S // 40):
        late = reported_at(begin, range(5 * S, 20 * S, pace), pace, blocked) - begin - 2 * S
        assert 0 <= late <= pace


def test_from_a_question_without_an_answer_on() -> None:
    knows = view(limits=Timeouts.of(60, 90, 30, 0.5))
    assert policy.wake_at(seen(progress=10 * S, question=10 * S + S // 5), knows) == 70 * S + S // 5
    assert policy.wake_at(seen(progress=10 * S, question=9 * S), knows) == 70 * S + S // 2
    assert policy.wake_at(seen(progress=10 * S, ping=11 * S), knows) == 71 * S  # what it shows by hand counts, too


def test_soft_and_hard_may_be_due_together() -> None:
    assert at(90) == [HARD, SOFT]


def test_wake_at_is_the_first_moment_of_a_decision() -> None:
    knows = view(lease_until=77 * S)
    moment = policy.wake_at(RUN, knows)
    assert moment == 60 * S
    assert policy.decide(moment - 1, RUN, knows) == []
    assert len(policy.decide(moment, RUN, knows)) == 1


def test_nothing_to_wake_for_once_the_rank_has_left() -> None:
    assert policy.wake_at(seen(left=True), VIEW) is None


def test_records_say_who_what_and_where() -> None:
    (report,) = policy.decide(60 * S, seen(atomic=True), VIEW)
    assert report.record.rank == 3 and report.record.initial_rank == 5
    assert report.record.interruption is Interruption.SOFT_TIMEOUT
    assert report.record.message == "no progress for 60 s (soft_timeout), in phase 'run', inside atomic()"


def test_records_say_whose_limit_it_was() -> None:
    """A section's, where it is not that of the option: who reads it looks there."""
    still, silent = seen(soft_timeout=5 * S), seen(soft_timeout=5 * S, progress=9 * S, ping=1)
    for snapshot, begins in ((still, "no progress for 5 s"), (silent, "no ping() for 5 s")):
        (report,) = policy.decide(9 * S, snapshot, VIEW)
        assert report.record.message == f"{begins} (limit of a section, in place of soft_timeout), in phase 'run'"
    for knows, begins in (
        (VIEW, "no progress for 35 s"),
        (view(interrupted_at=S), "asked to leave the function, it did not within 35 s"),
    ):
        kill = policy.decide(90 * S, seen(soft_timeout=5 * S, progress=0 if knows is VIEW else 89 * S), knows)[0]
        assert kill.record.message == f"{begins} (hard_timeout, moved by the limit of a section), in phase 'run'"
    (kill,) = policy.decide(106 * S, seen(soft_timeout=600 * S), view(interrupted_at=S))
    begins = "asked to leave the function, it did not within 105 s (in a section: halfway from hard_timeout to barrier"
    assert kill.record.message.startswith(begins)
    (report,) = policy.decide(60 * S, seen(soft_timeout=60 * S), VIEW)
    assert "(soft_timeout)" in report.record.message


def test_a_fenced_rank_is_not_given_grace_and_others_are() -> None:
    fence, kill = at(100, view=view(lease_until=27 * S)), at(100, view=view(reported=2))
    assert fence[0] == FENCE
    assert kill == [HARD]
    assert Kill(policy.decide(100 * S, RUN, view(reported=2))[0].record).at_once is False


def test_unheard_where_heartbeats_do_not_get_through() -> None:
    """With a timeout of 20 s the lease is 18 s; from 14 s after the last heartbeat on it is looked closely, for 1 s."""
    unheard = policy.LeaseWatch(20.0)
    assert unheard.look_at(18.0) == pytest.approx(14.0)
    assert not unheard.is_sure(4.1, now=100.0)
    assert not unheard.is_sure(4.0, now=100.1)
    assert unheard.look_at(4.0) == unheard.look_at(1.0) == 0.0
    assert not unheard.is_sure(3.2, now=100.9)
    assert unheard.is_sure(3.0, now=101.1)


def test_which_heartbeat_a_lease_is_from() -> None:
    assert VIEW.limits.beaten_at(28 * S) == pytest.approx(1.0)
    assert VIEW.limits.beaten_at(None) is None


def test_a_heartbeat_after_everything_stood_still() -> None:
    unheard = policy.LeaseWatch(20.0)
    assert not unheard.is_sure(0.5, now=100.0)
    assert not unheard.is_sure(18.0, now=100.2)
    assert not unheard.is_sure(4.0, now=115.0)
