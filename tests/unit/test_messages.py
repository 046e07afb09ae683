"""Messages: what is dumped loads again as it was, and everything else is refused with the key's name."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.attribution import Interruption, InterruptionRecord
from inprocess.protocol import messages
from inprocess.protocol.messages import Arrival, BadMessage, Decision, Kind, Outcome, Start

numbers = st.integers(0, messages.MAX_RANKS - 1)
optional = st.none() | numbers
records = st.builds(
    InterruptionRecord,
    rank=numbers,
    interruption=st.sampled_from(Interruption),
    initial_rank=optional,
    message=st.text(max_size=40),
    where=st.text(max_size=40),
)
arrivals = st.builds(
    Arrival,
    kind=st.sampled_from(Kind),
    rank=optional,
    world_size=optional,
    active_world_size=optional,
    active_rank=optional,
    by=st.text(max_size=20),
)
decisions = st.builds(
    Decision,
    removed=st.lists(numbers, max_size=5).map(tuple),
    terminated=st.lists(numbers, max_size=5).map(tuple),
    records=st.lists(records, max_size=3).map(tuple),
    record_count=numbers,
    abort=st.text(max_size=20),
)
LOADERS = (
    messages.load_arrival,
    messages.load_start,
    messages.load_outcome,
    messages.load_decision,
    messages.load_record,
)


@given(arrivals)
def test_arrival(arrival: Arrival) -> None:
    assert messages.load_arrival(messages.dump(arrival), "key") == arrival


@given(st.builds(Start, st.booleans(), numbers))
def test_start(start: Start) -> None:
    assert messages.load_start(messages.dump(start).encode(), "key") == start


@given(st.builds(Outcome, st.booleans(), st.none() | records, st.lists(numbers, max_size=4).map(tuple)))
def test_outcome(outcome: Outcome) -> None:
    assert messages.load_outcome(messages.dump(outcome), "key") == outcome


@given(decisions)
def test_decision(decision: Decision) -> None:
    assert messages.load_decision(messages.dump(decision), "key") == decision


@given(records)
def test_record(record: InterruptionRecord) -> None:
    assert messages.load_record(messages.dump(record), "key") == record


def test_small_on_the_wire() -> None:
    """What is absent is not sent."""
    assert messages.dump(Arrival(Kind.ALIVE)) == '{"kind":"alive"}'


@pytest.mark.parametrize(
    ("load", "raw", "says"),
    [
        (messages.load_arrival, b"", "not hold JSON"),
        (messages.load_arrival, b"\xff\x00", "not hold JSON"),
        (messages.load_arrival, "[1]", "JSON object"),
        (messages.load_arrival, "[" * 100_000, "not hold JSON"),
        (messages.load_arrival, '{"kind":"here"}', "unknown arrival kind 'here'"),
        (messages.load_arrival, '{"kind":"rank","rank":-1}', "'rank' is not a number"),
        (messages.load_arrival, '{"kind":"rank","rank":true}', "'rank' is not a number"),
        (messages.load_arrival, '{"kind":"rank","rank":1e9}', "'rank' is not a number"),
        (messages.load_arrival, '{"kind":"rank","by":7}', "'by' is not text"),
        (messages.load_start, '{"go":1}', "'go' is neither true nor false"),
        (messages.load_outcome, '{"completed":null}', "'completed' is neither true nor false"),
        (messages.load_outcome, '{"completed":false,"cause":{}}', "no field 'rank'"),
        (messages.load_decision, '{"removed":"0"}', "'removed' is not a list of numbers"),
        (messages.load_decision, '{"removed":[0,null]}', "'removed' is not a list of numbers"),
        (messages.load_decision, '{"records":7}', "'records' is not a list"),
        (messages.load_decision, json.dumps({"records": [{}] * 33}), "at most 32 records"),
    ],
)
def test_broken_values_are_refused(load: object, raw: bytes | str, says: str) -> None:
    with pytest.raises(BadMessage, match=says) as error:
        load(raw, "7/start/3")  # type: ignore[operator]
    assert "'7/start/3'" in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)
fields = st.dictionaries(
    st.sampled_from(("kind", "rank", "by", "go", "completed", "cause", "removed", "records", "abort", "interruption")),
    json_values,
)


@given(st.binary(max_size=30) | fields.map(lambda value: json.dumps(value).encode()), st.sampled_from(LOADERS))
def test_nothing_else_escapes(raw: bytes, load: object) -> None:
    """Whatever stands in the store, parsing answers a message or raises BadMessage."""
    with contextlib.suppress(BadMessage):
        load(raw, "key")  # type: ignore[operator]
