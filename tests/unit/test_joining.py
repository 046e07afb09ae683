"""How a process gets into a job that runs: which operations, in which order, and what a death in between leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.exception import BadMessage, Fenced, OptionError, RestartAbort, RestartError
from inprocess.protocol import verbs
from inprocess.protocol.keys import JOINING
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import FIRST_JOINER as J
from inprocess.protocol.messages import Arrival, ArrivalKind, Decision, JoinMode, Outcome, Ticket, dump
from inprocess.protocol.ops import Pause, Wait
from inprocess.protocol.parsing import load_decision, load_outcome, load_ticket
from inprocess.protocol.verbs import joining, watching
from tests.sim.engine import SimStore

from .verbs import carried_out, do

TICKET = Ticket(1, 3, by="c")
DIED = InterruptionRecord(1, Interruption.TERMINATED, initial_rank=1, message="died")


def always(before: int, after: int) -> bool:
    return True


def never(before: int, after: int) -> bool:
    return False


def waits_for(store: SimStore, verb: Any) -> str:
    """The key that the verb waits for, which is not there yet."""
    missing = (op.key for op in carried_out(store, verb) if isinstance(op, Wait) and op.key not in store.data)
    return next(missing)


@pytest.fixture
def store() -> SimStore:
    """A job of three in iteration 0, of which rank 1 has died and been removed."""
    store = SimStore()
    for member in range(3):
        do(store, verbs.join(Membership.founder(member, range(3), 3), "abc"[member]))
    store.write("0/outcome", dump(Outcome(completed=False, cause=DIED)))
    store.write("0/next", dump(Decision(removed=(1,), terminated=(1,))))
    return store


def waiting(store: SimStore, ticket: Ticket = TICKET) -> Membership:
    return do(store, joining.register(ticket))  # type: ignore[no-any-return]


def survivors(iteration: int = 1) -> list[Membership]:
    """The memberships of 0 and 2, which run without 1."""
    memberships = [Membership(member, (0, 2), iteration, rank, 2) for rank, member in enumerate((0, 2))]
    return memberships


def end_round(store: SimStore, iteration: int = 1) -> Decision:
    for membership in survivors(iteration):
        do(store, verbs.end_round(membership, verbs.alive(membership)))
    return load_decision(store.data[f"{iteration}/next"], "next")


def test_it_gets_an_id_of_its_own_and_sees_who_began(store: SimStore) -> None:
    first, second = waiting(store), waiting(store)
    assert (first.member, second.member) == (J + 1, J + 2)
    assert (first.roster, first.iteration, first.included) == ((0, 2), 1, False)


def test_it_interrupts_what_runs_and_is_let_in(store: SimStore) -> None:
    membership = waiting(store)
    verb = joining.await_slot(membership, TICKET, always, lambda membership: None)
    assert waits_for(store, verb) == "1/next"
    cause = load_outcome(store.data["1/outcome"], "outcome").cause
    assert cause is not None
    assert (cause.interruption, cause.initial_rank, cause.message) == (Interruption.JOINED, 1, "c takes part")
    decision = end_round(store)
    assert (decision.joined, decision.slots, decision.fresh) == (((J + 1, 1),), 3, (1,))
    with pytest.raises(StopIteration) as end:
        verb.send(store.data["1/next"])
    assert end.value.value == decision
    membership.apply(decision)
    assert (membership.rank, membership.world_size, membership.roster, membership.iteration) == (1, 3, (0, 2, J + 1), 2)


def test_several_that_come_soon_after_each_other_are_one_restart(store: SimStore) -> None:
    """Two slots are free, and one process is there: it looks again a little later, as long as others come."""
    store.write("0/next", dump(Decision(removed=(1, 2), terminated=(1, 2))))
    membership = waiting(store)
    verb, answer, pauses = joining.await_slot(membership, TICKET, always, lambda membership: None), None, 0
    while "1/outcome" not in store.data:
        op = verb.send(answer)
        if isinstance(op, Pause):
            assert (op.seconds, store.data["ticket#"]) == (joining.POLL_INTERVAL_S, b"1")
            pauses += 1
            waiting(store, Ticket(2, 3, by="d"))
            answer = None
        else:
            answer = store.data[op.key] if isinstance(op, Wait) else store.execute(op)
    assert pauses == 1


def test_nobody_is_waited_for_who_does_not_come(store: SimStore) -> None:
    store.write("0/next", dump(Decision(removed=(1, 2), terminated=(1, 2))))
    verb, answer, pauses = joining.await_slot(waiting(store), TICKET, always, lambda membership: None), None, 0
    while "1/outcome" not in store.data:
        op = verb.send(answer)
        pauses += isinstance(op, Pause)
        answer = None if isinstance(op, Pause) else store.data[op.key] if isinstance(op, Wait) else store.execute(op)
    assert pauses == 1


def test_it_waits_for_a_restart_where_it_is_told_so(store: SimStore) -> None:
    verb = joining.await_slot(waiting(store), TICKET, never, lambda membership: None)
    assert waits_for(store, verb) == "1/outcome"


def test_it_comes_in_where_ranks_wait_for_it(store: SimStore) -> None:
    assert do(store, verbs.want(1, (0, 2))) == {}
    membership = waiting(store)
    assert waits_for(store, joining.await_slot(membership, TICKET, never, lambda membership: None)) == "1/next"
    assert do(store, verbs.want(1, (0, 2))) == {J + 1: TICKET}


@pytest.mark.parametrize("interrupts", [always, never])
def test_a_spare_disturbs_nobody(store: SimStore, interrupts: Callable[[int, int], bool]) -> None:
    """Until somebody dies, in whose slot it is let in with the verdict on that death."""
    store.write("0/next", dump(Decision()))
    spare = Ticket(0, 3, by="d")
    membership = waiting(store, spare)
    verb = joining.await_slot(membership, spare, interrupts, lambda membership: None)
    assert waits_for(store, verb) == "1/outcome"
    memberships = [Membership(member, (0, 1, 2), 1, member, 3) for member in range(3)]
    for each in (memberships[0], memberships[2]):
        do(store, verbs.end_round(each, verbs.alive(each)))
    do(store, verbs.act_on_behalf_of_dead(1, (0, 1, 2), 1, DIED, "monitor"))
    decision = load_decision(store.data["1/next"], "next")
    assert (decision.removed, decision.joined) == ((1,), ((J + 1, 1),))


def test_it_is_told_how_many_there_would_be_with_all_that_wait(store: SimStore) -> None:
    """Two slots are free: the first alone would be a third member, the second one comes with it."""
    store.write("0/next", dump(Decision(removed=(1, 2), terminated=(1, 2))))
    told: list[tuple[int, int]] = []

    def interrupts(members: int, later: int) -> bool:
        told.append((members, later))
        return False

    for ticket in (TICKET, Ticket(2, 3, by="d")):
        verb = joining.await_slot(waiting(store, ticket), ticket, interrupts, lambda membership: None)
        assert waits_for(store, verb) == "1/outcome"
    assert told == [(1, 2), (1, 3)]


def test_the_job_completes_before(store: SimStore) -> None:
    store.write("1/outcome", dump(Outcome(completed=True)))
    assert do(store, joining.await_slot(waiting(store), TICKET, never, lambda membership: None)) is None


def test_the_job_has_completed_and_was_gone_on_with(store: SimStore) -> None:
    """Whoever speaks for a member that died after that may decide the end round, too."""
    store.write("1/outcome", dump(Outcome(completed=True)))
    store.write("1/next", dump(Decision(removed=(0, 2))))
    assert do(store, joining.await_slot(waiting(store), TICKET, never, lambda membership: None)) is None


def test_everybody_leaves(store: SimStore) -> None:
    store.write("0/next", dump(Decision(abort="loss is nan")))
    with pytest.raises(RestartAbort, match="loss is nan"):
        do(store, joining.await_slot(waiting(store), TICKET, always, lambda membership: None))


def test_everybody_left_before_it_began() -> None:
    """A broken value, say: the reason reaches those that come later."""
    store = SimStore()
    do(store, verbs.give_up(JOINING, "a broken value"))
    with pytest.raises(RestartAbort, match="a broken value"):
        do(store, joining.register(TICKET))


def test_a_verdict_without_a_roster_is_none_of_ours() -> None:
    store = SimStore()
    store.write("-1/next", "{}")
    with pytest.raises(BadMessage, match="'-1/next': there is no 'roster'"):
        do(store, joining.register(TICKET))


def test_everybody_is_dead(store: SimStore) -> None:
    store.write("0/next", dump(Decision(removed=(0, 1, 2))))
    with pytest.raises(RestartError, match="nobody left to join"):
        do(store, joining.await_slot(waiting(store), TICKET, always, lambda membership: None))


def test_only_a_ticket_that_is_written_counts(store: SimStore) -> None:
    """Its owner died after it was counted; the next one is found all the same."""
    do(store, verbs.take_ticket(TICKET), 2)
    assert store.data["ticket#"] == b"1" and "ticket/1" not in store.data
    waiting(store)
    assert end_round(store).joined == ((J + 2, 1),)


def test_a_ticket_that_is_returned_does_not_count(store: SimStore) -> None:
    membership = waiting(store)
    do(store, verbs.return_ticket(membership.member))
    assert end_round(store).joined == ()


def test_a_ticket_that_is_returned_does_not_count_for_rank_0_either(store: SimStore) -> None:
    """A closed ticket names slot 0, which is free here."""
    do(store, verbs.return_ticket(waiting(store).member))
    do(store, verbs.end_round(Membership(2, (2,), 1, 0, 1), verbs.alive(Membership(2, (2,), 1, 0, 1))))
    assert load_decision(store.data["1/next"], "next").joined == ()


def test_a_member_whose_ticket_is_still_there_is_not_let_in_again(store: SimStore) -> None:
    """It died before it could return it, or is slow, and another slot is free."""
    member = waiting(store).member
    for membership in (
        Membership(0, (0, member), 1, 0, 3),
        Membership(member, (0, member), 1, 1, 3, slots={member: 1}),
    ):
        do(store, verbs.end_round(membership, verbs.alive(membership)))
    assert load_decision(store.data["1/next"], "next").joined == ()


def test_a_ticket_of_another_version_waits_on(store: SimStore) -> None:
    """It must not end the job."""
    waiting(store)
    store.write("ticket/1", '{"slot":1,"world_size":3,"colour":"red"}')
    assert not end_round(store).abort


def test_a_job_of_another_version_is_an_error_for_who_joins(store: SimStore) -> None:
    store.write("roster", '{"members":[[0,2]],"colour":"red"}')
    with pytest.raises(BadMessage, match=r"'roster'.*another version of the library"):
        waiting(store)
    assert "1/outcome" not in store.data


def test_who_was_let_in_is_not_let_in_again(store: SimStore) -> None:
    """It died before it could return its ticket; whoever speaks for it does that first."""
    membership = waiting(store)
    decision = end_round(store)
    member = membership.member
    roster = (0, 2, member)
    for each in survivors(2):
        each.apply(decision)
        each.iteration, each.roster = 2, roster
        do(store, verbs.end_round(each, verbs.alive(each)))
    mine = Membership(0, roster, 2, slots={member: 1})
    verb = watching.report_death(mine, member, DIED, "monitor")
    with pytest.raises(StopIteration):
        answer = None
        while True:
            op = verb.send(answer)
            answer = store.data[op.key] if isinstance(op, Wait) else store.execute(op)
    assert load_ticket(store.data["ticket/1"], "ticket").closed
    after = load_decision(store.data["2/next"], "next")
    assert (after.removed, after.joined) == ((member,), ())


def test_the_monitor_of_one_that_died_while_it_waited(store: SimStore) -> None:
    """It returns the ticket, and looks whether a round that was being decided has let it in."""
    membership = waiting(store)
    assert do(store, joining.stand_down(do(store, joining.follow(membership.member)))) is False
    assert load_ticket(store.data["ticket/1"], "ticket").closed


def test_the_monitor_of_one_that_was_let_in_when_it_died(store: SimStore) -> None:
    membership = waiting(store)
    end_round(store)
    found = do(store, joining.follow(membership.member))
    assert do(store, joining.stand_down(found)) is True
    assert found.included and found.iteration == 2


@pytest.mark.parametrize(
    ("entry", "founder"), [(JoinMode.FOUND, "taken"), (JoinMode.REPLACE, False), (JoinMode.GROW, False)], ids=str
)
def test_the_job_has_not_begun(entry: JoinMode, founder: object) -> None:
    """Somebody is there with this rank: an error, unless the launcher says that this process comes later."""
    store = SimStore()
    do(store, verbs.join(Membership.founder(1, range(3), 3), "b"))
    verb = verbs.join(Membership.founder(1, range(3), 3), "c", entry)
    if founder == "taken":
        with pytest.raises(OptionError, match="RANK=1 is taken"):
            do(store, verb)
    else:
        assert do(store, verb) is founder
    assert store.data["-1/end#"] == b"1"


def test_one_that_replaces_a_founder_that_never_came_is_that_founder() -> None:
    store = SimStore()
    assert do(store, verbs.join(Membership.founder(1, range(3), 3), "c", JoinMode.REPLACE)) is True


def test_a_founder_that_joins_again_after_it_lost_its_connection(store: SimStore) -> None:
    assert do(store, verbs.join(Membership.founder(2, range(3), 3), "c")) is True
    assert do(store, verbs.join(Membership.founder(2, range(3), 3), "x", JoinMode.EITHER)) is False


@pytest.mark.parametrize("rank", [1, 5])
def test_a_process_of_another_job_finds_one_that_has_begun(store: SimStore, rank: int) -> None:
    """It takes no ticket and writes nothing."""
    before = dict(store.data)
    with pytest.raises(OptionError, match=f"RANK={rank}, has no part. REMEDY"):
        do(store, verbs.join(Membership.founder(rank, range(6), 6), "x", remedy="REMEDY"))
    assert store.data == before


def test_a_founder_that_was_declared_dead_before_it_came_may_join() -> None:
    """It has not run the function, so nothing of it has to be feared."""
    store = SimStore()
    record = InterruptionRecord(0, Interruption.UNRESPONSIVE)
    do(store, verbs.act_on_behalf_of_dead(JOINING, (0, 1), 0, record, "monitor"))
    do(store, verbs.join(Membership.founder(1, (0, 1), 2), "b"))
    assert do(store, verbs.join(Membership.founder(0, (0, 1), 2), "a", JoinMode.EITHER)) is False
    assert waiting(store, Ticket(0, 2)).roster == (1,)


def test_it_has_caught_up_before_it_has_a_ticket(store: SimStore) -> None:
    """It used to walk along the verdicts afterwards. When the roster was noted meanwhile, with itself in it, it went on
    from there, and the others waited in vain for the one that they had let in."""
    keys, verb = [], joining.register(TICKET)
    with pytest.raises(StopIteration) as end:
        answer = None
        while True:
            op = verb.send(answer)
            keys.append(op.key)
            answer = store.data.get(op.key) if isinstance(op, Wait) else store.execute(op)
    assert keys[-6:] == ["roster", "1/outcome", "1/next", "ticket#", "ticket#", "ticket/1"]
    assert (end.value.value.member, end.value.value.iteration) == (J + 1, 1)


@pytest.mark.parametrize("stays", [True, False], ids=["it is a member", "it was one"])
def test_one_that_was_let_in_while_it_stood_still(store: SimStore, stays: bool) -> None:
    """For many iterations. It used to wait for ever, or until the job was over, as if it had not been let in."""
    membership = waiting(store)
    if not stays:
        do(store, verbs.return_ticket(membership.member))
    late = Membership(0, (0, 2, membership.member) if stays else (0, 2), 40, slots={membership.member: 1})
    store.write("roster", dump(late.note(40)))
    with pytest.raises(Fenced, match="c stood still or was cut off while the others let it in"):
        do(store, joining.await_slot(membership, TICKET, always, lambda membership: None))


def test_one_that_waits_stands_still(store: SimStore) -> None:
    """It goes on from where the job is."""
    membership = waiting(store)
    store.write("roster", dump(Membership(0, (0, 2), 40).note(40)))
    verb = joining.await_slot(membership, TICKET, never, lambda membership: None)
    assert waits_for(store, verb) == "40/outcome"


def test_a_process_of_a_larger_job_that_comes_too_early(store: SimStore) -> None:
    """It is told so, and nobody else is."""
    late = Membership.founder(4, range(5), 5)
    with pytest.raises(RestartError, match="RANK=4 of WORLD_SIZE=5: a smaller job began"):
        do(store, verbs.refuse_stranger(late))


@pytest.mark.parametrize(("me", "speaks"), [("b", True), ("x", False)])
def test_one_that_died_before_it_said_who_it_is(store: SimStore, me: str, speaks: bool) -> None:
    """Its monitor speaks for it only where it is the founder; the rank may be another process's."""
    store.data.pop("0/outcome"), store.data.pop("0/next")
    verb = joining.act_on_behalf_of_unknown(
        Membership.founder(1, range(3), 3), me, DIED, "monitor", lambda member: None
    )
    if speaks:
        assert waits_for(store, verb) == "0/next"
        assert store.data["0/end/1"] == dump(Arrival(ArrivalKind.DEAD, by="monitor", slot=1)).encode()
    else:
        do(store, verb)
        assert "0/outcome" not in store.data and "gone/1" not in store.data


def test_one_that_died_with_a_ticket_before_it_said_so(store: SimStore) -> None:
    waiting(store)
    found: list[int] = []
    do(store, joining.act_on_behalf_of_unknown(Membership.founder(1, range(3), 3), "c", DIED, "monitor", found.append))
    assert found == [J + 1]
    assert load_ticket(store.data["ticket/1"], "ticket").closed
    assert "gone/1" not in store.data


def counted(store: SimStore, verb: Any) -> tuple[int, Any]:
    """How many operations a verb takes, and its result."""
    answer, count = None, 0
    while True:
        try:
            op = verb.send(answer)
        except StopIteration as end:
            return count, end.value
        count, answer = count + 1, store.execute(op)


@pytest.mark.parametrize("dead", [(1,), (500,), (1000,), (1, 2, 3), (7, 999)])
def test_tickets_that_were_counted_and_never_written(store: SimStore, dead: tuple[int, ...]) -> None:
    """Their processes died in between. They are searched once, by halves; later rounds take three operations again."""
    for number in range(1, 1001):
        steps = 2 if number in dead else None  # it has looked at the counter, and counted
        do(store, verbs.take_ticket(Ticket(0, 3, by=str(number))), steps)
    assert store.data[verbs.TICKETS_KEY] == b"1000" and all(f"ticket/{number}" not in store.data for number in dead)
    first, found = counted(store, verbs.waiting(range(3)))
    assert first <= 3 + 22 * len(dead)
    assert found.keys() == {J + number for number in range(1, 1001) if number not in dead}
    assert counted(store, verbs.waiting(range(3))) == (3, found)


def test_a_ticket_that_is_written_late(store: SimStore) -> None:
    """It was taken for that of a dead process: it counts nevertheless."""
    taking = verbs.take_ticket(TICKET)
    for answer in (None, store.data.get(verbs.TICKETS_KEY), 1):
        op = taking.send(answer)
        if answer != 1:
            store.execute(op)
    assert do(store, verbs.waiting(range(3))) == {}
    store.execute(op)
    assert do(store, verbs.waiting(range(3))) == {J + 1: TICKET}


def test_a_dead_founder_needs_the_store_no_more(store: SimStore) -> None:
    """Its monitor says so, also where the others have gone on without it: whoever serves the store waits for that."""
    do(store, joining.act_on_behalf_of(Membership.founder(1, (0, 2), 3), DIED, "its monitor"))
    assert "gone/1" in store.data
