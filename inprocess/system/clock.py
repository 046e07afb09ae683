"""The clock. The only file that calls ``time.*``.

All stamps are CLOCK_MONOTONIC, which every process of one host shares and which never jumps. Between hosts nothing is
compared by time; `wall` is for people, and decides nothing.
"""

from __future__ import annotations

import time

__all__ = ["busy", "monotonic", "monotonic_ns", "wall"]

#: seconds since some fixed moment
monotonic = time.monotonic
#: nanoseconds since the same moment
monotonic_ns = time.monotonic_ns
#: seconds since 1970, UTC
wall = time.time
#: seconds of a processor that this process has used
busy = time.process_time
