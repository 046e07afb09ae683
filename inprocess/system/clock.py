"""The clock. The only file that calls ``time.*``.

All stamps are CLOCK_MONOTONIC, which every process of one host shares and which never jumps. Between hosts nothing is
compared by time; `wall` is for people, and decides nothing.
"""

from __future__ import annotations

import functools
import os
import time

__all__ = ["busy", "monotonic", "monotonic_ns", "name", "wall"]

#: seconds since some fixed moment
monotonic = time.monotonic
#: nanoseconds since the same moment
monotonic_ns = time.monotonic_ns
#: seconds since 1970, UTC
wall = time.time
#: seconds of a processor that this process has used
busy = time.process_time


@functools.cache
def name() -> str:
    """Names the clock of the stamps, as no other host does; empty where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            started = boot.read(8)
        return f"{started}-{os.stat('/proc/self/ns/time').st_ino:x}"
    except OSError:
        return ""
