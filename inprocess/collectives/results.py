"""Results of functional collectives that nobody has waited for: waited for once the function was left.

torch notes an operation by its result, and keeps both, and the group, until somebody waits. Results are noted while
they are made, since to look for them takes longer, the more objects there are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from inprocess.collectives import background
from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger

__all__ = ["Results", "results"]

log = get_logger(__name__)


class Results:
    """Of one process; a `Part` of a call."""

    def __init__(self) -> None:
        self._active = False
        #: what functional collectives have begun, and nobody has waited for
        self._pending: list[Any] = []
        #: torch's class of such results, and what makes one of it
        self._kind: Any = None
        self._make: Any = None
        #: by number; what is wrapped stands here itself until its result is made
        self._made: dict[int, weakref.ref[Any]] = {}
        self._numbers = itertools.count()
        #: gets what is wrapped from now on
        self._kept: list[Any] | None = None

    def begin(self) -> None:
        """Note what is made from now on, of this iteration."""
        self._active = True
        self._made.clear()
        if self._kind is not None:
            return
        try:
            # a model in DistributedDataParallel imports it later, inside the function
            from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: PLC0415

            self._kind = AsyncCollectiveTensor
            self._make = vars(self._kind)["__new__"]
        except Exception as error:  # torch without torch.distributed, or it keeps them elsewhere
            log.debug("functional collectives are not noted: %s", in_words(error))
            self._kind = None
            return
        self._kind.__new__ = functools.partial(self._note, self._kind.__new__)

    def pending(self) -> None:
        """The abort begins.

        The function runs on meanwhile: it may get further results, then fail since its group has ended, and free all.
        """
        if self._active:
            self._kept = self._pending
            self._pending += self.waiting()

    def raised(self) -> None:
        """In the main thread: an exception has left the function, whose frames still have what they had."""
        if self._active and _begun_here():
            with contextlib.suppress(Exception):
                self._pending.extend(self.waiting())

    def collect(self) -> list[threading.Thread]:
        """The function was left: torch lets go of an operation when somebody begins to wait for it. That may last as
        long as the timeout of the group. Returns the threads that do it."""
        self._kept = None
        pending, self._pending = self._pending, []
        threads: list[threading.Thread] = []
        try:
            for tensor in pending:
                threads.append(background.run(functools.partial(_wait_for, tensor)))
        except RuntimeError:  # there is no thread left: those that have none wait for the next time
            self._pending += pending[len(threads) :]
        return threads

    def end(self) -> None:
        """The call is over; note nothing more."""
        self._active = False
        background.to_be_joined(self.collect())
        if self._kind is not None:
            self._kind.__new__, self._kind, self._make = self._make, None, None
        self._made.clear()

    def waiting(self) -> list[Any]:
        """What was wrapped, of those that nobody has waited for."""
        found = [reference() for reference in list(self._made.values())]
        return [getattr(each, "elem", each) for each in found if each is not None and not _is_completed(each)]

    def _note(self, make: Callable[..., Any], kind: Any, tensor: Any) -> Any:
        if self._kept is not None:
            self._kept.append(tensor)
        made, number = self._made, next(self._numbers)

        def forget(_: object) -> None:
            made.pop(number, None)

        made[number] = weakref.ref(tensor, forget)
        result = make(kind, tensor)
        made[number] = weakref.ref(result, forget)
        return result


def _is_completed(result: Any) -> bool:
    """False also of what is not wrapped yet."""
    return bool(getattr(result, "completed", False))


def _begun_here() -> int:
    """How many collectives of this thread are still to be waited for."""
    bindings = getattr(torch._C, "_distributed_c10d", None)
    count: Callable[[], int] = getattr(bindings, "_get_work_registry_size", lambda: 0)
    return count()


def _wait_for(tensor: Any) -> None:
    with contextlib.suppress(Exception):  # its group is aborted, so it may have failed
        torch.ops._c10d_functional.wait_tensor(tensor)


#: one per process
results = Results()
