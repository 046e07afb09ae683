"""Running a verb over a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from inprocess.exception import StoreLost
from inprocess.protocol.ops import Add, Claim, Delete, Exist, Now, Op, Pause, Read, ReadAll, Set, Verb, Wait
from inprocess.stores.raw import ABSENT, LOST, claim, read, uses_libuv
from inprocess.system import clock
from inprocess.system.errors import first_line

__all__ = ["POLL_INTERVAL_S", "execute"]

T = TypeVar("T")
#: torch passes milliseconds to poll() as a C int, so a longer wait is made of several
MAX_WAIT_S = 20 * 24 * 3600.0
#: the longest wait without a look where nobody may wake us (seconds), see the end of this file
POLL_INTERVAL_S = 10.0


def execute(verb: Verb[T], store: Any) -> T:
    """Carry out a verb's operations one by one and return its result. Raises StoreLost where the server is gone."""
    try:
        op = next(verb)
        while True:
            op = verb.send(_execute(op, store))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _execute(op: Op, store: Any) -> Any:
    match op:
        case Wait():
            return _wait(store, op)
        case Pause():
            return threading.Event().wait(op.seconds)
        case Now():
            return clock.monotonic()
    try:
        return _ACTIONS[type(op)](store, op)
    except RuntimeError as error:  # torch's DistError and its kin; ours are none
        # a TCPStore's server closes the connection on which something else than a number is to be added to
        hint = ", or the key does not hold a number" if isinstance(op, Add) else ""
        raise StoreLost(f"the store failed in {op}: {first_line(error)}. {LOST}{hint}") from None


_ACTIONS: dict[type, Callable[[Any, Any], Any]] = {
    Set: lambda store, op: store.set(op.key, op.value),
    Add: lambda store, op: store.add(op.key, op.amount),
    Claim: claim,
    Read: lambda store, op: read(store, op.key),
    ReadAll: lambda store, op: store.multi_get(list(op.keys)),
    Exist: lambda store, op: store.check(list(op.keys)),
    Delete: lambda store, op: store.delete_key(op.key),
}


def _wait(store: Any, op: Wait) -> bytes | None:
    longest = MAX_WAIT_S if uses_libuv(store) else POLL_INTERVAL_S
    remaining = float("inf") if op.timeout is None else op.timeout
    while True:
        patience = min(remaining, longest)
        begin = clock.monotonic()
        try:
            # get waits too, and gives the interpreter lock up once instead of twice
            store.set_timeout(timedelta(seconds=patience))
            if found := bytes(store.get(op.key)):
                return found
            # torch's server also wakes us where somebody reads the key with a compare-and-set, and it is not there yet
            patience = min(patience, clock.monotonic() - begin)
        except RuntimeError as error:
            if not _is_timeout(error) and not (clock.monotonic() - begin >= patience and _answers(store)):
                raise StoreLost(f"the store failed while waiting for {op.key!r}: {first_line(error)}. {LOST}") from None
        remaining -= patience
        if remaining <= 0:
            return None


def _is_timeout(error: RuntimeError) -> bool:
    """torch has no class of its own for it; where its words change, the clock and the store itself tell."""
    return "timeout" in str(error).lower() or "timed out" in str(error).lower()


def _answers(store: Any) -> bool:
    try:
        return store.check([ABSENT]) is not None
    except RuntimeError:
        return False
