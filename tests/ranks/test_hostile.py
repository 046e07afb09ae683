"""Somebody else writes into the store: a value for each kind of key. Everybody ends soon, with an error that names it.

In most tests the test plays torchrun's agent, so that it can write before anybody else does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from inprocess.protocol import verbs
from inprocess.stores import serving
from inprocess.stores import tcp as store
from tests.harness import At, Raise, Ranks, When
from tests.harness.child import Context
from tests.harness.launch import PATIENT
from tests.unit import hostile

from . import targets

#: of the first call, see Job.prefix
PREFIX = "inprocess/.0/1"
#: begins like a pickle, has a control sequence for terminals in it, and is no text
GARBAGE = b"\x80\x04\x95\x1b[31m not of ours"
Play = Callable[..., Ranks]


def plant(port: int, key: str, value: bytes) -> None:
    base = store.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))
    store.PrefixStore(PREFIX, base).set(key, value)


@pytest.fixture
def play(launch: Callable[..., Any]) -> Iterator[Play]:
    """Run two ranks over a store in which the key holds that value from the beginning."""
    servers: list[Any] = []

    def run(key: str, value: bytes, tickets: int = 0, **more: Any) -> Ranks:
        servers.append(serving.serve("127.0.0.1", 0))
        port = servers[-1].port
        plant(port, key, value)
        if tickets:
            plant(port, "ticket#", str(tickets).encode())
        agent = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        # no short timeout: they are told, they need not find out. But for the last words: for them the host of the
        # iterations' stores waits at most barrier_timeout
        last_words = key.startswith("gone")
        # nor does a rank that leaves kill a monitor that takes its time to start: the host would wait for that one, too
        wrapper = targets.IMPATIENT if last_words else PATIENT | {"termination_grace_time": 20}
        run = launch(targets.run_alone, 2, wrapper=wrapper, env=agent, **more)
        ranks: Ranks = run.wait(30, check=not last_words)
        return ranks

    yield run
    servers.clear()


#: both ranks raise, once both are in the function: so the second reason is noted beside the first
BOTH = {At(rank, step=1): Raise(when=When("enter", 1)) for rank in (0, 1)}
#: the function does not end by itself
ENDLESS = {"steps": 10**9}


def all_name(ranks: Ranks, key: str) -> None:
    """Every rank left with an error that names the key and is fit to be printed."""
    for rank in ranks:
        assert rank.exception in ("BadMessage", "StoreLost", "RestartAbort"), rank.trace
        assert f"'{key}'" in rank.message, rank.message
        assert rank.message.partition("\nlast phases")[0].isprintable(), rank.message


#: read before the function is called
BEFORE = {
    "-1/next": b'{"removed":["2"]}',
    "-1/end/0": b'{"kind":"alive","rank":7,"world_size":2}',
    "-1/end#": GARBAGE,
    "0/rendezvous": b"127.0.0.1:99999",
    "0/start/1": b'{"kind":"rank","rank":0,"world_size":2,"active_world_size":3}',
    "0/start#": b"-5",
    "0/start": b'{"go":true}',
    "0/outcome": b'{"completed":true,"cause":{"rank":0,"interruption":"terminated"}}',
}
#: read at a restart
AFTER = {
    "0/end/1": b'{"kind":"alive","rank":2,"world_size":2}',
    "0/end#": b"-5",
    "0/record#": b"-5",
    "0/next": b'{"terminated":[2]}',
    "ticket#": b"99999999",
}


#: one value for each key every day, both in the long run
LONG = hostile.EXAMPLES > 0
CASES = [*BEFORE.items(), *AFTER.items()]
GARBLED = [(key, GARBAGE) for key in ([*BEFORE, *AFTER] if LONG else ("0/start/1", "0/outcome", "0/record#"))]


def test_a_verdict_on_a_job_that_has_not_begun(play: Play) -> None:
    """As after the begin of another job: nobody takes part in that."""
    for rank in play("-1/next", b'{"removed":[2]}'):
        assert rank.exception == "OptionError"
        assert "a job runs here in which this process, RANK=" in rank.message


@pytest.mark.parametrize(("key", "value"), [*CASES, *GARBLED])
def test_a_value_of_somebody_else(play: Play, key: str, value: bytes) -> None:
    all_name(play(key, value, faults=BOTH if key in AFTER else None), key)


def test_a_roster_of_somebody_else(play: Play) -> None:
    """It is first looked at when the first verdicts are deleted."""
    faults = {At(0, iteration, step=1): Raise() for iteration in range(verbs.KEEP_VERDICTS)}
    all_name(play("roster", b'{"removed":[0]}', faults=faults, args=ENDLESS), "roster")


@pytest.mark.parametrize(("key", "value"), [("beat/0", GARBAGE), ("beat/1", b"-5")])
def test_a_heartbeat_of_somebody_else(play: Play, key: str, value: bytes) -> None:
    """Its monitor finds it and tells everybody: nobody is taken for dead."""
    all_name(play(key, value, args=ENDLESS), key)


@pytest.mark.parametrize("value", [GARBAGE, b"5", b"-5"] if LONG else [b"5"])
def test_a_count_of_functions_that_nobody_called(play: Play, value: bytes) -> None:
    all_name(play("0/done#", value), "0/done#")


def test_any_text_is_a_reason_to_leave_and_harmless(play: Play) -> None:
    ranks = play("0/abort", GARBAGE, faults=BOTH)
    assert ranks.exceptions == ["RestartAbort"] * 2
    assert all("not of ours" in rank.message and "\x1b" not in rank.message for rank in ranks)


def test_a_ticket_of_somebody_else_waits_for_ever(play: Play) -> None:
    """It may be one of another version: that must not end the job."""
    ranks = play("ticket/1", GARBAGE, faults=BOTH, tickets=1)
    assert [rank.value[1:] for rank in ranks] == [[0, 2], [1, 2]]


@pytest.mark.parametrize("key", ["gone/0", "gone#", "over"] if LONG else ["over"])
def test_at_the_end_it_changes_nothing(play: Play, key: str) -> None:
    assert play(key, GARBAGE).values == [[0, 0, 2], [0, 1, 2]]


# --- where a monitor serves the store, it stays up until everybody has read what is wrong


def run_vandal(context: Context) -> Any:
    return context.wrap(_vandal)()


def _vandal(context: Context, call: Any) -> list[int]:
    if context.rank == 1:
        plant(int(context.spec.environment["MASTER_PORT"]), context.args["key"], GARBAGE)
        context.point("planted")
    return targets.alone(context, call)


@pytest.mark.parametrize("key", ["0/outcome", "0/end/0", "0/end/1", "0/next", "beat/0"] if LONG else ["0/next"])
def test_the_stores_host_stays_until_all_know(launch: Callable[..., Any], key: str) -> None:
    """Rank 1 plants it and raises; the others are at work."""
    faults = {} if key in ("0/outcome", "beat/0") else {At(1, step="planted"): Raise(when=When("enter", 2))}
    args = {"key": key, **ENDLESS}
    all_name(launch(run_vandal, 3, args=args, faults=faults).wait(30), key)
