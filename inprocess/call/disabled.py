"""``Wrapper(enabled=False)``: the function itself; where it asks for a CallWrapper, with one that does nothing.

Only a parameter annotated plain ``CallWrapper`` asks for that. ``Optional[CallWrapper]``, and a parameter named
``inprocess_call_wrapper``, are for functions that take None to mean "not restarted": they keep what the caller gives.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from inprocess.call.injection import Injector
from inprocess.call_wrapper import CallWrapper, Counts, Inside, LastSave, given_limit
from inprocess.exception import RestartError
from inprocess.monitor.learned import LearnedTimeouts
from inprocess.state import FrozenState, State

__all__ = ["DisabledCall", "disabled"]

F = TypeVar("F", bound=Callable[..., Any])


class DisabledCall(CallWrapper):
    """A CallWrapper that does nothing, in any thread, with or without torch.distributed."""

    def __init__(self) -> None:
        """Nothing of a call: there is no board, gate or store behind it."""
        self._timeouts, self._to_free = LearnedTimeouts(), weakref.WeakSet[Any]()
        self._counts, self._last = Counts(), LastSave()

    @property
    def iteration(self) -> int:
        return 0

    @property
    def state(self) -> FrozenState:
        """That of the first iteration, all ranks active: by torch.distributed, else by ``RANK`` and ``WORLD_SIZE``,
        else of one process alone."""
        dist = sys.modules.get("torch.distributed")  # who has not imported it has not initialized it
        if dist is not None and dist.is_available() and dist.is_initialized():
            state = State(dist.get_rank(), dist.get_world_size())
        else:
            state = State()
        state.activate_all_ranks()
        return state.freeze()

    @property
    def leaving(self) -> None:
        return None

    @property
    def store(self) -> Any:
        raise RestartError(
            "call.store is the store of an iteration, and Wrapper(enabled=False) has none: leave out store= of "
            "init_process_group() there, or connect a torch TCPStore to MASTER_ADDR and MASTER_PORT. "
            "`call: Optional[CallWrapper] = None` gets None, by which the function can tell"
        )

    def ping(self) -> None:
        return None

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def section(self, name: str, timeout: Any = None) -> Iterator[None]:
        """It learns nothing: a debugger may stop in it."""
        if timeout is not None:
            given_limit(name, timeout)
        yield


def disabled(fn: F) -> F:
    """`fn` itself where nothing asks for a CallWrapper; else it gets a `DisabledCall` where its caller passes none."""
    injector = Injector(fn, CallWrapper, plain_only=True)

    @functools.wraps(fn)
    def filled(*args: Any, **kwargs: Any) -> Any:
        call = DisabledCall()
        args, kwargs = injector.bind(args, kwargs, call)
        if not any(each is call for each in (*args, *kwargs.values())):
            return fn(*args, **kwargs)
        with Inside(call):
            return fn(*args, **kwargs)

    return filled if injector.is_asked else fn  # type: ignore[return-value]
