"""The clock. The only file that calls ``time.*``; tests pass another object with the same functions.

All stamps are CLOCK_MONOTONIC, which every process of one host shares and which never jumps. Between hosts nothing is
compared by time.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "monotonic", "monotonic_ns", "wall"]


class Clock(Protocol):
    """What the library asks of a clock; this module is one."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since the same moment."""

    def wall(self) -> float:
        """Seconds since 1970, for people to read; never compared."""


#: seconds
monotonic = time.monotonic
#: nanoseconds
monotonic_ns = time.monotonic_ns
#: seconds since 1970
wall = time.time
