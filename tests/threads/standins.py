"""What NCCL's host code does, as far as this library can tell: sockets and system calls of this very process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
POLLIN = 1
#: as many as NCCL's service thread waits for, and how long (milliseconds)
ENTRIES, POLL_MS = 65, 500


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Polling(threading.Thread):
    """A thread in the C library's ``poll`` or ``ppoll``: the last descriptor is a listener's, the first ends it."""

    def __init__(self, last: int, entries: int, milliseconds: int, call: str, events: int) -> None:
        super().__init__(daemon=True)
        self._end, self._write = os.pipe()
        descriptors = [self._end, *[-1] * (entries - 2), last]
        packed = b"".join(struct.pack("=ihh", each, POLLIN if each == self._end else events, 0) for each in descriptors)
        self._array, self._entries = ctypes.create_string_buffer(packed, len(packed)), entries
        self._milliseconds, self._call = milliseconds, call
        self.begins, self.over = threading.Event(), threading.Event()
        #: whether the last one was ready
        self.woken = False

    def run(self) -> None:
        """Again and again, as NCCL's thread does, until there is something."""
        self.begins.set()
        while not self._wait():
            pass
        last = struct.unpack_from("=ihh", self._array.raw, 8 * (self._entries - 1))
        self.woken = bool(last[2] & POLLIN)
        self.over.set()

    def _wait(self) -> int:
        if self._call == "poll":
            return int(LIBC.poll(self._array, self._entries, self._milliseconds))
        time = Timespec(self._milliseconds // 1000, self._milliseconds % 1000 * 1_000_000)
        return int(LIBC.ppoll(self._array, self._entries, ctypes.byref(time), None))

    def end(self) -> None:
        os.write(self._write, b"x")
        self.join(10)
        os.close(self._end)
        os.close(self._write)


@contextlib.contextmanager
def polling(
    last: int, entries: int = ENTRIES, milliseconds: int = POLL_MS, call: str = "poll", events: int = POLLIN
) -> Iterator[Polling]:
    """Begun, and certainly in its system call. Without ``events`` it waits for the other end to close."""
    thread = Polling(last, entries, milliseconds, call, events)
    thread.start()
    thread.begins.wait(10)
    syscall = Path(f"/proc/self/task/{thread.native_id}/syscall")
    numbers = ("7", "271", "73")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is over already
        while syscall.read_text().split()[0] not in numbers:
            os.sched_yield()
    try:
        yield thread
    finally:
        thread.end()


def listener(blocking: bool = False, host: str = "127.0.0.1") -> socket.socket:
    made = socket.create_server((host, 0))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setblocking(blocking)
    return made


def connection() -> tuple[socket.socket, socket.socket]:
    """The two ends of one, as NCCL's bootstrap makes them."""
    with listener(blocking=True) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for end in (ours, theirs):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def is_open(descriptor: int) -> bool:
    """Whether reading from it would have to wait."""
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return True


def inside_torch(name: str, file: str = "distributed_c10d.py") -> object:
    """A function of torch's, by its name and file, that calls what it is given."""
    import torch.distributed as dist

    place = os.path.normpath(os.path.join(os.path.dirname(dist.__file__), file))
    names: dict[str, object] = {}
    exec(compile(f"def {name}(action):\n    return action()\n", place, "exec"), names)
    return names[name]


def close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def last_error() -> str:
    """Of the last call of `LIBC` in this thread."""
    return errno.errorcode[ctypes.get_errno()]


@contextlib.contextmanager
def native_thread() -> Iterator[None]:
    """A thread of which Python knows nothing."""
    semaphore, thread = ctypes.create_string_buffer(64), ctypes.c_ulong()
    LIBC.sem_init(semaphore, 0, 0)
    LIBC.pthread_create(ctypes.byref(thread), None, LIBC.sem_wait, semaphore)
    try:
        yield
    finally:
        LIBC.sem_post(semaphore)
        LIBC.pthread_join(thread, None)
