"""Who is overdue, second by second, and what is learned from durations. Nothing here waits."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.exception import OptionError
from inprocess.learned import LearnedTimeouts
from inprocess.monitor import learned, timeouts
from inprocess.monitor.timeouts import (
    LEARNED_FIRST,
    LEARNED_OUTSIDE,
    LEARNED_PING,
    LEARNED_SECTION,
    MAX_NAME_LENGTH,
    MAX_SECTIONS,
    Limits,
    Observed,
    Overdue,
    Seen,
    decide,
)

from . import hostile
from .hostile import fuzz

S = 1_000_000_000
LIMITS: dict[str, Any] = {"first_limit": 60 * S, "ping_limit": 45 * S, "outside_limit": 30 * S}
NONE: dict[str, Any] = {"first_limit": 0, "ping_limit": 0, "outside_limit": 0}
STARTED = Seen(began=100 * S, **LIMITS)
PINGED = dataclasses.replace(STARTED, used=True, ping=110 * S)
INSIDE = dataclasses.replace(PINGED, section="save", section_since=120 * S, section_limit=50 * S)
OUTSIDE = dataclasses.replace(STARTED, used=True, outside_since=130 * S)


def at(seconds: float, seen: Seen, awake_since: float = 0) -> str:
    """The option that is exceeded, or nothing."""
    found = decide(int(seconds * S), {3: seen}, int(awake_since * S))
    assert len(found) <= 1 and all(each.rank == 3 for each in found)
    return found[0].reason.rpartition("(")[2].rstrip(")") if found else ""


FIRST, PING = "initial_rank_heartbeat_timeout", "rank_heartbeat_timeout"
SECTION, OUT = "rank_section_timeouts", "rank_out_of_section_timeout"


@pytest.mark.parametrize(
    ("case", "seconds", "seen", "expected"),
    [
        ("just started", 159.9, STARTED, ""),
        ("never a sign of life", 160, STARTED, FIRST),
        ("never a sign of life, no limit", 1e6, dataclasses.replace(STARTED, **NONE), ""),
        ("pinged in time", 154.9, PINGED, ""),
        ("pinged too long ago", 155, PINGED, PING),
        ("pinged once, no limit", 1e6, dataclasses.replace(PINGED, **NONE), ""),
        ("a section's own limit, not the ping's", 169.9, INSIDE, ""),
        ("a section takes too long", 170, INSIDE, SECTION),
        ("in a section without a limit pings count", 155, dataclasses.replace(INSIDE, section_since=0), PING),
        ("in a section without a limit, no pings used", 1e6, dataclasses.replace(STARTED, used=True), ""),
        ("between two sections", 159.9, OUTSIDE, ""),
        ("too long between two sections", 160, OUTSIDE, OUT),
        ("between two sections, no limit", 1e6, dataclasses.replace(OUTSIDE, **NONE), ""),
        ("pings do not stand in for sections", 160, dataclasses.replace(OUTSIDE, ping=159 * S), OUT),
        ("an empty board", 1e6, Seen(began=0), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_overdue(case: str, seconds: float, seen: Seen, expected: str) -> None:
    assert at(seconds, seen) == expected, case


def test_a_learned_limit_is_reported_as_one() -> None:
    learned = dataclasses.replace
    assert at(160, learned(STARTED, origin=LEARNED_FIRST)) == f"learned, in place of {FIRST}"
    assert at(155, learned(PINGED, origin=LEARNED_PING)) == f"learned, in place of {PING}"
    assert at(160, learned(OUTSIDE, origin=LEARNED_OUTSIDE)) == f"learned, in place of {OUT}"
    assert at(170, learned(INSIDE, origin=LEARNED_SECTION)) == "learned limit of this section"
    assert at(170, learned(INSIDE, origin=LEARNED_PING)) == SECTION, "only the ping's was"


def test_no_silence_counts_in_which_the_launcher_itself_stood_still() -> None:
    assert at(1000, PINGED, awake_since=960) == ""
    assert at(1005, PINGED, awake_since=960) == PING


def test_each_worker_for_itself() -> None:
    found = decide(160 * S, {5: STARTED, 1: INSIDE, 2: PINGED})
    assert found == [
        Overdue(2, "no ping() for 45 s (rank_heartbeat_timeout)"),
        Overdue(5, "no ping() and no section within 60 s (initial_rank_heartbeat_timeout)"),
    ]
    assert decide(170 * S, {1: INSIDE}) == [Overdue(1, "in section 'save' for more than 50 s (rank_section_timeouts)")]


# --- what is learned


def test_limits_are_the_longest_times_the_factor() -> None:
    seen = Observed(first=100.0, heartbeat=2.0, sections={"save": (3, 20.0), "seldom": (2, 20.0)})
    limits = seen.limits(Limits(sections={"seldom": 7.0, "load": None}, out_of_section=9.0, safety_factor=3.0))
    assert limits.first == 300.0
    assert limits.heartbeat == 6.0
    assert limits.out_of_section == 9.0, "nothing was seen: as configured"
    assert limits.sections == {"save": 60.0, "seldom": 7.0, "load": None}
    assert Observed(heartbeat=0.1).limits(Limits()).heartbeat == 5.0, "never less than five seconds"


def test_what_was_longer_stays() -> None:
    one = Observed(first=1.0, heartbeat=5.0, sections={"a": (3, 1.0), "b": (1, 9.0)})
    two = Observed(first=2.0, out_of_section=4.0, sections={"a": (2, 8.0), "c": (1, 1.0)})
    both = Observed(2.0, 5.0, 4.0, {"a": (3, 8.0), "b": (1, 9.0), "c": (1, 1.0)})
    assert one.merge(two) == two.merge(one) == both


def test_names_that_are_made_up_anew_do_not_pile_up() -> None:
    seen = Observed(sections={str(number): (1, 1.0) for number in range(MAX_SECTIONS)})
    seen.section("another", 1.0)
    seen.section("7", 2.0)
    assert len(seen.sections) == MAX_SECTIONS and seen.times("7") == (2, 2.0)
    long = Observed()
    long.section("x" * 1000, 1.0)
    assert long.times("x" * 1000) == (1, 1.0) and len(next(iter(long.sections))) == MAX_NAME_LENGTH


def test_too_many_names_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of 10,000 sections was refused as none, on all ranks."""
    monkeypatch.setattr(timeouts, "MAX_SECTIONS", 4)
    ranks = [Observed(sections={f"shard {rank}.{i}": (1, 1.0) for i in range(3)}) for rank in range(3)]
    for times, rank in zip([(3, 1.0), (4, 9.0), (5, 2.0)], ranks, strict=True):
        rank.sections["step"] = times
    kept = {"shard 0.0": (1, 1.0), "shard 0.1": (1, 1.0), "shard 0.2": (1, 1.0), "step": (5, 9.0)}
    for order in itertools.permutations(ranks):
        assert order[0].merge(*order[1:]).sections == kept
    mine, again = LearnedTimeouts(), LearnedTimeouts()
    mine.agreed, mine.observed = ranks[0], ranks[1]
    mine.calculate()
    again.load_state_dict(mine.state_dict())
    assert again.agreed == mine.agreed and len(again.agreed.sections) == 4


def test_a_state_goes_through_json_and_back() -> None:
    first, again = LearnedTimeouts(), LearnedTimeouts()
    first.observed = Observed(1.5, 2.5, 3.5, {"save": (4, 6.0)})
    assert first.state_dict()["heartbeat"] == 0.0, "what was not agreed on is not saved"
    assert first.calculate() == {
        "first": 7.5,
        "heartbeat": 12.5,
        "out_of_section": 17.5,
        "sections": {"save": 30.0},
    }
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.limits() == first.limits()
    assert again.section_limit("save") == 30.0
    assert LearnedTimeouts().limits() == {"first": None, "heartbeat": None, "out_of_section": None, "sections": {}}


def test_loading_merges_and_tells_its_owner() -> None:
    told: list[int] = []
    mine = LearnedTimeouts(lambda: told.append(1))
    mine.load_state_dict({"version": 1, **Observed(heartbeat=9.0, first=1.0).to_json()})
    mine.load_state_dict({"version": 1, **Observed(heartbeat=2.0, first=3.0).to_json()})
    assert (mine.agreed.heartbeat, mine.agreed.first) == (9.0, 3.0)
    mine.observed.heartbeat = 11.0
    mine.calculate()
    assert mine.agreed.heartbeat == 11.0
    assert len(told) == 3


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"version": 2},
        {"version": 1},
        {"version": 1, **Observed().to_json(), "first": -1.0},
        {"version": 1, **Observed().to_json(), "first": float("nan")},
        {"version": 1, **Observed().to_json(), "first": True},
        {"version": 1, **Observed().to_json(), "sections": []},
        {"version": 1, **Observed().to_json(), "sections": {"a": 1}},
        {"version": 1, **Observed().to_json(), "sections": {"a": [1.5, 1.0]}},
        {"version": 1, **Observed().to_json(), "sections": {1: [1, 1.0]}},
    ],
)
def test_a_state_that_is_none(state: Any) -> None:
    mine = LearnedTimeouts()
    with pytest.raises(OptionError, match="no state of learned timeouts"):
        mine.load_state_dict(state)
    assert mine.agreed == Observed()


def test_limits_go_through_json_and_back() -> None:
    limits = Limits(1.0, None, 3.0, {"a": 5.0, "b": None}, 2.0)
    assert Limits.from_json(json.loads(json.dumps(limits.to_json()))) == limits


@pytest.mark.parametrize(
    ("config", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("cuda:gloo,cpu:gloo", "cpu")]
)
def test_where_a_group_takes_tensors(config: str, device: str) -> None:
    assert learned._device(config) == device


@fuzz
@given(st.dictionaries(st.sampled_from(["first", "heartbeat", "out_of_section", "sections"]), hostile.json_values))
def test_whatever_is_received(value: Any) -> None:
    for kind in (Limits, Observed):
        try:
            kind.from_json(value)
        except ValueError:
            continue
