"""A store of the program's own whose server never comes: its constructor gives up before this rank counts as hung.

torch's TCPStore connects in C++, and a server waits there for its workers: nothing reaches them, neither a signal nor
the abort. Their own time-out is five minutes, or the group's. So a healthy rank was killed at ``hard_timeout``. For the
time of the function no such wait is longer than nine tenths of ``soft_timeout``, or of its section's; then torch's own
error says which address did not answer. Later waits for keys have the time-out that was given.

Not reached: a server that accepts the connection and never answers, for which torch (2.13) waits without a limit.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as bindings

from inprocess.collectives.nccl_shutdown import Method, Replaced

__all__ = ["StoreClients", "store_clients"]

#: of the time without progress that is allowed; seconds that torch may take longer than its time-out, since it waits
#: before it tries again (1.2 to 1.5 s seen)
PART, RESERVE_S, LEAST_PART = 0.9, 2.0, 0.5
#: torch's default, where no timeout is given (2.9 to 2.15)
DEFAULT = timedelta(seconds=300)


class StoreClients:
    """The constructor of torch's TCPStore, from `begin` to `end`."""

    def __init__(self) -> None:
        self._replaced: Replaced | None = None

    def begin(self, patience: Callable[[], float | None]) -> None:
        """A call begins.

        Args:
            patience: for how long the main thread may show no progress where it is now (seconds); None: for any time.
        """
        if self._replaced is None:
            make = functools.partial(_make, patience)
            self._replaced = Replaced(bindings.TCPStore, "__init__", make)

    def end(self) -> None:
        """The call is over."""
        if self._replaced is not None:
            self._replaced.restore()
            self._replaced = None


def _make(patience: Callable[[], float | None], original: Method, *args: Any, **kwargs: Any) -> None:
    # no other thread's standstill ends the rank; of these are most of this library's own connections
    allowed = patience() if threading.current_thread() is threading.main_thread() else None
    limit = None if allowed is None else timedelta(seconds=max(LEAST_PART * allowed, PART * allowed - RESERVE_S))
    wanted = None
    if limit is not None:
        with contextlib.suppress(TypeError):  # torch is to say what is wrong with them
            before, wanted, after, others = _around_timeout(*args, **kwargs)
    if limit is None or not isinstance(wanted, timedelta) or wanted <= limit:
        original(*args, **kwargs)
        return
    original(*before, limit, *after, **others)
    before[0].set_timeout(wanted)


def _around_timeout(
    self: Any,
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = DEFAULT,
    *args: Any,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], timedelta, tuple[Any, ...], dict[str, Any]]:
    """The arguments of torch's constructor: what comes before the time-out, that, and what comes after it."""
    return (self, host_name, port, world_size, is_master), timeout, args, kwargs


#: one per process; `call.parts` begins and ends it
store_clients = StoreClients()
