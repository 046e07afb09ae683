"""Another process learns that a thread begins to end, by a robust mutex that the thread holds in shared memory.

The kernel looks through such mutexes first thing when a thread ends, before it gives back the memory of the process,
and wakes whoever waits for one. A process that is forked holds none of them.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mmap

__all__ = ["SIZE", "Held", "await_end"]

#: more than any kind of mutex takes (bytes)
SIZE = 64
#: of glibc and musl alike
_PROCESS_SHARED = _ROBUST = 1
#: places of which another thread holds the mutex: it would write there later
_kept: list[Any] = []


class Held:
    """A mutex at that place of a mapping, for one thread to hold. The memory holds zeros before."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._libc, self._place = _place(memory, offset)
        kind = type(self._place)()
        self._libc.pthread_mutexattr_init(kind)
        self._libc.pthread_mutexattr_setpshared(kind, _PROCESS_SHARED)
        self._libc.pthread_mutexattr_setrobust(kind, _ROBUST)
        self._libc.pthread_mutex_init(self._place, kind)

    def take(self) -> None:
        """Hold it. Whoever lets go has to know of this object by now: a signal handler may raise at any moment."""
        self._libc.pthread_mutex_lock(self._place)

    def let_go(self) -> bool:
        """In the same thread, before the memory is unmapped. False: another thread holds it, so the memory stays."""
        libc, place, self._place = self._libc, self._place, None
        if libc.pthread_mutex_unlock(place) == 0:
            return True
        if libc.pthread_mutex_trylock(place) == 0:  # nobody had taken it
            return bool(libc.pthread_mutex_unlock(place) == 0)
        _kept.append(place)
        return False


def await_end(memory: mmap.mmap, offset: int) -> bool:
    """Wait until the thread that holds the mutex there ends (True) or lets go of it. At once where none does.

    The caller holds it from then on: a thread that ends before the memory is unmapped.
    """
    libc, place = _place(memory, offset)
    return bool(libc.pthread_mutex_lock(place) == errno.EOWNERDEAD)


def _place(memory: mmap.mmap, offset: int) -> tuple[Any, Any]:
    import ctypes  # noqa: PLC0415  (not while a monitor starts)

    return ctypes.CDLL(None), (ctypes.c_char * SIZE).from_buffer(memory, offset)
