"""Ranks that wait in NCCL's bootstrap for one that is gone are released by ending the bootstrap's own connections.

``ncclCommInitRank`` spins on its sockets until all ranks have come. One that died, or was interrupted before, never
comes, and nothing of torch's reaches the others: where the group is made with ``device_id=`` it is in no table yet, and
without it the abort waits for the same call. So they stayed there until ``hard_timeout`` killed them, healthy as they
were. When its connections end, the call fails on all ranks, and they go on.

Nothing tells which sockets are the bootstrap's. So what is ended is a TCP socket of this process that

* did not exist when the function was last entered, or when the call began,
* does not block, sends at once (``TCP_NODELAY``), and is bound to an address of one interface, as NCCL's all are,
* is in no thread's ``poll``, looked at ten times in 20 ms: NCCL's proxy and its RAS threads wait there, and most
  clients in C and C++,
* is watched by no epoll instance: Gloo, gRPC, asyncio, libuv and the AWS runtime wait there,
* belongs to no socket object of Python's,

and only while a thread is inside code of torch's that may make a communicator. docs/notebook/nccl.md has what was
tried.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from inprocess.collectives import groups, nccl
from inprocess.interrupt import whereabouts
from inprocess.system import clock, procfs
from inprocess.system.interpreter import running_frames
from inprocess.system.logs import get_logger

__all__ = ["Bootstrap", "bootstrap"]

log = get_logger(__name__)
#: how often, and how many seconds apart, the threads' calls of poll are looked at
LOOKS, APART = 10, 0.002
#: pause between two times that it is done while groups are aborted (seconds)
AGAIN = 0.05
#: functions of torch's that send to one rank: each pair of ranks has a communicator of its own, made with the first
#: message
_TO_ONE = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_WILDCARDS = ("0.0.0.0", "::")


class Bootstrap:
    """What began before an iteration, so that it is left alone; ends what is NCCL's of what began since."""

    def __init__(self) -> None:
        #: sockets that were there when the function was last entered; None: there is nothing to do in this process
        self._before: frozenset[int] | None = None
        self._tasks_before: frozenset[str] = frozenset()
        #: whether the abort hook wants it
        self.allowed = False
        #: what was ended in this iteration
        self._cut = set[int]()
        #: threads that began in iterations in which something was, and those of them that are Python's
        self._suspects: set[str] = set()
        self._pythons: set[str] = set()

    def begin(self) -> None:
        """An iteration begins. Main thread, before any code of the user's runs in it."""
        if not (dist.is_available() and dist.is_nccl_available()):
            return
        self._note_threads()
        if self._before is None:
            self._before = frozenset(procfs.sockets())
        self._tasks_before = frozenset(procfs.tasks())
        self._cut = set()
        self.allowed = False

    def enter(self) -> None:
        """The function is about to be entered, and the heap is frozen: no search finds Python's sockets of before."""
        if self._before is not None:
            self._before = frozenset(procfs.sockets())

    def end(self) -> None:
        """The call is over."""
        if self._before is None:
            return
        self._note_threads()
        self._before, self.allowed = None, False
        left = list(filter(_is_nameless, self._suspects.intersection(procfs.tasks()) - self._pythons))
        self._suspects.clear()
        self._pythons.clear()
        if left:
            log.info(
                "%d threads of NCCL stay: the creation of their communicators was interrupted, and NCCL does not "
                "end all threads then",
                len(left),
            )

    def is_needed(self) -> bool:
        """Whether there may ever be something to do: torch has NCCL, and a call is running."""
        return self._before is not None

    def cut(self) -> int:
        """End the bootstrap's connections, if a thread may be inside it; returns how many. Takes 20 ms if so."""
        if self._before is None or not self.allowed or not _may_be_inside():
            return 0
        try:
            found = self._candidates()
        except procfs.Unknown as error:
            log.warning(
                "the connections of NCCL's bootstrap cannot be found (%s): ranks that wait there for one that is gone "
                "are killed at hard_timeout",
                error,
            )
            self.allowed = False
            return 0
        ended = {inode for inode, descriptor in found.items() if _shut(descriptor, inode)}
        if ended:
            self._cut.update(ended)
            self._note_threads()  # a thread of Python's that ends is not in its table for a while, but still there
            log.info("NCCL's bootstrap waits for a rank that is gone; connections shut down: %d", len(ended))
        return len(ended)

    def keep_cutting(self, ended: Callable[[float], object], seconds: float) -> None:
        """Beside the aborts, since connections may still be made.

        Args:
            ended: waits for the end of the aborts, so many seconds, and returns whether they have ended.
            seconds: when to give up in any case.
        """
        end = clock.monotonic() + seconds
        while not ended(AGAIN) and clock.monotonic() < end:
            self.cut()

    def _candidates(self) -> dict[int, int]:
        assert self._before is not None
        found = {inode: fd for inode, fd in self._new() if _looks_like_nccls(fd, inode)}
        for _ in range(LOOKS):
            if not found:
                return found
            busy = _polled().union(_watched())
            found = {inode: fd for inode, fd in found.items() if inode not in busy}
            threading.Event().wait(APART)
        return _without_pythons(found) if found else found

    def _new(self) -> Iterator[tuple[int, int]]:
        old = self._cut.union(self._before or ())
        return ((inode, fd) for inode, fd in procfs.sockets().items() if inode not in old)

    def _note_threads(self) -> None:
        if self._cut:
            self._suspects.update(set(procfs.tasks()) - self._tasks_before)
            self._pythons.update(str(thread.native_id) for thread in threading.enumerate())


# --- whether a communicator may be in the making ------------------------------------------------------------------


def _may_be_inside() -> bool:
    if groups.is_making():
        return True
    names = {frame.f_code.co_name for _, frame in running_frames() if whereabouts.in_collective(frame)}
    if not names:
        return False
    return not names.isdisjoint(_TO_ONE) or _has_unused_group()


def _has_unused_group() -> bool:
    """Whether a group has not yet done its first collective, which makes its communicator; also where none is known."""
    current = groups.current()
    return not current or any(nccl.is_used_by(group) and _collectives_of(group) <= 1 for group in current)


def _collectives_of(group: Any) -> int:
    """How many a group has begun; it counts before it makes its communicator (``ProcessGroupNCCL::collective``)."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return 0


# --- which sockets are its own ------------------------------------------------------------------------------------


def _looks_like_nccls(descriptor: int, inode: int) -> bool:
    copy = procfs.copy_of(descriptor, inode)
    if copy is None:
        return False
    with copy:
        try:
            return (
                not os.get_blocking(copy.fileno())
                and copy.family in _FAMILIES
                and copy.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
                and bool(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                and copy.getsockname()[0] not in _WILDCARDS
            )
        except OSError:
            return False


def _polled() -> set[int]:
    return {inode for poll in procfs.polls() for descriptor in poll.descriptors if (inode := _inode(descriptor))}


def _inode(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_ino
    except (OSError, OverflowError):  # closed, or not in use: -1
        return 0


def _watched() -> set[int]:
    return {entry.inode for epoll in procfs.epolls() for entry in procfs.registered(epoll)}


def _without_pythons(found: dict[int, int]) -> dict[int, int]:
    """Those of which no socket object knows. Takes 25 ms with 300,000 objects."""
    kinds = _with_subclasses(socket.socket)
    owned = {_inode(each.fileno()) for each in gc.get_referrers(*kinds) if issubclass(type(each), socket.socket)}
    return {inode: descriptor for inode, descriptor in found.items() if inode not in owned}


def _with_subclasses(kind: type) -> set[type]:
    """A class, and all that are derived from it."""
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _shut(descriptor: int, inode: int) -> bool:
    copy = procfs.copy_of(descriptor, inode)
    if copy is None:
        return False
    with copy:
        try:
            copy.shutdown(socket.SHUT_RDWR)  # of a listener, too: rank 0's thread accepts until then
        except OSError:  # not connected, or not any more
            return False
    return True


def _is_nameless(task: str) -> bool:
    """NCCL gives its threads no names: they have the main thread's."""
    with contextlib.suppress(OSError):
        return procfs.read(f"/proc/self/task/{task}/comm") == procfs.read("/proc/self/comm")
    return False


#: one per process; `call.parts` begins and ends it
bootstrap = Bootstrap()
