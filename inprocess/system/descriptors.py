"""The limit of open descriptors, and what to say where they ran out: how many are open, and the remedy. One text for
all processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
from collections.abc import Iterator

from inprocess.exception import RestartError

__all__ = [
    "EXHAUSTED",
    "DescriptorLimits",
    "await_readable",
    "check",
    "explained",
    "give_back",
    "milliseconds",
    "more",
    "raise_limit",
    "shortage",
]

#: soft and hard
DescriptorLimits = tuple[int, int]
#: errors of accept() that come again at once, as the connection stays in the queue
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: without a process group: connections to the iteration's store, event loops
FEWEST = 8
#: an error of torch's C++ has only the text
_TEXT = os.strerror(errno.EMFILE)
#: in what is said here
_MARK = "(RLIMIT_NOFILE"


def shortage(error: BaseException) -> str:
    """What to say, and to do, where this error means that no descriptor is left; empty where it means something else.

    Opens nothing that has to succeed.
    """
    if isinstance(error, RestartError):
        return str(error) if _MARK in str(error) else ""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENFILE:
        return "this host has no open file left (ENFILE): raise fs.file-max with sysctl, or end what keeps files open"
    if number != errno.EMFILE and _TEXT not in str(error):
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"too many open files: process {os.getpid()} has {_opened()} of {soft} descriptors open {_MARK}, hard "
        f"limit {_shown(hard)}). Raise the limit with `ulimit -n {_shown(hard)}` before the job starts, or look in "
        f"/proc/{os.getpid()}/fd for what is left open"
    )


def await_readable(descriptor: int | None, seconds: float | None = None) -> bool:
    """Until it is, or the time is over; which of the two. Not with select(), which takes none from 1,024 on."""
    poll = select.poll()
    if descriptor is not None:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else milliseconds(seconds)))


def milliseconds(seconds: float) -> float:
    """For a poll(), which takes no more than fits into a C int: 24 days. Who waits for longer looks again then."""
    return min(max(0.0, seconds) * 1e3, 2**31 - 1)


def raise_limit() -> DescriptorLimits:
    """Raise the soft limit of this process to the hard one: whoever serves a store has four connections to each rank.
    Returns what both were before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a hard limit above the kernel's own maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    return before


def give_back(pid: int, limits: DescriptorLimits) -> None:
    """Give a process that was just started the limits that this one had before `raise_limit`.

    Lowering our own around the start instead would, for that moment, refuse connections to the store.
    """
    with contextlib.suppress(OSError):  # it has ended already
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def more() -> Iterator[None]:
    """Inside, as many as the hard limit allows, for what has to succeed although the program has used all it may."""
    soft, hard = raise_limit()
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard):  # not where the program has set another
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check() -> None:
    """Raise RestartError where too few are left for an iteration: torch would try for minutes to connect to its store,
    and Gloo ends the process where it can accept no connection."""
    with explained("this rank cannot go on"):
        for taken in [select.epoll() for _ in range(FEWEST)]:  # objects, which close what they have by themselves
            taken.close()


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Where descriptors run out inside, raise a RestartError that says so; ``what`` could not be done then."""
    try:
        yield
    except OSError as error:
        if text := shortage(error):
            raise RestartError(f"{what}: {text}") from error
        raise


def _opened() -> str:
    try:
        return str(len(os.listdir("/proc/self/fd")) - 1)  # without the one that lists them
    except OSError:
        return "all"


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
