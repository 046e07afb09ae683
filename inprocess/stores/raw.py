"""Reading without waiting and claiming a key, which torch's stores cannot do by themselves; and which of torch's two
kinds of TCPStore server is served."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from inprocess.protocol.ops import Claim

__all__ = ["ABSENT", "LOST", "claim", "innermost", "read", "uses_libuv", "with_libuv_or_without"]

T = TypeVar("T")
ABSENT = "\0absent"
LOST = "Its host is gone, or cannot be reached from here"


def read(store: Any, key: str) -> bytes | None:
    # one round trip: a compare-and-set that expects what is never there returns the value, or what it expected
    found = store.compare_set(key, ABSENT, ABSENT)
    return None if found == ABSENT.encode() else bytes(found)


def claim(store: Any, op: Claim) -> bytes:
    found = bytes(store.compare_set(op.key, op.instead, op.value))
    if found == op.value.encode() and op.awaited and not op.instead and not uses_libuv(store):
        store.set(op.key, op.value)  # wakes who waits
    return found


def innermost(store: Any) -> Any:
    """The store itself, without the views that put a prefix before its keys."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


_built_with_libuv = True


def with_libuv_or_without(make: Callable[[bool], T]) -> T:
    """Make a store of the kind that is served here. torch says only then that it was built without libuv."""
    global _built_with_libuv
    libuv = _built_with_libuv and os.environ.get("USE_LIBUV", "1") == "1"
    try:
        return make(libuv)
    except RuntimeError as error:
        if not libuv or "libuv" not in str(error):
            raise
    _built_with_libuv = False
    return make(False)


def uses_libuv(store: Any) -> bool:
    return bool(getattr(innermost(store), "libuvBackend", True))
