"""The limit of open descriptors: raised for the launcher, and put back for each worker.

The workers' store is in the launcher, and each worker makes about four connections to it: the usual soft limit of 1,024
would end a job of some 250 workers.
"""

from __future__ import annotations

import contextlib
import resource

__all__ = ["Limits", "give_back", "raise_limit"]

Limits = tuple[int, int]


def raise_limit() -> Limits:
    """Raise the soft limit of this process to the hard one. Answers what both were before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a hard limit above the kernel's own maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    return before


def give_back(pid: int, limits: Limits) -> None:
    """Give a process that was just started the limits that this one had.

    Lowering our own around the start instead would, for that moment, refuse connections to the store.
    """
    with contextlib.suppress(OSError):  # it has ended already
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
