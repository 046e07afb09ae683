"""The monitors among themselves: who watches whom, when a neighbour is dead, and speaking for the dead step by step."""

from __future__ import annotations

from typing import Any

import pytest

from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import Arrival, ArrivalKind, Decision, Outcome, dump
from inprocess.protocol.ops import Add, Now, Pause, Read, Wait
from inprocess.protocol.verbs import watching
from inprocess.protocol.verbs.watching import HeartbeatTracker, Ring
from tests.sim.engine import SimStore

from .verbs import carried_out

ROSTER = (0, 1, 2, 3, 4)


def ring(member: int = 2) -> Ring:
    return Ring(member, timeout=10.0, interval=1.0)


@pytest.mark.parametrize(("member", "watched"), [(0, 1), (2, 3), (4, 0)])
def test_each_watches_the_next(member: int, watched: int) -> None:
    assert ring(member).targets(ROSTER, 0.0) == [watched]


def test_alone_watches_nobody() -> None:
    assert ring().targets((2,), 0.0) == []


def test_removed_member_still_watches_the_next() -> None:
    """A monitor that speaks for its dead rank is off the roster at the end."""
    assert ring(2).targets((0, 1, 4), 0.0) == [4]


def test_silent_neighbour_and_the_one_after_it() -> None:
    """After two intervals of silence, so that neighbours that went down together are found together."""
    watcher = ring()
    watcher.observe(3, 7, 0.0)
    assert watcher.targets(ROSTER, 2.0) == [3]
    assert watcher.targets(ROSTER, 2.1) == [3, 4]


def test_dead_after_the_timeout_and_only_once() -> None:
    watcher = ring()
    assert [watcher.observe(3, 7, now) for now in (0.0, 9.9, 10.0, 11.0)] == [False, False, True, False]
    assert watcher.targets(ROSTER, 11.0) == [4]


def test_a_heartbeat_starts_the_time_again() -> None:
    watcher = ring()
    assert not any(watcher.observe(3, count, now) for count, now in ((7, 0.0), (8, 9.0), (8, 18.9)))
    assert watcher.observe(3, 8, 19.0)


def test_time_counts_from_the_first_look() -> None:
    """A member that is new to this watcher, whatever its counter, gets a whole timeout."""
    assert not ring().observe(3, 0, 1e6)


def test_memory_of_members_it_no_longer_watches_is_dropped() -> None:
    watcher = ring()
    watcher.observe(3, 7, 0.0)
    watcher.targets((0, 1, 2, 4), 5.0)
    assert watcher.seen == {}


def watch(counters: list[int], iteration: int, until: float) -> tuple[list[int], list[float]]:
    """Drive keep_watch by hand with heartbeats of the neighbour as given; who was lost, and when beats began."""
    membership = Membership.founder(0, (0, 1), 2)
    membership.iteration = iteration
    lost: list[int] = []
    beaten: list[float] = []
    verb = watching.keep_watch(
        Ring(0, 5.0, 1.0), lambda: membership, beaten.append, lambda member, _: lost.append(member)
    )
    now, answer = 0.0, None
    while now < until:
        match verb.send(answer):
            case Now():
                answer = now
            case Pause(seconds=seconds):
                now, answer = now + seconds, None
            case Read(key="beat/1"):
                answer = str(counters.pop(0) if len(counters) > 1 else counters[0]).encode()
            case _:
                answer = 1
    return lost, beaten


def test_watch_reports_a_silent_neighbour_once() -> None:
    lost, beaten = watch([1, 2, 3], 0, 30.0)
    assert lost == [1]
    assert beaten[:3] == [0.0, 1.0, 2.0]


def test_watch_waits_for_founders_that_have_not_started() -> None:
    assert watch([0], verbs.JOINING, 60.0)[0] == []


def test_watch_misses_a_member_that_never_sent_a_heartbeat_later() -> None:
    """From the first iteration on everybody has joined, so silence means the same for all."""
    assert watch([0], 0, 30.0)[0] == [1]


def test_the_lease_counts_from_the_moment_a_heartbeat_is_sent() -> None:
    """It may travel for long, and the others' patience begins when it arrives, not when the answer does."""
    membership, beaten = Membership.founder(0, (0, 1), 2), list[float]()
    verb = watching.keep_watch(ring(0), lambda: membership, beaten.append, lambda member, seconds: None)
    assert verb.send(None) == Now()
    assert verb.send(3.0) == Add("beat/0", 1)
    verb.send(1)
    assert beaten == [3.0]


def report_death(store: SimStore, membership: Membership, waits: list[Any]) -> list[str]:
    """Run stand_in over the store; an unanswered wait runs the next of ``waits``. Answers the keys it waited for."""
    record = watching.lost_record(1, 5.0)
    verb, answer = watching.report_death(membership, 1, record, "me"), None
    waited: list[str] = []
    while True:
        try:
            op = verb.send(answer)
        except StopIteration:
            return waited
        if isinstance(op, Wait):
            waited.append(op.key)
            if op.key not in store.data:
                waits.pop(0)()
            answer = store.data.get(op.key)
        else:
            answer = store.execute(op)


def test_stand_in_says_nothing_for_a_member_that_is_off_the_roster() -> None:
    """The monitor of a host that was given up finds its rank dead: the others must not be interrupted once more."""
    store, membership = SimStore(), Membership.founder(1, (0, 2), 3)
    membership.iteration = 1
    assert report_death(store, membership, []) == []
    assert store.data == {}


def test_stand_in_ends_with_the_roster() -> None:
    store, membership = SimStore(), Membership.founder(1, (0, 1), 2)
    membership.iteration = 0
    other = Membership.founder(0, (0, 1), 2)
    other.iteration = 0

    def arrives() -> None:
        verb, answer = verbs.end_round(other, Arrival(ArrivalKind.ALIVE, 0, 2)), None
        while True:
            try:
                answer = store.execute(verb.send(answer))
            except StopIteration:
                return

    assert report_death(store, membership, [arrives]) == ["0/outcome", "0/next"]
    assert (membership.iteration, membership.roster) == (1, (0,))


def test_stand_in_goes_on_in_the_next_iteration() -> None:
    """The member had said ``alive`` before it died, so it is on the next roster."""
    store, membership = SimStore(), Membership.founder(1, (0, 1), 2)
    membership.iteration = 0
    store.data["0/next"] = dump(Decision()).encode()
    assert (
        report_death(store, membership, [lambda: store.write("1/next", dump(Decision(removed=(1,))))])[-1] == "1/next"
    )
    assert b"dead" in store.data["1/start/1"]


def test_stand_in_ends_with_the_job() -> None:
    store, membership = SimStore(), Membership.founder(1, (0, 1), 2)
    membership.iteration = 0
    store.data["0/outcome"] = dump(Outcome(completed=True)).encode()
    assert report_death(store, membership, []) == ["0/outcome"]
    store.data["1/next"] = dump(Decision(abort="enough")).encode()
    membership.iteration = 1
    assert report_death(store, membership, [])[-1] == "1/next"


def test_lost_record_says_how_long() -> None:
    assert "no heartbeat for 30 s" in str(watching.lost_record(3, 30.0))


def test_who_speaks_and_was_out_of_reach_goes_on_where_the_others_are() -> None:
    """The verdict that it waits for is deleted. It speaks once more where the dead one still counts as alive."""
    store = SimStore()
    membership, late = Membership.founder(0, (0, 1, 2), 3), verbs.KEEP_VERDICTS
    membership.iteration = 1
    others = Membership(0, (0, 1, 2), iteration=late + 1)
    list(carried_out(store, verbs.forget(late + 1, others)))
    verb = carried_out(store, watching.report_death(membership, 2, watching.lost_record(2, 1.0), "me"))
    assert any(op == Wait(f"{late + 1}/outcome", verbs.RECOUNT) for op in verb), "it waits there"
    assert (membership.iteration, membership.roster) == (late + 1, (0, 1, 2))
    assert f"{late + 1}/end/2" in store.data


def test_whom_the_host_of_the_store_hears() -> None:
    """Whoever has not begun to send heartbeats is not missed; the others are, until they are heard again."""
    heard = HeartbeatTracker(timeout=10.0)
    heard.note({0: 0, 1: 3, 2: 1}, 100.0)
    heard.note({0: 0, 1: 3, 2: 2}, 105.0)
    assert heard.members(109.9) == [0, 1, 2]
    assert heard.members(110.0) == [0, 2]
    heard.note({0: 0, 1: 4}, 120.0)
    assert heard.members(120.0) == [0, 1]
