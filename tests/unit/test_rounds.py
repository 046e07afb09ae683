"""A complete round and its verdict."""

from __future__ import annotations

import random

import pytest

from inprocess.attribution import RETURNED, Interruption, InterruptionRecord, standstill
from inprocess.protocol.messages import FIRST_JOINER as J
from inprocess.protocol.messages import MAX_RECORDS, MAX_STUCK, Arrival, ArrivalKind, Start, Ticket, dump
from inprocess.protocol.parsing import load_decision
from inprocess.protocol.rounds import MISSING, assign_slots, decide_end, decide_start


def took(text: str, size: int | None = None, active: int | None = None) -> dict[int, Arrival]:
    """A start round in one line: a number is an active rank, r a reserve, x dead, l left, d discarded."""
    words = text.split()
    size = len(words) if size is None else size
    active = sum(word.isdigit() for word in words) if active is None else active
    kinds = {"x": ArrivalKind.DEAD, "l": ArrivalKind.LEFT, "d": ArrivalKind.DISCARDED}
    arrivals = {}
    for member, word in enumerate(words):
        rank = int(word) if word.isdigit() else member
        numbers = (rank, size, active, rank if word.isdigit() else None)
        arrivals[member] = Arrival(kinds[word]) if word in kinds else Arrival(ArrivalKind.RANK, *numbers)
    return arrivals


@pytest.mark.parametrize(
    ("round_", "active"),
    [
        ("0", 1),
        ("0 1 2", 3),
        ("2 0 1", 3),
        ("0 1 r r", 2),
        ("0 1 r x", 2),
        ("0 1 x r", 2),
        ("0 1 d", 2),
        ("0 1 l d", 2),
        ("r r r", 0),  # they wait for processes that join
    ],
)
def test_go(round_: str, active: int) -> None:
    """All active ranks are there; it does not matter which reserves are."""
    assert decide_start(took(round_)) == (Start(True, active), "", False)


@pytest.mark.parametrize("round_", ["0 x", "x 1", "0 l 2", "x 1 r"])
def test_a_rank_is_missing(round_: str) -> None:
    """No start; another try makes sense."""
    assert decide_start(took(round_, active=3)) == (Start(False), MISSING, False)


@pytest.mark.parametrize("round_", ["r r x", "r l"])
def test_no_active_rank_is_left_and_one_is_missing(round_: str) -> None:
    """They do not begin to wait with a dead member on the roster: its slot would not be free."""
    assert decide_start(took(round_, active=0)) == (Start(False), MISSING, False)


@pytest.mark.parametrize("round_", ["x x", "d d", "l x"])
def test_nobody_took_a_rank(round_: str) -> None:
    start, reason, hopeless = decide_start(took(round_))
    assert (start.go, hopeless) == (False, False)
    assert reason


@pytest.mark.parametrize(
    "arrivals",
    [
        took("0 0"),
        took("0 2", active=2),
        took("1 2"),
        took("0 1", active=3),
        {**took("0 1"), 1: Arrival(ArrivalKind.RANK, 1, 3, 3, 1)},
        {**took("0 1"), 1: Arrival(ArrivalKind.RANK, 1, 3, 2, 1)},
        {**took("0 1"), 1: Arrival(ArrivalKind.RANK, 0, 2, 2, 1)},
    ],
    ids=["twice", "gap", "from one", "one short", "sizes differ", "world sizes differ", "ranks collide"],
)
def test_hopeless_assignment(arrivals: dict[int, Arrival]) -> None:
    """Everybody is there and it does not fit: the same would come out again, so everybody leaves."""
    start, reason, hopeless = decide_start(arrivals)
    assert (start.go, hopeless) == (False, True)
    assert "rank_assignment" in reason


def ended(text: str, size: int = 4) -> dict[int, Arrival]:
    """An end round in one line: a number is the frame rank of a live member, x dead, l left."""
    kinds = {"x": ArrivalKind.DEAD, "l": ArrivalKind.LEFT}
    return {
        member: Arrival(kinds[word]) if word in kinds else Arrival(ArrivalKind.ALIVE, int(word), size)
        for member, word in enumerate(text.split())
    }


@pytest.mark.parametrize(
    ("round_", "removed", "terminated"),
    [
        ("0 1 2 3", (), ()),
        ("0 x 2 3", (1,), (1,)),
        ("x l x 3", (0, 1, 2), (0, 1, 2)),
        ("1 0 x 2", (2,), (3,)),
        ("0 2", (), (1, 3)),
        ("x x", (0, 1), ()),
    ],
)
def test_next_roster(round_: str, removed: tuple[int, ...], terminated: tuple[int, ...]) -> None:
    """Removed are members; terminated are the ranks of the frame that no survivor has."""
    decision = decide_end(ended(round_), [], 0)
    assert (decision.removed, decision.terminated, decision.abort) == (removed, terminated, "")


def test_frames_that_differ_end_the_job() -> None:
    arrivals = {0: Arrival(ArrivalKind.ALIVE, 0, 4), 1: Arrival(ArrivalKind.ALIVE, 1, 3)}
    assert "disagree" in decide_end(arrivals, [], 0).abort
    assert decide_end(arrivals, [], 0, "first reason").abort == "first reason"


def test_records_are_capped_and_counted() -> None:
    record = InterruptionRecord(0, Interruption.EXCEPTION)
    decision = decide_end(ended("0 1 2 3"), [record] * 100, 100)
    assert (len(decision.records), decision.record_count) == (MAX_RECORDS, 100)


TICKETS = {J + 1: Ticket(1, 4), J + 2: Ticket(3, 4), J + 3: Ticket(3, 4), J + 4: Ticket(4, 5)}


def test_order_does_not_matter() -> None:
    """Whoever decides comes to the same verdict, so two deciders cannot disagree."""
    shuffle = random.Random(0)
    for round_ in ("0 x 2 3", "x l x 3"):
        items, tickets = list(ended(round_).items()), list(TICKETS.items())
        first = decide_end(dict(items), [], 0, tickets=dict(tickets))
        assert first.joined
        shuffle.shuffle(items)
        shuffle.shuffle(tickets)
        assert decide_end(dict(items), [], 0, tickets=dict(tickets)) == first


@pytest.mark.parametrize(
    ("taken", "tickets", "seats"),
    [
        ("0 2 3", "1/4", "1"),  # its own slot
        ("0 1 2 3", "1/4", "-"),  # none is free: it waits
        ("0 3", "3/4", "1"),  # its own is taken: the first free one
        ("0", "3/4 3/4", "3 1"),  # two for one slot: the first ticket wins, the second takes another
        ("0 1 2", "3/4 3/4", "3 -"),
        ("0 1", "0/2 1/2", "- -"),
        ("0 1", "2/3", "2"),  # the job grows
        ("0 1", "5/6 0/6", "5 2"),
        ("1 2", "3/4 0/4 1/4", "3 0 -"),  # everybody's own slot goes before a spare's
        ("", "0/1", "0"),
    ],
)
def test_who_gets_which_slot(taken: str, tickets: str, seats: str) -> None:
    """Tickets are RANK/WORLD_SIZE, in the order in which they were taken."""
    drawn = {J + n: Ticket(*map(int, word.split("/"))) for n, word in enumerate(tickets.split())}
    found = assign_slots(set(map(int, taken.split())), drawn)
    assert " ".join(str(found.get(member, "-")) for member in drawn) == seats


def test_who_joins_brings_everybody_back_to_its_slot() -> None:
    """0 1 2 3 without 1 ran as 0 1 2; now 3 dies as well, and one comes for 1."""
    frame = {0: (0, 0), 2: (1, 2)}
    arrivals = {member: Arrival(ArrivalKind.ALIVE, rank, 3, slot=slot) for member, (rank, slot) in frame.items()}
    decision = decide_end(arrivals | {3: Arrival(ArrivalKind.DEAD)}, [], 0, tickets={J: Ticket(1, 4)})
    assert (decision.removed, decision.joined, decision.slots) == ((3,), ((J, 1),), 3)
    assert (decision.terminated, decision.fresh) == ((), (1,))
    # a founder's slot is its id; the frame never gets smaller, so that old active ranks fit into it
    decision = decide_end(ended("0 1 x 2", size=6), [], 0, tickets={J: Ticket(2, 4)})
    assert (decision.slots, decision.terminated, decision.fresh) == (6, (4, 5), (2,))


def test_who_has_joined_is_fresh_until_an_iteration_starts() -> None:
    arrivals = ended("0 1") | {J: Arrival(ArrivalKind.ALIVE, 3, 4, slot=3, fresh=True)}
    decision = decide_end(arrivals, [], 0)
    assert (decision.fresh, decision.joined, decision.terminated) == ((3,), (), (2,))
    decision = decide_end(arrivals, [], 0, tickets={J + 1: Ticket(2, 4)})
    assert (decision.fresh, decision.joined, decision.terminated) == ((2, 3), ((J + 1, 2),), ())


def test_nobody_joins_a_job_that_ends() -> None:
    assert decide_end(ended("0 x"), [], 0, "the end", TICKETS).joined == ()


def at(rank: int, where: str, waits: bool = False, slot: int | None = None) -> Arrival:
    return Arrival(ArrivalKind.ALIVE, rank, 4, slot=rank if slot is None else slot, where=where, waits=waits)


SILENCE = InterruptionRecord(0, Interruption.SOFT_TIMEOUT, initial_rank=0, message="no progress for 3 s")
FAILED = InterruptionRecord(1, Interruption.EXCEPTION, initial_rank=1, message="ValueError: no")
KILLED = InterruptionRecord(2, Interruption.HARD_TIMEOUT, initial_rank=2)
FIRST = "/home/me/train.py:8 in first"
DEAD = Arrival(ArrivalKind.DEAD, slot=2)


@pytest.mark.parametrize(
    ("arrivals", "records", "says"),
    [
        (
            [at(0, FIRST, True), at(1, "", True), at(2, "loader.py:88 in next_batch"), at(3, FIRST, True)],
            [SILENCE],
            "rank 2 was at loader.py:88 in next_batch; 3 waited for others",
        ),
        (
            [at(0, FIRST, True), at(1, FIRST), at(2, FIRST, slot=5), at(3, "b.py:9 in g")],
            [SILENCE],
            "ranks 1, 2 (initial ranks 1, 5) were at train.py:8 in first, rank 3 was at b.py:9 in g; "
            "1 waited for others",
        ),
        (
            [at(0, FIRST, True), at(1, FIRST, True), DEAD, at(3, FIRST, True)],
            [SILENCE, KILLED],
            "rank 2 could not say where it was (did not answer and was killed); 3 waited for others",
        ),
        (
            [at(0, FIRST, True), at(1, "a.py:1 in f"), DEAD, at(3, "")],
            [SILENCE, KILLED],
            "rank 2 could not say where it was (did not answer and was killed), rank 3 could not say where it was, "
            "rank 1 was at a.py:1 in f; 1 waited for others",
        ),
        (
            [at(0, FIRST, True), at(1, "b.py:9 in g", True)],
            [SILENCE],
            "all 2 ranks waited for others: rank 0 was at train.py:8 in first, rank 1 was at b.py:9 in g",
        ),
        (
            [at(0, FIRST, True), at(1, RETURNED), at(2, FIRST, True), at(3, RETURNED)],
            [SILENCE],
            "ranks 1, 3 had returned from the function; 2 waited for others",
        ),
        (
            [at(0, FIRST, True), at(1, RETURNED), at(2, "b.py:9 in g")],
            [SILENCE],
            "rank 2 was at b.py:9 in g; 1 waited for others",
        ),
        (
            [at(0, FIRST, True), at(1, FIRST, True), at(2, "b.py:9 in g")],
            [SILENCE, FAILED],
            "rank 2 was at b.py:9 in g; 2 waited for others",
        ),
        ([at(0, FIRST, True), at(1, "b.py:9 in g", True), at(2, RETURNED)], [SILENCE, FAILED], ""),
        ([at(rank, f"a.py:{rank} in f") for rank in range(4)], [KILLED, SILENCE], ""),
    ],
    ids=[
        "one",
        "two at one place",
        "killed",
        "silent",
        "all wait",
        "returned",
        "one besides",
        "one besides an error",
        "an error explains it",
        "no soft timeout",
    ],
)
def test_who_hangs(arrivals: list[Arrival], records: list[InterruptionRecord], says: str) -> None:
    """Those that did not wait are named with their places; those that could not say come first."""
    decision = decide_end(dict(enumerate(arrivals)), records, len(records))
    if not says:
        assert (decision.stuck, decision.stuck_count) == ((), 0)
        return
    text = standstill(decision.records, decision.stuck, decision.stuck_count, decision.waiting)
    assert text == f"no progress for 3 s; {says}"


def test_many_hang() -> None:
    """The first eight are named, the rest is counted."""
    decision = decide_end({rank: at(rank, f"a.py:{rank} in f") for rank in range(4)}, [SILENCE], 1)
    assert len(decision.stuck) == decision.stuck_count == 4
    many = {rank: Arrival(ArrivalKind.ALIVE, rank, 16000, where=f"a.py:{rank} in f") for rank in range(16000)}
    decision = decide_end(many, [SILENCE], 1)
    assert (len(decision.stuck), decision.stuck_count) == (MAX_STUCK, 16000)
    assert load_decision(dump(decision), "next") == decision
    assert standstill(decision.records, decision.stuck, 16000, 0).endswith("rank 7 was at a.py:7 in f, 15992 more")
