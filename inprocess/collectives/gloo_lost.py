"""Operations that Gloo has lost: a thread waits for one, and nothing will ever end that wait but the group's timeout.

Two ways into that state were seen (docs/design/gloo.md). A send whose write failed in Gloo's event thread is in none
of the lists that are told of the error. And where several operations are under way, one that fails on one connection
gives up its buffer, after which Gloo reads no further on another connection: shutting that one down tells nobody.

How such a wait is found: the kernel tells for each thread in which system call it is, and for a wait on a condition
variable at which address. The variable is a member of Gloo's buffer, an object that begins with the address of its
class's table. How it is ended: by the method with which Gloo itself tells a buffer of an error; the wait then fails
as it does for any lost connection.

Only after an abort, which has shut all connections down, and only a thread that stands at the same place for
`LOST_AFTER_S`: the wait of a healthy operation ends in milliseconds then. While the function is being left every
thread counts, since no rank begins the next iteration before that. Later only threads count that were there when the
connections were shut down: those of the next groups are new. Between the look and the call there are microseconds in
which the wait may end by itself; in that time the buffer would have to be freed, too, to do harm.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from inprocess.system import clock, procfs, symbols
from inprocess.system.logs import get_logger

log = get_logger(__name__)
#: seconds after which a wait at the same place is a lost one; a healthy one ends within milliseconds of the shutdown
LOST_AFTER_S = 0.25
#: seconds between two looks at the threads
LOOK_EVERY_S = 0.05
#: the numbers of the system calls futex and restart_syscall: the latter where the process was stopped meanwhile
_FUTEX = {"x86_64": ("202", "219"), "aarch64": ("98", "128")}
#: Gloo's buffer: the table of its class, with two words before what objects point to; its method for errors
_TABLE, _BEFORE = "_ZTVN4gloo9transport3tcp13UnboundBufferE", 16
_SIGNAL = "_ZN4gloo9transport3tcp13UnboundBuffer15signalExceptionENSt15__exception_ptr13exception_ptrE"
#: bytes of a buffer before its last condition variable's end; 176 in torch 2.13
_SIZE = 256
_WORD = 8


@dataclass(frozen=True)
class Wait:
    """A thread that waits in one of Gloo's buffers."""

    task: str
    #: of the condition variable's word on which it waits
    futex: int
    buffer: int


class LostOperations:
    """Those of this process. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # under the lock: the threads that there were at the last shutdown; since when (s) each wait has been seen
        self._tasks: frozenset[str] = frozenset()
        self._since: dict[Wait, float] = {}
        #: when (s) threads were looked at, or when connections were first shut down; None: not since `begin`
        self._looked: float | None = None

    def begin(self) -> None:
        """Everybody has left the function."""
        with self._lock:
            self._since.clear()
            self._looked = None

    def note(self) -> None:
        """Gloo's connections were just shut down."""
        tasks = frozenset(procfs.tasks())
        with self._lock:
            self._tasks = tasks
            self._looked = self._looked or clock.monotonic()

    def release(self) -> int:
        """Called again and again while the function is being left: end what is lost; returns how many waits."""
        if self._looked is None or clock.monotonic() - self._looked < LOOK_EVERY_S:
            return 0
        return self._release(None)

    def release_rest(self) -> int:
        """After that: where a thread of the last groups still waits, see whether it goes on waiting, and end that."""
        with self._lock:
            tasks = self._tasks - {str(thread.native_id) for thread in threading.enumerate()}
        count, until = 0, clock.monotonic() + 2 * LOST_AFTER_S
        while _waiting(tasks) and clock.monotonic() < until:
            count += self._release(tasks)
            threading.Event().wait(LOOK_EVERY_S)
        return count

    def _release(self, tasks: Collection[str] | None) -> int:
        """Of these threads; None: of all."""
        with self._lock:  # two callers must not tell one buffer: after the first its thread may free it
            now = self._looked = clock.monotonic()
            found = _waiting(tasks)
            others = {} if tasks is None else {wait: at for wait, at in self._since.items() if wait.task not in tasks}
            self._since = others | {wait: self._since.get(wait, now) for wait in found}
            return sum(_end(wait) for wait in found if now - self._since[wait] >= LOST_AFTER_S)


def _waiting(tasks: Collection[str] | None) -> list[Wait]:
    """Those of the threads (None: of all) that wait in one of Gloo's buffers; none where that cannot be told."""
    try:
        return _waits(tasks)
    except (OSError, symbols.Missing) as error:  # no descriptor is left, a kernel that does not tell, another Gloo
        log.debug("operations that Gloo lost cannot be found: %s", error)
        return []


def _waits(tasks: Collection[str] | None) -> list[Wait]:
    """As `_waiting`. Raises OSError, Missing."""
    calls, table = _FUTEX.get(platform.machine()), _table()
    if calls is None:
        raise symbols.Missing(f"the system calls of {platform.machine()} are not known here")
    threads = procfs.tasks() if tasks is None else tasks
    return [wait for task in threads if (wait := _wait_of(task, calls, table)) is not None]


def _wait_of(task: str, calls: Collection[str], table: int) -> Wait | None:
    words = procfs.system_call(task)
    if len(words) < 2 or words[0] not in calls:
        return None
    futex = int(words[1], 16)
    aligned = futex & -_WORD
    try:
        memory = procfs.memory(aligned - _SIZE, _SIZE)
    except OSError:  # not so much of it is mapped: a stack, or an object at the beginning of its page
        return None
    for offset in range(len(memory) - _WORD, -1, -_WORD):
        if int.from_bytes(memory[offset : offset + _WORD], sys.byteorder) == table:
            return Wait(task, futex, aligned - _SIZE + offset)
    return None


@functools.cache
def _table() -> int:
    return symbols.address(_TABLE) + _BEFORE


@functools.cache
def _signal() -> Any:
    return symbols.function(_SIGNAL, ctypes.c_void_p, ctypes.c_void_p)


def _end(wait: Wait) -> bool:
    """Tell the buffer of an error, unless its thread went on meanwhile."""
    tell = _signal()
    with symbols.ExceptionPointer(b"the connection was shut down by a restart, and Gloo lost the operation") as error:
        if _wait_of(wait.task, _FUTEX[platform.machine()], _table()) != wait:
            return False
        tell(wait.buffer, error)
    log.debug("an operation that Gloo had lost was ended")
    return True


#: one per process, like torch's process groups
lost_operations = LostOperations()
