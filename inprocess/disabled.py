"""``Wrapper(enabled=False)``: the function itself; where it asks for a CallWrapper, with one that does nothing.

Only a parameter annotated plain ``CallWrapper`` asks for that. ``Optional[CallWrapper]``, and a parameter named
``inprocess_call_wrapper``, are for functions that take None to mean "not restarted": they keep what the caller gives.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any, TypeVar

from inprocess.call_wrapper import CallWrapper, Inside, given_limit
from inprocess.environment import whole
from inprocess.exception import OptionError, RestartError
from inprocess.hooks import Injector
from inprocess.learned import LearnedTimeouts
from inprocess.state import FrozenState, State

__all__ = ["DisabledCall", "disabled"]

F = TypeVar("F", bound=Callable[..., Any])


class DisabledCall(CallWrapper):
    """A CallWrapper that does nothing, in any thread, with or without torch.distributed."""

    def __init__(self) -> None:
        """Nothing of a call: there is no board, gate or store behind it."""
        self._timeouts = LearnedTimeouts()

    @property
    def iteration(self) -> int:
        return 0

    @property
    def state(self) -> FrozenState:
        """That of the first iteration, all ranks active: by torch.distributed, else by ``RANK`` and ``WORLD_SIZE``,
        else of one process alone."""
        state = State(*_place())
        state.activate_all_ranks()
        return state.freeze()

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
    if not injector.is_asked:
        return fn
    return functools.wraps(fn)(_filled(fn, injector))  # type: ignore[return-value]


def _filled(fn: Callable[..., Any], injector: Injector) -> Callable[..., Any]:
    """A function of the same kind as `fn`."""

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        call = DisabledCall()
        args, kwargs = injector.bind(args, kwargs, call)
        is_given = any(each is call for each in (*args, *kwargs.values()))
        return args, kwargs, call if is_given else None

    def plain(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, call = bind(args, kwargs)
        with _inside(call):
            return fn(*args, **kwargs)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, call = bind(args, kwargs)
        with _inside(call):
            return await fn(*args, **kwargs)

    def generator(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, call = bind(args, kwargs)
        return (yield from _Steps(fn(*args, **kwargs), call))

    def async_generator(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, call = bind(args, kwargs)
        return _AsyncSteps(fn(*args, **kwargs), call)

    kinds = (
        (inspect.iscoroutinefunction, coroutine),
        (inspect.isgeneratorfunction, generator),
        (inspect.isasyncgenfunction, async_generator),
    )
    return next((filled for is_one, filled in kinds if is_one(fn) or is_one(type(fn).__call__)), plain)


def _inside(call: CallWrapper | None) -> contextlib.AbstractContextManager[None]:
    """While the function runs; where the caller passed a CallWrapper of its own, what was current stays that."""
    return contextlib.nullcontext() if call is None else Inside(call)


class _Steps(Generator[Any, Any, Any]):
    """A generator of which each step runs inside the call, and the caller's code between two steps does not."""

    def __init__(self, inner: Generator[Any, Any, Any], call: CallWrapper | None) -> None:
        self._inner, self._call = inner, call

    def send(self, value: Any) -> Any:
        with _inside(self._call):
            return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        with _inside(self._call):
            return self._inner.throw(*error)


class _AsyncSteps(AsyncGenerator[Any, Any]):
    """The same of an asynchronous one."""

    def __init__(self, inner: AsyncGenerator[Any, Any], call: CallWrapper | None) -> None:
        self._inner, self._call = inner, call

    async def asend(self, value: Any) -> Any:
        with _inside(self._call):
            return await self._inner.asend(value)

    async def athrow(self, *error: Any) -> Any:
        with _inside(self._call):
            return await self._inner.athrow(*error)


def _place() -> tuple[int, int]:
    """Rank and world size."""
    dist = sys.modules.get("torch.distributed")  # who has not imported it has not initialized it
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, size = (_number(name, absent) for name, absent in (("RANK", 0), ("WORLD_SIZE", 1)))
    return rank, size


def _number(name: str, absent: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return absent
    number = whole(text, 0, sys.maxsize)
    if number is None:
        raise OptionError(
            f"{name}={text!r} is not a number: start the script with a launcher that sets it, or unset it"
        )
    return number
