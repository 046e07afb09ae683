"""The rule of the same error again and again, as tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from inprocess.attribution import RETURNED, Interruption, InterruptionRecord
from inprocess.protocol.membership import Membership
from inprocess.protocol.messages import MAX_PAUSE_MS, Arrival, ArrivalKind, Decision, Ticket
from inprocess.protocol.repeats import ErrorStreak, Finding, find, hangs, pause, stood_at_once
from inprocess.protocol.rounds import decide_end
from inprocess.protocol.verbs.rounds import alive

A = InterruptionRecord(0, Interruption.EXCEPTION, message="NameError: x", where="train.py:7 in train", pings=3)
ECHO = InterruptionRecord(
    1, Interruption.EXCEPTION, message="RuntimeError: Connection closed by peer", where="c10d.py:9 in all_reduce"
)
DEATH = InterruptionRecord(1, Interruption.TERMINATED, message="killed by SIGKILL")
JOIN = InterruptionRecord(1, Interruption.JOINED)
REQUEST = InterruptionRecord(1, Interruption.REQUESTED, message="the loss is too high")
HANG = InterruptionRecord(1, Interruption.SOFT_TIMEOUT)
LINE = "train.py:12 in train"
LEFT = InterruptionRecord(1, Interruption.BASE_EXCEPTION, message="KeyboardInterrupt")


def other(**fields: object) -> InterruptionRecord:
    return dataclasses.replace(A, **fields)  # type: ignore[arg-type]


def after(*decisions: Decision) -> ErrorStreak:
    row = ErrorStreak()
    for decision in decisions:
        row = row.after(decision)
    return row


def said(repeats: int = 0, limit: int = 0, progressed: bool = False, ran: bool = False) -> Arrival:
    return Arrival(ArrivalKind.ALIVE, 0, 2, repeats=repeats, limit=limit, progressed=progressed, ran=ran)


@pytest.mark.parametrize(
    ("record", "count"),
    [
        (A, 3),
        (other(rank=5, initial_rank=6), 3),  # on any rank
        (other(message="NameError: y"), 3),  # the words may hold a number or an address
        (other(message="ValueError: x"), 1),
        (other(message="NameErrors: x"), 1),
        (other(where="train.py:8 in train"), 1),
        (other(pings=4), 1),
        (ECHO, 1),
    ],
    ids=["the same", "another rank", "other words", "type", "longer type", "line", "pings", "echo"],
)
def test_what_is_the_same_error(record: InterruptionRecord, count: int) -> None:
    row = after(Decision(records=(ECHO, A), record_count=2, repeats=2))
    assert row.count_with(record) == count


def test_the_first_error_is_none_that_came_before() -> None:
    assert ErrorStreak().count_with(A) == 1


def test_any_of_several_that_raised() -> None:
    row = after(Decision(records=(A, other(where="b.py:1 in f")), record_count=2, repeats=4))
    assert [row.count_with(A), row.count_with(other(where="b.py:1 in f"))] == [5, 5]


def test_only_the_one_before_counts() -> None:
    row = after(
        Decision(records=(A,), record_count=1, repeats=4),
        Decision(records=(other(pings=9),), record_count=1, repeats=1),
    )
    assert (row.count, row.count_with(A)) == (1, 1)


def test_an_echo_counts_where_there_is_nothing_else() -> None:
    """A network that fails at the same place again and again."""
    assert after(Decision(records=(ECHO,), record_count=1, repeats=1)).count_with(ECHO) == 2


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({}, 3),
        ({"message": "TypeError: train() takes 1 argument"}, 3),
        ({"message": "OSError: no file"}, 10),
        ({"message": "NameErrors: x"}, 10),
        ({"pings": 1}, 10),
    ],
    ids=["mistake", "another one", "passes perhaps", "longer type", "it ran"],
)
def test_a_mistake_before_anything_ran_is_tried_three_times(change: dict[str, object], limit: int) -> None:
    record = other(**{"pings": 0} | change)
    assert ErrorStreak().limit_with(record, 10) == limit
    assert ErrorStreak().limit_with(record, 2) == 2
    assert ErrorStreak(progressed=True).limit_with(record, 10) == 10


def test_the_end_after_a_mistake_names_the_remedy_that_helps() -> None:
    words = "NameError: " + "x" * 200 + " is not defined"
    tried = find([said(repeats=3, limit=3)], [other(message=words, pings=0)]).abort
    assert words in tried and "may come 3 times at most" in tried and "raise max_repeats" not in tried
    assert "raise max_repeats" in find([said(repeats=3, limit=3)], [A]).abort


@pytest.mark.parametrize(
    ("decision", "count", "same", "progressed"),
    [
        (Decision(records=(DEATH,), record_count=1), 4, 5, False),
        (Decision(records=(JOIN, A), record_count=2, joined=((1 << 20, 1),), slots=2), 4, 5, False),
        (Decision(records=(A,), record_count=1, progressed=True), 0, 1, True),
        (Decision(records=(DEATH,), record_count=1, progressed=True), 0, 1, True),
        (Decision(ran=True), 4, 5, True),
        (Decision(records=(A,), record_count=1, repeats=5, ran=True), 5, 6, True),
    ],
    ids=["death", "join", "progress", "progress, then a death", "known from others", "again"],
)
def test_what_a_verdict_makes_of_a_row(decision: Decision, count: int, same: int, progressed: bool) -> None:
    row = after(Decision(records=(A,), record_count=1, repeats=4), decision)
    assert (row.count, row.count_with(A), row.progressed) == (count, same, progressed)


def test_a_call_that_progressed_once_has_done_so_for_ever() -> None:
    row = after(Decision(progressed=True), *[Decision(records=(A,), record_count=1, repeats=n) for n in (1, 2)])
    assert row.progressed
    assert row.count == 2


@pytest.mark.parametrize(
    ("entries", "records", "found"),
    [
        ([said(), said(2)], [A], (2, 0, False, False)),
        ([said(3), said(1)], [A, ECHO], (3, 50, False, False)),
        ([said(3, ran=True), said()], [A], (3, 50, False, True)),
        ([said(3), said(progressed=True)], [A], (0, 0, True, False)),
        ([said(9), said()], [A, DEATH], (0, 0, False, False)),
        ([said(9), said()], [JOIN, A], (0, 0, False, False)),
        ([said(9), said()], [HANG, A], (0, 0, False, False)),
        ([said(9), said()], [LEFT, A], (0, 0, False, False)),
        ([said(9), said()], [REQUEST], (0, 0, False, False)),
        ([said(), said()], [], (0, 0, False, False)),
        ([said(), said()], [A], (0, 0, False, False)),  # max_repeats=None
        ([said(4, limit=3, ran=True)], [A], (4, MAX_PAUSE_MS, False, True)),
        ([], [], (0, 0, False, False)),
    ],
)
def test_an_end_round(entries: list[Arrival], records: list[InterruptionRecord], found: tuple[object, ...]) -> None:
    assert find(entries, records) == Finding(*found, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "records", "repeats"),
    [
        ({"waits": True}, [HANG, A], 9),
        ({"where": RETURNED}, [HANG, A], 9),
        ({"where": "train.py:7 in step"}, [HANG, A], 0),
        ({"waits": True}, [HANG, ECHO], 0),
        ({"waits": True}, [HANG, A, DEATH], 0),
        ({"waits": True}, [HANG], 0),
    ],
    ids=["all wait", "returned", "one hangs", "an echo", "a death", "no error"],
)
def test_a_standstill_that_an_error_explains(
    others: dict[str, Any], records: list[InterruptionRecord], repeats: int
) -> None:
    """A rank handled an error and waited for the others, which waited for it."""
    entries = [dataclasses.replace(said(9 if A in records else 0), waits=True), dataclasses.replace(said(), **others)]
    assert find(entries, records).repeats == repeats


def test_the_end_of_a_call_that_never_progressed() -> None:
    found = find([said(10, limit=10), said()], [A, ECHO])
    assert (found.repeats, found.ran) == (10, False)
    for part in (
        "10 times in a row",
        "max_repeats=10",
        "rank 0",
        "NameError: x",
        "train.py:7",
        "None",
        "Fix the error",
    ):
        assert part in found.abort
    assert "peer" not in found.abort


def test_progress_of_another_rank_in_the_last_iteration_counts() -> None:
    assert not find([said(10, limit=10), said(progressed=True)], [A]).abort
    assert not find([said(10, limit=10), said(ran=True)], [A]).abort


def test_nobody_joins_a_job_that_ends() -> None:
    arrivals = {0: dataclasses.replace(said(10, limit=10), rank=0, world_size=1)}
    assert decide_end(arrivals, [A], 1).abort


@pytest.mark.parametrize(
    ("count", "milliseconds"),
    [(0, 0), (1, 0), (2, 0), (3, 50), (4, 100), (5, 200), (6, 400), (9, 3200), (10, 5000), (11, 5000), (9999, 5000)],
)
def test_pauses(count: int, milliseconds: int) -> None:
    assert pause(count) == milliseconds


@pytest.mark.parametrize(("repeats", "limit", "shown"), [(9, 10, 0), (10, 10, 10), (12, 10, 10), (99, None, 0)])
def test_a_member_says_when_its_limit_is_reached(repeats: int, limit: int | None, shown: int) -> None:
    entry = alive(Membership.founder(0, range(2), 2), repeats=repeats, limit=limit)
    assert (entry.repeats, entry.limit) == (repeats, shown)


def test_a_member_says_that_an_iteration_before_progressed() -> None:
    membership = Membership.founder(0, range(2), 2)
    assert not alive(membership).ran
    membership.apply(Decision(progressed=True))
    assert alive(membership).ran
    assert not alive(membership).progressed


# --- the same hang again and again


def hung(count: int = 1, where: str = LINE, **fields: Any) -> Arrival:
    return dataclasses.replace(said(), where=where, hangs=count, **fields)


RESERVE = dataclasses.replace(said(), waits=True)


@pytest.mark.parametrize(
    ("entries", "records", "count"),
    [
        ([hung(2), hung(2, "train.py:50 in step", waits=True)], [HANG], 2),
        ([hung(1), hung(2, waits=True)], [HANG], 1),  # who waits for another one counts nothing
        ([hung(3, waits=True), hung(1, waits=True)], [HANG, HANG], 3),  # where all wait, everybody does
        ([hung(2), hung(1, "train.py:50 in step")], [HANG], 2),
        ([hung(2), RESERVE], [HANG], 2),
        ([hung(2), hung(0, waits=True)], [HANG], 0),
        ([hung(2), dataclasses.replace(said(), where=RETURNED)], [HANG], 0),
        ([hung(2), said()], [HANG], 0),
        ([hung(2, progressed=True)], [HANG], 0),
        ([hung(2), hung(1, ran=True)], [HANG], 0),
        ([hung(2)], [HANG, A], 0),
        ([hung(2)], [HANG, DEATH], 0),
        ([hung(2)], [JOIN], 0),
        ([RESERVE], [HANG], 0),
        ([], [], 0),
    ],
    ids=[
        *("one hangs", "waits", "all wait", "two hang", "a reserve", "another one has pinged", "one has returned"),
        *("silent", "progress", "progress before", "an error", "a death", "no hang", "nobody", "nothing"),
    ],
)
def test_a_hang_that_counts(entries: list[Arrival], records: list[InterruptionRecord], count: int) -> None:
    assert hangs(entries, records) == count


def hang_of(count: int, *places: str, **fields: Any) -> Decision:
    stuck = tuple(dataclasses.replace(HANG, where=place) for place in places)
    return Decision(records=(HANG,), record_count=1, stuck=stuck, stuck_count=len(stuck), hangs=count, **fields)


@pytest.mark.parametrize(
    ("decisions", "count"),
    [
        ([hang_of(2, LINE)], 3),
        ([hang_of(2, "other.py:1 in f", LINE)], 3),
        ([hang_of(2, "other.py:1 in f")], 1),
        ([hang_of(2, LINE), Decision(records=(HANG,), record_count=1)], 1),
        ([hang_of(2, LINE), Decision(records=(DEATH,), record_count=1)], 1),
        ([hang_of(2, LINE), Decision(records=(A,), record_count=1, repeats=1)], 1),
        ([Decision(progressed=True), hang_of(2, LINE)], 0),
        ([hang_of(2, LINE), Decision(ran=True)], 0),
    ],
    ids=["the same", "one of two", "line", "a hang later on", "a death", "an error", "progress", "known from others"],
)
def test_what_is_the_same_hang(decisions: list[Decision], count: int) -> None:
    streak = after(*decisions)
    assert [streak.hangs_with(LINE), streak.hangs_with(LINE)] == [count, count], "to ask changes nothing"


def test_a_rank_that_returned_or_waits_in_the_library_does_not_hang() -> None:
    assert [ErrorStreak().hangs_with(where) for where in ("", RETURNED, LINE)] == [0, 0, 1]


def test_a_hang_leaves_the_count_of_errors_as_it_is() -> None:
    row = after(Decision(records=(A,), record_count=1, repeats=4), hang_of(1, LINE))
    assert (row.count_with(A), row.hangs_with(LINE)) == (5, 2)


@pytest.mark.parametrize(
    ("pings", "ran", "soft_timeout", "at_once"),
    [(0, 0.0, 60, True), (0, 30.0, 60, True), (0, 31.0, 3600, False), (0, 1.1, 2, False), (1, 0.0, 60, False)],
)
def test_a_rank_that_did_nothing_before_it_hung(pings: int, ran: float, soft_timeout: float, at_once: bool) -> None:
    """A training without ping() that hangs later on is none."""
    assert stood_at_once(pings, ran, soft_timeout) is at_once


def hang_ends(*entries: Arrival, tickets: dict[int, Ticket] | None = None) -> Decision:
    arrivals = {member: dataclasses.replace(each, rank=member) for member, each in enumerate(entries)}
    record = dataclasses.replace(HANG, message="no progress for 60 s (soft_timeout)")
    return decide_end(arrivals, [record], 1, tickets=tickets or {})


def test_the_third_hang_ends_the_job() -> None:
    assert not hang_ends(hung(2), hung(2, waits=True)).abort
    decision = hang_ends(hung(3), hung(3, waits=True))
    assert decision.hangs == 3
    for part in (
        "the same hang 3 times in a row before the first ping()",
        "no progress for 60 s (soft_timeout); rank 0 was at train.py:12 in train; 1 waited for others",
        *("raise soft_timeout", "call.section(", "max_repeats=None", "Progress is"),
    ):
        assert part in decision.abort


def test_where_the_roster_changes_the_job_tries_again() -> None:
    gone = Arrival(ArrivalKind.LEFT, 1, 2)
    found = hang_ends(hung(3), gone), hang_ends(hung(3), hung(3), tickets={1 << 20: Ticket(2, 3)})
    assert [(decision.hangs, decision.abort) for decision in found] == [(0, "")] * 2
    assert found[1].joined
