"""Has a thread wait briefly for name servers.

torch looks up the name of each peer that it connects to, for its log messages. Where an answer gets lost, glibc asks
again after 5 s, and a restart that makes a connection takes as long: a `Tree` makes one on each rank. The library
connects to numeric addresses and needs no names. Not asking at all would make torch print a warning in each process.

glibc keeps the settings of its resolver per thread, so what is changed here ends with the thread. Elsewhere (musl) this
changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["ask_briefly", "settings"]

#: seconds for which an answer is waited for, and how often it is asked; what is less already stays
PATIENCE, ATTEMPTS = 1, 1

_LIBC = ctypes.CDLL(None)


class Resolver(ctypes.Structure):
    """The beginning of ``struct __res_state``."""

    _fields_ = (("patience", ctypes.c_int), ("attempts", ctypes.c_int))


def ask_briefly() -> None:
    """In a thread of the library's own: from here on as with ``RES_OPTIONS="timeout:1 attempts:1"``."""
    with contextlib.suppress(AttributeError):  # another C library
        _LIBC.__res_init()  # otherwise the first question reads the settings, over what is set here
        mine = settings()
        mine.patience, mine.attempts = min(mine.patience, PATIENCE), min(mine.attempts, ATTEMPTS)


def settings() -> Resolver:
    """Those of the calling thread. Raises AttributeError where the C library is not glibc."""
    find = _LIBC.__res_state
    find.restype = ctypes.POINTER(Resolver)
    return find().contents  # type: ignore[no-any-return]
