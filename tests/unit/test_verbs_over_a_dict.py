"""The verbs of the protocol, over a dict and without time: who writes what, what a repeat or a crash leaves behind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import BadMessage, Fenced, OptionError
from inprocess.protocol import verbs
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import MAX_RECORDS, Arrival, ArrivalKind, Decision, Roster, dump
from inprocess.protocol.ops import Exist, Pause, Read, ReadAll, Wait
from inprocess.protocol.parsing import load_decision, load_outcome, load_start
from inprocess.protocol.verbs import rounds
from tests.sim.engine import SimStore

from .verbs import carried_out, do

RECORD = InterruptionRecord(1, Interruption.EXCEPTION, initial_rank=1, message="ValueError: no")


def memberships(members: int, iteration: int = 0) -> list[Membership]:
    result = [Membership.founder(member, range(members), members) for member in range(members)]
    for membership in result:
        membership.iteration = iteration
    return result


def rank(number: int, size: int, active: int | None = None) -> Arrival:
    active = size if active is None else active
    return Arrival(ArrivalKind.RANK, number, size, active, number if number < active else None, by=str(number))


def alive(membership: Membership) -> Arrival:
    return Arrival(ArrivalKind.ALIVE, membership.rank, membership.world_size)


@pytest.fixture
def store() -> SimStore:
    return SimStore()


def start(store: SimStore) -> Any:
    return load_start(store.data["0/start"], "0/start")


def outcome(store: SimStore) -> Any:
    return load_outcome(store.data["0/outcome"], "0/outcome")


def following(store: SimStore, iteration: int = 0) -> Any:
    return load_decision(store.data[f"{iteration}/next"], "next")


def test_last_to_join_begins(store: SimStore) -> None:
    for membership in memberships(3, iteration=-1):
        assert "-1/next" not in store.data
        do(store, verbs.join(membership, f"process {membership.member}"))
    assert following(store, -1).removed == ()


def test_join_twice_by_one_process_counts_once(store: SimStore) -> None:
    first, second = memberships(2, iteration=-1)
    do(store, verbs.join(first, "a"))
    do(store, verbs.join(first, "a"))
    assert "-1/next" not in store.data
    do(store, verbs.join(second, "b"))
    assert "-1/next" in store.data


def test_rank_that_is_taken(store: SimStore) -> None:
    """Two processes with one RANK: the error names the rank, both processes and the remedy."""
    membership = memberships(2, iteration=-1)[0]
    do(store, verbs.join(membership, "host-a/12"))
    with pytest.raises(OptionError, match=r"RANK=0 is taken.*host-a/12.*host-b/7.*MASTER_PORT"):
        do(store, verbs.join(membership, "host-b/7"))


def test_start_goes_when_all_have_a_rank(store: SimStore) -> None:
    for membership in memberships(3):
        do(store, verbs.start_round(membership, rank(membership.member, 3, active=2)))
    assert start(store).go
    assert start(store).active_world_size == 2
    assert "0/outcome" not in store.data


def test_start_without_a_rank_interrupts(store: SimStore) -> None:
    first, second = memberships(2)
    do(store, verbs.start_round(first, rank(0, 2)))
    do(store, verbs.start_round(second, Arrival(ArrivalKind.LEFT)))
    assert not start(store).go
    assert not outcome(store).completed
    assert outcome(store).cause.initial_rank == 1
    assert "0/abort" not in store.data


def test_hopeless_assignment_ends_the_job(store: SimStore) -> None:
    pair = memberships(2)
    for membership in pair:
        do(store, verbs.start_round(membership, rank(0, 2)))
    for membership in pair:
        do(store, verbs.end_round(membership, alive(membership)))
    assert "rank_assignment" in following(store).abort


def test_declared_dead_is_fenced(store: SimStore) -> None:
    first, _ = memberships(2)
    do(store, verbs.act_on_behalf_of_dead(0, first.roster, 0, RECORD, "monitor of rank 1"))
    for verb in (verbs.start_round(first, rank(0, 2)), verbs.end_round(first, alive(first))):
        with pytest.raises(Fenced, match="initial rank 0 was declared dead by monitor of rank 1"):
            do(store, verb)
    assert do(store, verbs.missing(0, "end", first.roster)) == [1]


def test_interrupt_wakes_everybody_once(store: SimStore) -> None:
    assert do(store, verbs.interrupt(0, RECORD))
    assert do(store, verbs.interrupt(0, InterruptionRecord(0, Interruption.TERMINATED)))
    assert outcome(store).cause == RECORD
    assert not start(store).go
    assert store.data["0/rendezvous"] == b"-"
    assert store.data["0/record#"] == b"1"  # the first one is in the outcome


def test_an_error_that_is_known_is_not_noted_again(store: SimStore) -> None:
    """The others were told of it before it had left the function, and so at another moment."""
    assert do(store, verbs.interrupt(0, RECORD.noticed(5.0, "a host")))
    assert do(store, verbs.interrupt(0, RECORD.noticed(5.1, "a host")))
    assert "0/record#" not in store.data


def test_what_is_foretold_is_noted_by_who_speaks_for_the_dead(store: SimStore) -> None:
    dead = InterruptionRecord(0, Interruption.TERMINATED, initial_rank=0)
    do(store, verbs.interrupt(0, RECORD))
    do(store, verbs.foretell(0, dead))
    do(store, verbs.act_on_behalf_of_dead(0, (0, 1), 0, dead, "monitor 0"))
    do(store, verbs.end_round(memberships(2)[1], alive(memberships(2)[1])))
    assert following(store).record_count == 2


def test_what_is_foretold_first_is_the_cause(store: SimStore) -> None:
    do(store, verbs.foretell(0, RECORD))
    assert outcome(store).cause == RECORD
    assert not start(store).go


def test_what_is_foretold_after_completed_changes_nothing(store: SimStore) -> None:
    do(store, verbs.finish(0, 1, (0,)))
    do(store, verbs.foretell(0, RECORD))
    assert outcome(store).completed
    assert "0/start" not in store.data


def test_interruption_by_one_that_died_half_way(store: SimStore) -> None:
    """A monitor that waits for the end round wakes those that still wait for the start."""
    do(store, verbs.interrupt(0, RECORD), steps=1)
    assert "0/start" not in store.data
    waiting = verbs.await_next_awake(0)
    assert next(waiting) == Wait("0/next", verbs.RECOUNT)
    assert waiting.send(None) == Read("roster")
    woken = [waiting.send(None)]
    woken.append(waiting.send(woken[0].value.encode()))
    assert [op.key for op in woken] == ["0/start", "0/rendezvous"]
    assert waiting.send(b"") == Wait("0/next")


def test_where_the_iteration_has_started_nobody_is_woken(store: SimStore) -> None:
    membership = memberships(1)[0]
    do(store, verbs.publish_rendezvous(0, "@:1"))
    do(store, verbs.start_round(membership, rank(0, 1)))
    assert [op.key for op in carried_out(store, verbs.interrupt(0, RECORD))] == ["0/outcome", "0/start"]
    assert start(store).go
    assert store.data["0/rendezvous"] == b"@:1"


def test_the_end_round_asks_for_little_where_all_is_there(store: SimStore) -> None:
    """The others wait for it: of eight operations two went."""
    membership = memberships(1)[0]
    do(store, verbs.start_round(membership, rank(0, 1)))
    do(store, verbs.interrupt(0, RECORD))
    arriving = verbs.end_round(membership, alive(membership))
    assert [op.key for op in carried_out(store, arriving) if not isinstance(op, (Exist, ReadAll))] == [
        *("0/end/0", "0/end#"),
        *("0/record#", "0/abort", "ticket#", "0/next"),
    ]
    assert following(store).records == (RECORD,)


def test_end_round_wakes_followers_that_nobody_woke(store: SimStore) -> None:
    """A follower goes along the verdicts one by one, so each of them must be there."""
    do(store, verbs.interrupt(0, RECORD), steps=1)
    membership = memberships(1)[0]
    do(store, verbs.end_round(membership, alive(membership)))
    assert following(store).removed == ()
    assert not start(store).go


def test_all_leave_quietly_and_the_iteration_has_an_outcome(store: SimStore) -> None:
    """Nobody interrupts for a discarded member, so with nobody left whoever follows the job would wait for ever."""
    for membership in memberships(2):
        do(store, verbs.start_round(membership, Arrival(ArrivalKind.DISCARDED)))
        do(store, verbs.end_round(membership, Arrival(ArrivalKind.LEFT)))
    del store.data["0/outcome"]
    do(store, rounds._decide(0, "end", (0, 1)))
    assert not outcome(store).completed


def test_who_is_declared_dead_cannot_be_woken_before_it_is_written(store: SimStore) -> None:
    """It would arrive as alive, and stay on the roster until it is declared dead once more."""
    speak = verbs.act_on_behalf_of_dead(0, (0, 1), 1, RECORD, "its neighbour")
    done, answer = [], None
    while "0/rendezvous" not in done:
        op = speak.send(answer)
        answer = store.execute(op)
        done.append(op.key)
    assert done.index("0/outcome") < done.index("0/end/1")


def test_completed_after_interrupt_changes_nothing(store: SimStore) -> None:
    do(store, verbs.interrupt(0, RECORD))
    do(store, verbs.finish(0, 1, (0,)))
    assert outcome(store).cause == RECORD


def test_interrupt_after_completed_changes_nothing(store: SimStore) -> None:
    do(store, verbs.finish(0, 1, (0,)))
    assert not do(store, verbs.interrupt(0, RECORD))
    assert outcome(store).completed
    assert "0/start" not in store.data


def test_last_to_finish_completes(store: SimStore) -> None:
    do(store, verbs.finish(0, 2, (0, 1)))
    assert "0/outcome" not in store.data
    do(store, verbs.finish(0, 2, (0, 1)))
    assert outcome(store).completed


def test_completed_names_reserves_that_are_gone(store: SimStore) -> None:
    for membership in memberships(3):
        do(store, verbs.start_round(membership, rank(membership.member, 3, active=2)))
    do(store, verbs.act_on_behalf_of_dead(0, (0, 1, 2), 2, RECORD, "its monitor"))
    assert "0/outcome" not in store.data, "a reserve is not missed"
    do(store, verbs.finish(0, 2, (0, 1, 2)))
    do(store, verbs.finish(0, 2, (0, 1, 2)))
    assert outcome(store).removed == (2,)


@pytest.mark.parametrize("kind", [ArrivalKind.RANK, ArrivalKind.DISCARDED])
def test_death_of_one_that_stands_aside(store: SimStore, kind: ArrivalKind) -> None:
    """A reserve, or a discarded member whose monitor has gone: nobody is interrupted."""
    membership = memberships(3)[2]
    do(store, verbs.start_round(membership, Arrival(kind, 2, 3, 2, None)))
    do(store, verbs.act_on_behalf_of_dead(0, membership.roster, 2, RECORD, "neighbour"))
    assert "0/outcome" not in store.data


def test_death_of_an_active_member_interrupts(store: SimStore) -> None:
    pair = memberships(2)
    do(store, verbs.start_round(pair[1], rank(1, 2)))
    do(store, verbs.act_on_behalf_of_dead(0, (0, 1), 1, RECORD, "its monitor"))
    assert not outcome(store).completed
    do(store, verbs.end_round(pair[0], alive(pair[0])))
    assert following(store).removed == (1,)
    assert following(store).records == (RECORD,)


@pytest.mark.parametrize("steps", range(7))
def test_last_arriver_dies_anywhere(store: SimStore, steps: int) -> None:
    """After any number of its operations: somebody speaks for it, recounts, and the round has its verdict."""
    first, second = memberships(2)
    do(store, verbs.end_round(first, alive(first)))
    do(store, verbs.end_round(second, alive(second)), steps=steps)
    do(store, verbs.act_on_behalf_of_dead(0, (0, 1), 1, RECORD, "its monitor"))
    do(store, verbs.recount(0, (0, 1)))
    assert following(store).removed == ((1,) if steps == 0 else ())


def test_first_decision_stands(store: SimStore) -> None:
    """Two recount at once, and another reason is noted between what the one read and what the other read."""
    first, second = memberships(2)
    do(store, verbs.interrupt(0, RECORD))
    do(store, verbs.end_round(first, alive(first)))
    do(store, verbs.end_round(second, alive(second)), steps=2)
    slow = verbs.recount(0, (0, 1))
    op = next(slow)
    while getattr(op, "key", "") != "0/next":
        op = slow.send(store.execute(op))
    do(store, verbs.interrupt(0, InterruptionRecord(0, Interruption.TERMINATED)))
    do(store, verbs.recount(0, (0, 1)))
    store.execute(op)
    assert len(following(store).records) == 2


def test_recount_leaves_an_open_round_alone(store: SimStore) -> None:
    first = memberships(2)[0]
    do(store, verbs.end_round(first, alive(first)))
    do(store, verbs.recount(0, (0, 1)))
    assert "0/next" not in store.data
    assert do(store, verbs.missing(0, "end", (0, 1))) == [1]


def test_entry_is_written_before_it_is_counted(store: SimStore) -> None:
    first = memberships(2)[0]
    do(store, verbs.end_round(first, alive(first)), steps=1)
    assert "0/end/0" in store.data
    assert "0/end#" not in store.data


def test_records_beyond_the_cap_are_counted_only(store: SimStore) -> None:
    for number in range(MAX_RECORDS + 5):
        do(store, verbs.interrupt(0, InterruptionRecord(number, Interruption.EXCEPTION)))
    membership = memberships(1)[0]
    do(store, verbs.end_round(membership, alive(membership)))
    assert (len(following(store).records), following(store).record_count) == (MAX_RECORDS, MAX_RECORDS + 5)
    assert f"0/record/{MAX_RECORDS + 1}" not in store.data


def test_record_whose_writer_died(store: SimStore) -> None:
    """It counted and did not write: the others' records are there."""
    second, third = (InterruptionRecord(number, Interruption.EXCEPTION) for number in (2, 3))
    do(store, verbs.interrupt(0, RECORD))
    do(store, verbs.interrupt(0, second), steps=2)
    do(store, verbs.interrupt(0, third))
    membership = memberships(1)[0]
    do(store, verbs.end_round(membership, alive(membership)))
    assert following(store).records == (RECORD, third)


def test_said_again_in_the_same_words_counts_once(store: SimStore) -> None:
    """As by two that speak for the same dead member."""
    do(store, verbs.interrupt(0, RECORD))
    do(store, verbs.interrupt(0, RECORD))
    membership = memberships(1)[0]
    do(store, verbs.end_round(membership, alive(membership)))
    assert (following(store).records, following(store).record_count) == ((RECORD,), 1)


def test_first_address_stands(store: SimStore) -> None:
    assert do(store, verbs.publish_rendezvous(0, "a:1")) == "a:1"
    assert do(store, verbs.publish_rendezvous(0, "b:2")) == "a:1"
    assert do(store, verbs.await_rendezvous(0)) == "a:1"


def test_heartbeats_count(store: SimStore) -> None:
    assert [do(store, verbs.read_beat(3)), do(store, verbs.beat(3))] == [0, 1]
    assert do(store, verbs.read_beat(3)) == 1


def test_over_when_all_are_gone(store: SimStore) -> None:
    """Also where two speak for one member: it counts once."""
    for member in (0, 0, 1):
        assert not do(store, verbs.await_over(0.0))
        do(store, verbs.gone(member, 2))
    assert do(store, verbs.await_over(0.0))


def test_over_where_one_died_before_it_was_counted(store: SimStore) -> None:
    do(store, verbs.gone(0, 2), steps=2)
    assert "gone/0" in store.data
    assert "gone#" not in store.data
    do(store, verbs.gone(1, 2))
    assert not do(store, verbs.await_over(0.0))
    assert do(store, verbs.await_over(0.0, (0, 1)))
    assert not do(store, verbs.await_over(5.0, (0, 1, 2)))


def test_who_counted_last_may_not_have_known_of_all(store: SimStore) -> None:
    """Whoever serves the store looks for the others until its time is over, a second at a time."""
    store.write("over", "1")
    ops = carried_out(store, verbs.await_over(5.0, (0,)))
    assert sum(op.seconds for op in ops if isinstance(op, Pause)) == 5.0


def test_forget_keeps_fences_and_the_last_verdicts(store: SimStore) -> None:
    """However long a job is, it leaves the entries of the dead, the last verdicts, and who is in it."""
    sizes = []
    for iteration in range(60):
        pair = memberships(2, iteration)
        do(store, verbs.interrupt(iteration, RECORD))
        for membership in pair:
            do(store, verbs.start_round(membership, rank(membership.member, 2)))
            do(store, verbs.end_round(membership, alive(membership)))
            do(store, verbs.forget(iteration, membership))
        sizes.append(len(store.data))
    assert len(set(sizes[verbs.KEEP_VERDICTS + 1 :])) == 1
    store.data["0/end/7"] = b'{"kind":"dead"}'
    kept = {(int(number), name) for number, _, name in (key.partition("/") for key in store.data) if name}
    assert {name for number, name in kept if number < 60 - verbs.KEEP} == {"outcome", "next", "end/7"}
    verdicts = {number for number, name in kept if name == "next"}
    assert verdicts == {number for number, name in kept if name == "outcome"} == set(range(44, 60))


# --- who is late ----------------------------------------------------------------------------------------------------

LATE = verbs.KEEP_VERDICTS


def at(iteration: int, *removed: int) -> Membership:
    """The membership of member 0 of five, some of whom have gone."""
    membership = memberships(5, iteration)[0]
    membership.roster = tuple(member for member in membership.roster if member not in removed)
    return membership


def test_the_verdicts_go_after_the_roster_is_there(store: SimStore) -> None:
    """At whatever operation its writer dies, who misses a verdict finds the roster."""
    for steps in range(40):
        store.data.clear()
        store.data |= {"0/outcome": b"kept", "0/next": b"kept"}
        do(store, verbs.forget(LATE, at(LATE, 2, 4)), steps)
        assert {"0/outcome", "0/next"} <= store.data.keys() or "roster" in store.data
    assert store.data == {"roster": b'{"iteration":16,"members":[[0,1],[3,3]]}'}


def test_the_roster_never_goes_back(store: SimStore) -> None:
    """Whoever stood still at any operation, and goes on when others have written a newer one, leaves that as it is."""
    for steps in range(14):
        store.data.clear()
        late, answer = verbs.forget(LATE, at(LATE, 2)), None
        for _ in range(steps):
            answer = store.execute(late.send(answer))
        waiting = late.send(answer)
        for newer in (LATE + 1, LATE + 2):
            do(store, verbs.forget(newer, at(newer, 2, 3)))
        with contextlib.suppress(StopIteration):
            while True:
                waiting = late.send(store.execute(waiting))
        assert store.data["roster"] == b'{"iteration":18,"members":[[0,1],[4,4]]}'


@pytest.mark.parametrize(
    "verb",
    [
        verbs.refuse_behind,
        verbs.await_next_awake,
        lambda iteration: verbs.await_outcome(iteration, (0, 2)),
        lambda iteration: verbs.await_next(iteration, (0, 2)),
    ],
)
def test_who_waits_for_a_deleted_verdict_is_told(store: SimStore, verb: Any) -> None:
    do(store, verbs.forget(LATE + 3, at(LATE + 3, 1)))
    with pytest.raises(verbs.Behind, match="in iteration 3; the others are in 19") as found:
        do(store, verb(3))
    assert found.value.roster == Roster(LATE + 3, ((0, 0), (2, 4)))


def test_who_waits_for_a_verdict_to_come_goes_on_waiting(store: SimStore) -> None:
    """Also where the others have come further since it looked last: that verdict is still there."""
    do(store, verbs.forget(LATE + 3, at(LATE + 3, 1)))
    here = LATE + 4 - verbs.KEEP_VERDICTS // 2
    do(store, verbs.refuse_behind(here))
    waiting = verbs.await_next_awake(here)
    assert next(waiting) == Wait(f"{here}/next", verbs.RECOUNT)
    assert waiting.send(None) == Read("roster")
    assert waiting.send(store.data["roster"]).key == f"{here}/start"


def test_who_has_looked_may_wait_for_some_more_iterations(store: SimStore) -> None:
    """A verdict may be the next to be deleted when it is looked for, and gone when it is waited for. So the roster is
    there, and refuses, long before."""
    store.write("0/outcome", "a verdict")
    for iteration in range(LATE):
        do(store, verbs.forget(iteration, at(iteration)))
        if iteration < LATE // 2:
            do(store, verbs.refuse_behind(0))
        else:
            with pytest.raises(verbs.Behind):
                do(store, verbs.refuse_behind(0))
    assert "0/outcome" in store.data


def test_giving_up_by_one_that_was_out_of_reach_reaches_the_others(store: SimStore) -> None:
    do(store, verbs.forget(LATE + 9, at(LATE + 9)))
    do(store, verbs.give_up(2, "a broken value"))
    assert load_decision(store.data[f"{LATE + 9}/next"], "next").abort == "a broken value"


def test_a_broken_roster_is_named(store: SimStore) -> None:
    store.data["roster"] = b'{"iteration":-1}'
    for verb in (verbs.refuse_behind(0), verbs.forget(LATE, at(LATE))):
        with pytest.raises(BadMessage, match="store key 'roster'"):
            do(store, verb)


def test_constant_number_of_operations() -> None:
    """An arrival costs the same for 2 members as for 2,000, except for the one that decides."""
    for members in (3, 2_000):
        store, membership = SimStore(), Membership.founder(0, range(members), members)
        membership.iteration = 0
        verb, count = verbs.end_round(membership, alive(membership)), 0
        answer: Any = None
        with pytest.raises(StopIteration):
            while True:
                answer = store.execute(verb.send(answer))
                count += 1
        assert count == 2


# --- values that none of us wrote


def told(store: SimStore, iteration: int = 0) -> str:
    """The reason for which everybody leaves; whoever waits for anything else is awake, too."""
    assert iteration < 0 or (not outcome(store).completed and not start(store).go)
    reason: str = following(store, iteration).abort
    return reason


@pytest.mark.parametrize("key", ["0/end/0", "0/end/1", "0/record#", "0/record/1"])
def test_whoever_finds_a_broken_value_tells_everybody(store: SimStore, key: str) -> None:
    """The others wait for the next roster and do not read it."""
    pair = memberships(2)
    do(store, verbs.interrupt(0, RECORD))
    do(store, verbs.interrupt(0, InterruptionRecord(0, Interruption.TERMINATED)))
    store.data[key] = b"\x80\x04"
    with pytest.raises(BadMessage, match=f"'{key}'"):
        for membership in pair:
            do(store, verbs.end_round(membership, alive(membership)))
    assert f"'{key}'" in told(store)


def test_a_broken_entry_of_somebody_dead(store: SimStore) -> None:
    store.data["0/start/1"] = b"{}"
    with pytest.raises(BadMessage, match="'0/start/1'"):
        do(store, verbs.act_on_behalf_of_dead(0, (0, 1), 1, RECORD, "its monitor"))
    assert "'0/start/1'" in told(store)


def test_a_broken_entry_while_joining(store: SimStore) -> None:
    store.data["-1/end/1"] = b"[]"
    first, second = memberships(2, iteration=-1)
    do(store, verbs.join(first, "a"))
    with pytest.raises(BadMessage, match="'-1/end/1'"):
        do(store, verbs.join(second, "b"))
    assert "'-1/end/1'" in told(store, -1)


@pytest.mark.parametrize("count", [b"-1", b"-7"])
def test_a_counter_below_zero(store: SimStore, count: bytes) -> None:
    """The round would never be complete."""
    store.data["0/start#"] = count
    with pytest.raises(BadMessage, match="'0/start#'"):
        do(store, verbs.start_round(memberships(2)[0], rank(0, 2)))
    assert "'0/start#'" in told(store)


def test_giving_up_reaches_a_job_that_is_further_on(store: SimStore) -> None:
    do(store, verbs.interrupt(0, RECORD))
    store.data["0/next"] = dump(Decision()).encode()
    do(store, verbs.give_up(0, "spoiled"))
    assert following(store).abort == ""
    assert following(store, 1).abort == "spoiled"
    do(store, verbs.give_up(0, "spoiled again"))
    assert "2/next" not in store.data


def test_giving_up_where_the_verdict_is_broken_ends(store: SimStore) -> None:
    store.data["0/next"] = b"garbage"
    do(store, verbs.give_up(0, "spoiled"))
    assert "1/next" not in store.data


@pytest.mark.parametrize(("done", "words"), [(5, "counts 6 functions"), (-1, "not a count")])
def test_more_functions_returned_than_were_called(store: SimStore, done: int, words: str) -> None:
    store.data["0/done#"] = str(done).encode()
    with pytest.raises(BadMessage, match=words):
        do(store, verbs.finish(0, 2, (0, 1)))
    assert "'0/done#'" in told(store)


@pytest.mark.parametrize(
    ("decision", "words"),
    [(Decision(removed=(1, 7)), r"members \[7\]"), (Decision(terminated=(1, 2)), r"ranks \[2\]")],
)
def test_a_verdict_about_strangers(store: SimStore, decision: Decision, words: str) -> None:
    store.data["0/next"] = dump(decision).encode()
    membership = memberships(2)[0]
    with pytest.raises(BadMessage, match=f"'0/next'.*{words}"):
        do(store, verbs.await_next(0, membership=membership))


def test_a_verdict_about_members_that_have_gone_before_is_none_about_strangers(store: SimStore) -> None:
    """A new monitor may begin with a roster that is newer than its iteration."""
    store.data["0/next"] = dump(Decision(removed=(1,))).encode()
    membership = Membership(0, (0,), iteration=0, known=frozenset((0, 1)))
    assert do(store, verbs.await_next(0, membership=membership)).removed == (1,)


def test_a_long_reason_is_cut_before_it_is_written(store: SimStore) -> None:
    """A server closes the connection on which more than 8 MiB come."""
    do(store, verbs.interrupt(0, RECORD, abort="x" * (9 << 20) + "\ud800"))
    assert len(store.data["0/abort"]) < 5000
