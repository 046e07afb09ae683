"""Messages: what is dumped loads again as it was, and everything else is refused with the key's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.attribution import one_line
from inprocess.protocol import messages, parsing
from inprocess.protocol.messages import Arrival, ArrivalKind, BadMessage, Decision
from inprocess.system.strict_json import MAX_LENGTH

from . import hostile
from .hostile import KINDS, fuzz


@pytest.mark.parametrize("kind", KINDS)
@fuzz
@given(st.data())
def test_what_is_dumped_loads_again(kind: str, data: st.DataObject) -> None:
    load, good = KINDS[kind]
    message = data.draw(good)
    assert load(messages.dump(message), "key") == message
    assert load(messages.dump(message).encode(), "key") == message


def test_small_on_the_wire() -> None:
    """What is absent is not sent."""
    assert messages.dump(Arrival(ArrivalKind.DEAD)) == '{"kind":"dead"}'
    longest = Arrival(ArrivalKind.ALIVE, 9, 10, where="x" * 10_000, waits=True)
    assert len(messages.dump(longest)) < 1024


@pytest.mark.parametrize(
    ("load", "raw", "says"),
    [
        (parsing.load_arrival, b"", "not hold JSON"),
        (parsing.load_arrival, b"\xff\x00", "not hold JSON"),
        (parsing.load_arrival, "[1]", "JSON object"),
        (parsing.load_arrival, "[" * 100_000, "not hold JSON"),
        (parsing.load_arrival, '{"kind":"here"}', "unknown arrival kind 'here'"),
        (parsing.load_arrival, '{"kind":"rank","rank":-1}', "'rank' is not a number"),
        (parsing.load_arrival, '{"kind":"rank","rank":true}', "'rank' is not a number"),
        (parsing.load_arrival, '{"kind":"rank","rank":1e9}', "'rank' is not a number"),
        (parsing.load_arrival, '{"kind":"rank","by":7}', "'by' is not text"),
        (parsing.load_arrival, '{"kind":"rank","rank":2,"world_size":2}', "do not fit"),
        (parsing.load_arrival, '{"kind":"alive"}', "do not fit"),
        (parsing.load_arrival, '{"kind":"alive","rank":0,"waits":1,"world_size":1}', "'waits' is neither true nor"),
        (parsing.load_arrival, '{"kind":"alive","rank":0,"where":[],"world_size":1}', "'where' is not text"),
        (parsing.load_arrival, '{"kind":"dead","where":"a.py:1 in f"}', "do not fit"),
        (parsing.load_decision, '{"stuck":{}}', "'stuck' is not a list of at most 8"),
        (parsing.load_decision, '{"stuck":[{"interruption":"terminated","rank":0}]}', "'stuck_count' is less than"),
        (parsing.load_decision, json.dumps({"stuck": [{}] * 9, "stuck_count": 9}), "list of at most 8"),
        (parsing.load_decision, '{"waiting":-1}', "'waiting' is not a number"),
        (parsing.load_arrival, '{"kind":"alive","rank":2,"world_size":2}', "do not fit"),
        (parsing.load_arrival, '{"kind":"dead","rank":2}', "do not fit"),
        (parsing.load_arrival, '{"active_world_size":3,"kind":"rank","rank":0,"world_size":2}', "do not fit"),
        (
            parsing.load_arrival,
            '{"active_rank":1,"active_world_size":1,"kind":"rank","rank":0,"world_size":2}',
            "do not fit",
        ),
        (parsing.load_arrival, '{"kind":"dead","kind":"alive"}', "a name appears twice"),
        (parsing.load_arrival, '{"kind":"dead","more":1}', "Arrival has no such field: 'more'"),
        (parsing.load_arrival, '{"kind":"dead","rank":NaN}', "NaN is no number"),
        (parsing.load_arrival, '{"kind":"dead"}'.encode("utf-16"), "not hold JSON"),
        (parsing.load_arrival, '{"kind":' + "[" * 200 + "]" * 200 + "}", "nested deeper"),
        (parsing.load_arrival, b" " * MAX_LENGTH + b"{}", f"{MAX_LENGTH + 2} bytes are more than {MAX_LENGTH}"),
        (parsing.load_arrival, '{"kind":"alive","limit":3,"rank":0,"repeats":2,"world_size":1}', "'limit' do not fit"),
        (parsing.load_arrival, '{"kind":"alive","rank":0,"repeats":-1,"world_size":1}', "'repeats' is not a number"),
        (parsing.load_arrival, '{"hangs":1,"kind":"alive","rank":0,"world_size":1}', "'hangs' and 'where' do not fit"),
        (parsing.load_arrival, '{"kind":"alive","progressed":1,"rank":0,"world_size":1}', "neither true nor false"),
        (parsing.load_arrival, '{"kind":"alive","ran":"","rank":0,"world_size":1}', "neither true nor false"),
        (parsing.load_decision, '{"pause":5001}', "longer than 5000 ms"),
        (parsing.load_decision, '{"pause":0.5}', "'pause' is not a number"),
        (parsing.load_decision, '{"repeats":"3"}', "'repeats' is not a number"),
        (parsing.load_decision, '{"ran":1}', "neither true nor false"),
        (
            parsing.load_outcome,
            '{"cause":{"interruption":"exception","pings":99999999999999999999,"rank":0},"completed":false}',
            "pings",
        ),
        (parsing.load_roster, '{"members":[[1,0]]}', "a range that is empty"),
        (parsing.load_roster, '{"members":[[0,2],[2,3]]}', "ranges that overlap"),
        (parsing.load_roster, '{"members":[[0,16777000]]}', "more than 1048576 members"),
        (parsing.load_roster, '{"members":[[0,1,2]]}', "not a list of pairs"),
        (parsing.load_ticket, '{"slot":1}', "Ticket has no 'world_size'"),
        (parsing.load_ticket, '{"slot":2,"world_size":2}', "'slot' and 'world_size' are not"),
        (parsing.load_vote, '{"iteration":1}', "Vote has no 'slot'"),
        (parsing.load_vote, '{"slot":-1}', "'slot' is not a number"),
        (parsing.load_vote, '{"members":[[3,2]],"slot":1}', "a range that is empty"),
        (parsing.load_verdict, '{"outcome":"stop"}', "unknown outcome 'stop'"),
        (parsing.load_verdict, '{"outcome":"go","slots":[[0,1]]}', "do not fit"),
        (parsing.load_verdict, '{"outcome":"go","port":29500}', "do not fit"),
        (parsing.load_verdict, '{"outcome":"go","slots":[[0,1]],"port":65536}', "do not fit"),
        (parsing.load_verdict, '{"outcome":"refused","slots":[[0,1]],"port":29500}', "do not fit"),
        (parsing.load_verdict, '{"outcome":"refused","reason":7}', "'reason' is not text"),
        (parsing.load_decision, '{"fresh":[0],"joined":[[0,0]],"slots":1}', "do not fit"),
        (parsing.load_decision, '{"fresh":[1],"joined":[[1048577,1]],"slots":1}', "do not fit"),
        (parsing.load_decision, '{"joined":[[1048577,0]],"slots":1}', "do not fit"),
        (parsing.load_decision, '{"fresh":[0],"joined":[[1048577,0],[1048578,0]],"slots":1}', "do not fit"),
        (parsing.load_decision, '{"fresh":[0],"joined":[[1048577,0]],"slots":1,"terminated":[0]}', "do not fit"),
        (parsing.load_decision, '{"slots":1}', "do not fit"),
        (parsing.load_decision, '{"abort":"x","fresh":[0],"joined":[[1048577,0]],"slots":1}', "do not fit"),
        (parsing.load_roster, '{"iteration":-1}', "'iteration' is not a number"),
        (parsing.load_roster, '{"joined":[[2,1],[1,1]]}', "'joined' is not a list of pairs of numbers that ascend"),
        (parsing.load_start, '{"go":false,"active_world_size":1}', "do not fit"),
        (parsing.load_outcome, '{"completed":false}', "do not fit"),
        (parsing.load_outcome, '{"cause":{"interruption":"terminated","rank":0},"completed":true}', "do not fit"),
        (parsing.load_outcome, '{"cause":{"interruption":"terminated","rank":99999999},"completed":false}', "below"),
        (parsing.load_decision, '{"removed":[1,1]}', "'removed' is not a list of numbers that ascend"),
        (parsing.load_decision, '{"terminated":[-1]}', "'terminated' is not a list"),
        (
            parsing.load_decision,
            '{"record_count":0,"records":[{"interruption":"terminated","rank":0}]}',
            "is less than the number",
        ),
        (parsing.load_start, '{"go":1}', "'go' is neither true nor false"),
        (parsing.load_outcome, '{"completed":null}', "'completed' is neither true nor false"),
        (parsing.load_outcome, '{"completed":false,"cause":{}}', "no field 'rank'"),
        (parsing.load_decision, '{"removed":"0"}', "'removed' is not a list of numbers"),
        (parsing.load_decision, '{"removed":[0,null]}', "'removed' is not a list of numbers"),
        (parsing.load_decision, '{"records":7}', "'records' is not a list"),
        (parsing.load_decision, json.dumps({"records": [{}] * 33}), "at most 32 records"),
    ],
)
def test_broken_values_are_refused(load: object, raw: bytes | str, says: str) -> None:
    with pytest.raises(BadMessage, match=says) as error:
        load(raw, "7/start/3")  # type: ignore[operator]
    assert "'7/start/3'" in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@fuzz
@given(st.data())
def test_nothing_else_escapes(kind: str, data: st.DataObject) -> None:
    """Whatever stands in the store, parsing answers a message or raises BadMessage that names the key, on one line."""
    load, good = KINDS[kind]
    dumped = good.map(lambda message: messages.dump(message).encode())
    raw = data.draw(hostile.anything | hostile.damaged(dumped) | hostile.altered(dumped))
    try:
        message = load(raw, "7/x")
    except BadMessage as error:
        assert str(error).startswith("store key '7/x'") and len(str(error)) < 500 and str(error).isprintable()
    else:
        assert load(messages.dump(message), "key") == message


@fuzz
@given(hostile.anything | hostile.damaged(st.integers(0, 10**20).map(lambda number: str(number).encode())))
def test_counters(raw: bytes) -> None:
    try:
        number = parsing.load_count(raw, "7/done#")
    except BadMessage as error:
        assert "'7/done#'" in str(error) and len(str(error)) < 500
    else:
        assert raw == str(number).encode() or raw.lstrip(b"0") == str(number).encode().lstrip(b"0")
        assert 0 <= number <= messages.MAX_COUNT


@pytest.mark.parametrize(("raw", "number"), [(None, 0), (b"0", 0), (b"17", 17), (3, 3)])
def test_counters_of_ours(raw: Any, number: int) -> None:
    assert parsing.load_count(raw, "key") == number


@pytest.mark.parametrize(
    "address", ["-", "@:29500", "10.0.0.1:1", "fe80::1%eth0:65535", "node-3.cluster_a.local:40000"]
)
def test_addresses(address: str) -> None:
    assert parsing.load_address(address.encode(), "key") == address


good_addresses = st.builds(lambda host, port: f"{host}:{port}".encode(), st.text("a1.-", min_size=1), st.integers())


@fuzz
@given(hostile.anything | hostile.damaged(good_addresses))
def test_other_addresses(raw: bytes) -> None:
    try:
        address = parsing.load_address(raw, "7/rendezvous")
    except BadMessage as error:
        assert "'7/rendezvous'" in str(error) and len(str(error)) < 500
    else:
        host, _, port = address.rpartition(":")
        assert address == "-" or (host.isprintable() and len(host) < 300 and 0 < int(port) < 65536)


def test_an_address_that_is_too_long_is_not_cut_off() -> None:
    """What is left of it would be another address."""
    longest = f"{'a' * (parsing.ADDRESS_LIMIT - 3)}:29"
    assert parsing.load_address(longest.encode(), "key") == longest
    with pytest.raises(BadMessage, match="neither host:port"):
        parsing.load_address(f"{longest}5".encode(), "key")


def test_doors() -> None:
    assert parsing.load_door(b"s3-_cret@10.0.0.1:29500", "key") == ("s3-_cret", "10.0.0.1", 29500)
    assert parsing.load_door(b"0123@@:1", "key") == ("0123", "@", 1)
    assert parsing.load_door(b"0123@fe80::1%eth0:65535", "key") == ("0123", "fe80::1%eth0", 65535)


@pytest.mark.parametrize("raw", [b"10.0.0.1:29500", b"@10.0.0.1:29500", b"0123@:29500", b"-"])
def test_a_door_has_a_secret_and_a_host(raw: bytes) -> None:
    with pytest.raises(BadMessage, match="not secret@host:port"):
        parsing.load_door(raw, "key")


@fuzz
@given(hostile.anything | hostile.damaged(good_addresses.map(lambda address: b"0123@" + address)))
def test_other_doors(raw: bytes) -> None:
    try:
        secret, host, port = parsing.load_door(raw, "live/0/1")
    except BadMessage as error:
        assert "'live/0/1'" in str(error) and len(str(error)) < 500
    else:
        assert secret and host.isprintable() and len(host) < 300 and 0 < port < 65536


@fuzz
@given(hostile.anything | st.text().map(str.encode))
def test_reasons_are_shown_as_they_are_but_harmless(raw: bytes) -> None:
    reason = parsing.load_reason(raw)
    assert reason and reason.isprintable() and len(reason) <= messages.REASON_LIMIT
    assert parsing.load_decision(messages.dump(Decision(abort=reason)), "key").abort == reason


def test_no_reason() -> None:
    assert parsing.load_reason(None) == ""


@fuzz
@given(st.text(), st.integers(3, 50))
def test_one_line_is_harmless_to_a_terminal_and_a_log(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert line.isprintable() and len(line) <= limit
    assert one_line(line, limit) == line


def test_one_line_keeps_what_people_write() -> None:
    assert one_line("größer\nals\t☃") == "größer als ☃"
    assert one_line("a\x1b[31mred\u202e\ud800") == r"a\x1b[31mred\u202e\ud800"
