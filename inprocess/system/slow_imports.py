"""Imports in the background of a process that has nothing else to do, beside others that train.

A nice value would do nearly the same, but without privileges nobody can take it back, and threads that a library has
started keep it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from inprocess.system import clock, descriptors

__all__ = ["slow_imports"]

#: of one processor; and after how much work there is a rest (seconds)
SHARE, WORK_S = 0.25, 0.005


@contextlib.contextmanager
def slow_imports(owner: int) -> Iterator[None]:
    """Imports take only a share of a processor meanwhile. The process ends with the one at the other end of ``owner``,
    a socket through which nothing comes."""
    finder = _Rest(owner)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Rest:
    """A finder of modules that finds none, and rests."""

    def __init__(self, owner: int) -> None:
        self._owner, self._worked = owner, clock.busy()

    def find_spec(self, *_: object) -> None:
        work = clock.busy() - self._worked
        if work < WORK_S:
            return
        if descriptors.await_readable(self._owner, work * (1 / SHARE - 1)):
            os._exit(0)
        self._worked = clock.busy()
