"""A page of shared memory on which a worker without a Wrapper shows its launcher how it is. No decisions here.

The worker makes it, seals its size and hands it over; the launcher takes it only with the seals, since reading memory
that somebody cuts short would end the launcher. One process writes. A change of several slots is put between two steps
of VERSION, so that a copy is of one moment; a ``ping()`` is a single aligned 64-bit store and needs none. The memory
has no name on disk (memfd).
"""

from __future__ import annotations

import fcntl
import mmap
import os

from inprocess.monitor.timeouts import Seen

__all__ = ["BEGAN", "PING", "WatchBoard"]

#: the last ``ping()`` (ns)
PING = 0
#: odd while the slots below are being changed
VERSION = 1
#: the slots that follow are the fields of ``timeouts.Seen``
BEGAN = 2
USED = 3
SECTION_SINCE = 4
SECTION_LIMIT = 5
OUTSIDE_SINCE = 6
FIRST_LIMIT = 7
PING_LIMIT = 8
OUTSIDE_LIMIT = 9
ORIGIN = 10
_COUNT = 11
#: bytes for the name of the section, after the slots
_NAME = 64
_SIZE = 8 * _COUNT + _NAME
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: copies until one is of one moment; a writer that was stopped half way is taken as it is
_TRIES = 8


class WatchBoard:
    """Shared memory of one worker and its launcher. Make it with :meth:`create` or :meth:`attach`.

    ``slots[PING]`` may be written directly, at any time; everything else through :meth:`show`.
    """

    def __init__(self, fd: int, access: int) -> None:
        #: to hand to the launcher; -1 once it is closed
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE, access=access)
        self.slots: memoryview[int] = memoryview(self._memory)[: 8 * _COUNT].cast("q")

    @classmethod
    def create(cls) -> WatchBoard:
        """A new board whose size nobody can change."""
        fd = os.memfd_create("inprocess-watch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, mmap.ACCESS_WRITE)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> WatchBoard:
        """The board behind a descriptor that somebody handed over. It owns the descriptor from here on.

        Raises ValueError where it is something else: no memory, or memory that can be cut short.
        """
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK and os.fstat(fd).st_size == _SIZE
            if not sealed:
                raise ValueError("the memory has no seal on its size")
            return cls(fd, mmap.ACCESS_READ)
        except OSError as error:
            os.close(fd)
            raise ValueError(f"the descriptor is no shared memory: {error}") from None
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the descriptor; more than once is fine.

        The memory itself goes with the last reference to ``slots``: another thread may be writing a ``ping()``.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def show(self, seen: Seen) -> None:
        """Everything but the ping; by one thread at a time."""
        slots = self.slots
        slots[VERSION] |= 1
        slots[BEGAN], slots[USED] = seen.began, int(seen.used)
        slots[SECTION_SINCE], slots[SECTION_LIMIT] = seen.section_since, seen.section_limit
        slots[OUTSIDE_SINCE] = seen.outside_since
        slots[FIRST_LIMIT], slots[PING_LIMIT] = seen.first_limit, seen.ping_limit
        slots[OUTSIDE_LIMIT], slots[ORIGIN] = seen.outside_limit, seen.origin
        self._memory[8 * _COUNT : _SIZE] = seen.section.encode(errors="replace")[:_NAME].ljust(_NAME, b"\0")
        slots[VERSION] += 1

    def seen(self) -> Seen:
        """A copy of one moment. Whatever is written there, the answer is well formed."""
        slots = self.slots
        for _ in range(_TRIES):
            before = slots[VERSION]
            values, name = slots.tolist(), self._memory[8 * _COUNT : _SIZE]
            if before == slots[VERSION] and not before & 1:
                break
        return Seen(
            began=values[BEGAN],
            used=bool(values[USED] or values[PING]),
            ping=values[PING],
            section_since=values[SECTION_SINCE],
            section_limit=max(0, values[SECTION_LIMIT]),
            section=name.rstrip(b"\0").decode(errors="replace"),
            outside_since=values[OUTSIDE_SINCE],
            first_limit=max(0, values[FIRST_LIMIT]),
            ping_limit=max(0, values[PING_LIMIT]),
            outside_limit=max(0, values[OUTSIDE_LIMIT]),
            origin=values[ORIGIN],
        )
