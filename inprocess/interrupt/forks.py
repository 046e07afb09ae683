"""A process that the user's code forks is no rank. It has copies of all that speaks for one, and must not use them.

The child is a copy of the thread that forked, with the same stack below it: where it leaves the user's function, or a
hook, it would run on in the library, and say to the others what only the rank may say. So it ends there, by
``os._exit``: exit handlers and destructors belong to the rank as well. Until then it may do what it likes. The shared
memory in which a rank shows its monitor that it makes progress is replaced by a copy; of the connections to the stores
a child has copies of the descriptors, and to close those ends nothing.

A child that ends by itself (``os._exit``, exec, multiprocessing's processes, a DataLoader's workers) never comes here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["guarded", "tell"]

T = TypeVar("T")
#: called in a child that is forked during a call
_told: Callable[[], None] | None = None
#: the signals that wait until it has been
_held: tuple[int, ...] = ()
_forking = threading.local()


def tell(detach: Callable[[], None] | None, signums: tuple[int, ...] = ()) -> None:
    """From now on ``detach`` is called in each child, first of all; None: nothing is.

    Args:
        signums: signals whose handlers it puts back. One that comes to the child before that waits: Python would forget
            it, and the child, which it is to end, would live on.
    """
    global _told, _held  # one call at a time
    _told, _held = detach, signums


def guarded(fn: Callable[..., T], *args: Any) -> T:
    """``fn(*args)``. A process that it forks ends where it leaves ``fn``."""
    process = os.getpid()
    try:
        value = fn(*args)
    except BaseException as error:
        if os.getpid() != process:
            _end(error)
        raise
    if os.getpid() != process:
        _end(None)
    return value


def _end(error: BaseException | None) -> NoReturn:
    """End this process, as Python would have ended it, except for its exit handlers."""
    status = 1
    try:
        status = _status(error)
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(status)


def _status(error: BaseException | None) -> int:
    """What the process ends with; prints what there is to say."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _held) if _held else None


def _in_parent() -> None:
    if (mask := _forking.mask) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    global _told, _held  # its own children inherit what it has
    detach, _told, _held = _told, None, ()
    try:
        if detach is not None:
            detach()
    finally:
        _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
