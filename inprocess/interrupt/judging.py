"""What it means that the function was left by an exception, and what that would keep alive."""

from __future__ import annotations

import ctypes
import gc
import inspect
import itertools
import traceback
from collections.abc import Iterator
from types import FrameType

from inprocess.exception import GROUP, RankShouldRestart, RestartAbort

__all__ = ["answers_interruption", "behind", "chain", "let_go", "set_handled", "under_way"]

#: a longer list is none of errors, and a million objects are not looked at in a restart
FEW = 100
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def under_way(interruption: BaseException, outer: BaseException | None) -> BaseException:
    """The user's own exit that the interruption hit on its way out, in a `finally` block, or the interruption.

    ``outer``: what was handled before the function was called. An exit in there, or behind it, is none of the function.
    """
    for error in chain(interruption, outer):
        if isinstance(error, RestartAbort | KeyboardInterrupt | SystemExit):
            return error
    return interruption


def answers_interruption(error: BaseException, outer: BaseException | None) -> bool:
    """Whether `error` was raised while RankShouldRestart was being handled, in the function."""
    return any(isinstance(cause, RankShouldRestart) for cause in chain(error, outer))


def chain(error: BaseException, outer: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that were being handled, or under way, when it was raised; the latest first.

    Up to ``outer``: what was handled before the function was called.
    """
    seen = {id(outer)}
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def behind(error: BaseException, *outside: BaseException | None) -> Iterator[BaseException]:
    """This one and all that are behind it or in it, except these and what is behind them alone."""
    seen, waiting = set(map(id, outside)), [error]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        found = [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, GROUP) else ())]
        waiting += [one for one in found if one is not None]


def let_go(error: BaseException, *outside: BaseException | None) -> None:
    """Empty the frames that the function was left through, also those of the exceptions behind this one.

    A program that keeps the exception, in a list of errors perhaps, would keep tensors and process groups with it, and
    with each group threads and sockets. So would an exception that a frame of its own traceback refers to, until
    garbage is collected; also one that is no longer behind this one, but in a local variable, as where it is tried
    again. ``outside``: what was handled before the function was called, and what is still looked at.
    """
    waiting, seen = [error], list(outside)
    while waiting:
        for each in behind(waiting.pop(), *seen):
            seen.append(each)
            # a generator may have caught an earlier one and go on
            spared = 0 if each is error else _GENERATORS
            frames = [frame for frame, _ in traceback.walk_tb(each.__traceback__)]
            waiting += itertools.chain(*(_empty(frame) for frame in frames if not frame.f_code.co_flags & spared))


def _empty(frame: FrameType) -> list[BaseException]:
    """Returns the exceptions that it held."""
    kept = _errors_of(frame)
    try:
        frame.clear()
    except RuntimeError:  # still running
        return []
    return kept


def _errors_of(frame: FrameType) -> list[BaseException]:
    """The exceptions in its variables, and in the short lists there."""
    variables = gc.get_referents(frame)
    short = [each for each in variables if type(each) is list and len(each) <= FEW]
    # asked by type: a proxy's `__class__` is code of the program
    return [each for each in [*variables, *itertools.chain(*short)] if issubclass(type(each), BaseException)]


def set_handled(exception: BaseException | None) -> None:
    """What `sys.exc_info` shows from here on. Before 3.11 this cannot be set, and need not be."""
    setter = getattr(ctypes.pythonapi, "PyErr_SetHandledException", None)
    if setter is not None:
        setter(ctypes.py_object(exception))
