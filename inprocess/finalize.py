"""Hooks that run after an interrupted iteration, in the main thread, once the function has been left."""

from __future__ import annotations

import abc
import dataclasses
import datetime
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from inprocess.system.interpreter import join_with_progress

from .exception import OptionError, TimeoutError
from .options import seconds
from .state import FrozenState, State

__all__ = ["Finalize", "ThreadedFinalize"]

T = TypeVar("T")


class Finalize(abc.ABC):
    """Base class of ``finalize`` hooks; a plain callable does as well. An exception takes this rank out of the job."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState | None:
        """Release what the function left behind and return the state (None: unchanged)."""


def both_forms(call: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Let a hook's method be called as in nvidia-resiliency-ext 0.2, too: ``(state, exception)`` gives both back.

    Subclasses in programs for that version do so. It keeps its signature, by which a Wrapper knows the newer form.
    """

    @functools.wraps(call)
    def either(self: Any, state: State | FrozenState, *older: BaseException | None) -> Any:
        if not older:
            return call(self, state)
        (exception,) = older
        call(self, dataclasses.replace(state.freeze(), fn_exception=exception))
        return state, exception

    return either


class ThreadedFinalize(Finalize):
    """Runs ``fn(*args, **kwargs)`` in a thread and waits for it no longer than `timeout`, which may be longer than
    ``hard_timeout``: a rank that waits here is no hanging one.

    Args:
        timeout: a timedelta, or seconds.
        fn: what to run.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        OptionError: an argument has the wrong type.
        TimeoutError: at the call, when `fn` takes too long; its daemon thread is left behind.
        BaseException: at the call, whatever `fn` raises.
    """

    def __init__(
        self,
        timeout: datetime.timedelta | float,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(fn):
            raise OptionError(f"fn={fn!r} cannot be called: pass the function to run")
        if isinstance(args, str | bytes) or not isinstance(args, Iterable):
            raise OptionError(f"args={args!r} is no sequence of arguments: pass a tuple, args=({args!r},)")
        if not isinstance(kwargs, Mapping | None):
            raise OptionError(f"kwargs={kwargs!r} is no dict of keyword arguments by name: pass one, or None")
        self.timeout = seconds("timeout", timeout)
        self.fn = fn
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})

    @both_forms
    def __call__(self, state: FrozenState) -> FrozenState:
        run_in_thread("ThreadedFinalize", self.timeout, lambda: self.fn(*self.args, **self.kwargs))
        return state


def run_in_thread(name: str, timeout: float, fn: Callable[[], T], overdue: str = "") -> T:
    """Run `fn` in a daemon thread, wait for it, and answer or raise what it did.

    Raises:
        TimeoutError: it took longer than `timeout` seconds; with the text `overdue`, if there is one.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(fn())
        except BaseException as error:  # not only Exception: the caller must learn of every end
            raised.append(error)

    thread = threading.Thread(target=run, name=f"inprocess-{name}", daemon=True)
    thread.start()
    if not join_with_progress(thread, timeout):
        raise TimeoutError(
            overdue or f"{name} did not end within timeout={timeout:g}s: raise the timeout, or find what blocks it"
        )
    if raised:
        raise raised.pop()  # popped, so that no frame keeps the exception alive
    return returned.pop()
