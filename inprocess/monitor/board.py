"""The board: a page of shared memory on which a rank shows its monitor process how it is. No decisions here.

Every slot is one aligned 64-bit integer with one writer: the training process, except for LEASE, WATCHED, ASKED and
ENDING. It sets what belongs to an iteration before it sets ITERATION, and the reader looks at ITERATION and PHASE
before and after its copy: a copy is never half of one iteration and half of the next. The memory has no name on disk
(memfd).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from inprocess.monitor.policy import Snapshot
from inprocess.protocol.phases import CODES, PHASES, Phase
from inprocess.system import thread_end
from inprocess.system.clock import monotonic_ns

__all__ = ["Board", "Snapshot"]

#: when the main thread last ran bytecode (ns)
PROGRESS = 0
#: the last manual ping (ns), which counts from its first use in an iteration; 0: not used in this one
PING = 1
#: the iteration the rank is in; -1 while joining
ITERATION = 2
#: code of the phase, see ``protocol.phases.CODES``
PHASE = 3
#: 1 on a rank that waits and does not call the function
RESERVE = 4
#: 1: inside ``atomic()``
ATOMIC = 5
#: how many ``disable_hang_protection()`` blocks are open
UNHANG = 6
#: soft timeout of the section the rank is in (ns); 0: the option's
SOFT = 7
#: the last iteration whose function has been left
ANSWERED = 8
#: rank in the frame
RANK = 9
#: 1: the call is over on this rank, nothing is watched any more
LEFT = 10
#: until when the others do not go on without this rank (ns), written by the monitor: a new monitor goes on with it;
#: 0: no heartbeat yet, or there are no others
LEASE = 11
#: when the monitor last applied its rules (ns), written by it once it has reached the store; 0: not yet
WATCHED = 12
#: pings of the iteration; the watchdog renews it, so it may be as late as `progress_watchdog_interval`
STEPS = 13
#: active ranks and reserves of the iteration; 0 and 0: not known yet
ACTIVE = 14
RESERVES = 15
#: the number of the latest request for stacks, written by the monitor, and of the one that was answered last
ASKED = 16
TAKEN = 17
#: how long that answer is (bytes); it lies behind the slots
LENGTH = 18
#: when the watchdog last asked the main thread whether it runs (ns); without an answer there is no newer stamp
QUESTION = 19
#: 1: the monitor ends the rank, so that SIGTERM is its own; written by it
ENDING = 20
_COUNT = 21
_SLOTS = 8 * _COUNT
#: the longest answer (bytes); no memory until one is written
STACKS_BYTES = 1 << 18
#: a mutex that the main thread holds, for `await_end`; on a cache line of its own
_MUTEX = (_SLOTS + STACKS_BYTES + 63) // 64 * 64
_SIZE = _MUTEX + thread_end.SIZE
#: copies until one is consistent; the writer needs a microsecond, so more than one is rare
_TRIES = 8


@dataclass
class Board:
    """Shared memory of one training process and its monitor. Make it with :meth:`create` or :meth:`attach`.

    ``slots`` may be written directly where every 0.1 us counts: ``board.slots[PING] = monotonic_ns()``.
    """

    #: descriptor to hand to the monitor
    fd: int
    slots: memoryview = field(init=False, repr=False)

    def __post_init__(self) -> None:
        #: held while UNHANG is counted: any thread may, and the handler of a signal
        self._counting = threading.RLock()
        self._memory = mmap.mmap(self.fd, _SIZE)
        self.slots = memoryview(self._memory)[:_SLOTS].cast("q")
        #: how many pings there were in this iteration; `ping` itself does not write that here
        self.steps: Callable[[], int] = _none
        self._held: thread_end.Held | None = None

    @classmethod
    def create(cls) -> Board:
        """A new board: joining, progress is now."""
        fd = os.memfd_create("inprocess-board", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _SIZE)
            board = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        board.slots[PROGRESS], board.slots[ITERATION], board.slots[ANSWERED] = monotonic_ns(), -1, -2
        return board

    @classmethod
    def attach(cls, fd: int) -> Board:
        """The board behind a descriptor that was handed over. It owns the descriptor from here on."""
        return cls(fd)

    def close(self) -> None:
        """Unmap and close; more than once is fine. What a thread of the program's still writes, nobody sees."""
        fd, self.fd = self.fd, -1  # first: memory that is unmapped must not be touched again, if Ctrl-C cuts this short
        if fd < 0:
            return
        self.steps = _none
        shared, self.slots = self.slots, self.copied()
        shared.release()
        if self._held is None or self._held.let_go():
            self._memory.close()
        os.close(fd)

    def detach(self) -> None:
        """In a forked child: what is written from now on nobody sees, and no lease ends."""
        self.slots = self.copied()

    def copied(self) -> memoryview:
        """Slots that nobody sees, and whose lease never ends."""
        slots = memoryview(bytearray(self.slots)).cast("q")
        slots[LEASE] = 0
        return slots

    # --- the training process writes ---------------------------------------------------------------------------

    def hold(self) -> None:
        """In the main thread, which is to close the board: the monitor learns at once when it ends."""
        self._held = thread_end.Held(self._memory, _MUTEX)
        self._held.take()

    def begin(self, iteration: int) -> None:
        """The rank goes to this iteration: pings count anew, sections and protection are as the options say."""
        slots = self.slots
        with self._counting:
            slots[PING] = slots[SOFT] = slots[UNHANG] = slots[ATOMIC] = slots[STEPS] = 0
            slots[PROGRESS] = monotonic_ns()
            slots[ITERATION] = iteration

    def enter(self, phase: Phase) -> None:
        """The rank enters a phase, which is progress."""
        self.slots[PROGRESS] = monotonic_ns()
        self.slots[PHASE] = CODES[phase]

    def place(self, rank: int, reserve: bool, active: int = 0, reserves: int = 0) -> None:
        """Which rank it has in the frame, whether it waits as a reserve, and how many do what."""
        slots = self.slots
        slots[RANK], slots[RESERVE], slots[ACTIVE], slots[RESERVES] = rank, int(reserve), active, reserves

    def ask(self) -> None:
        """The main thread is asked whether it runs."""
        self.slots[QUESTION] = monotonic_ns()

    def stamp(self) -> None:
        """Automatic progress: the main thread has run."""
        self.slots[PROGRESS] = monotonic_ns()

    def unprotect(self) -> int:
        """Enter a block without hang protection; any thread. Returns the iteration, for `protect`."""
        with self._counting:
            self.slots[UNHANG] += 1
            return self.slots[ITERATION]

    def protect(self, iteration: int) -> None:
        """Leave a block without hang protection. The time spent in it counts as progress.

        A block that is left in a later iteration than it was entered in (by another thread) is not counted any more.
        """
        self._refresh()
        with self._counting:
            if self.slots[ITERATION] == iteration:
                self.slots[UNHANG] -= 1

    def section(self, soft_timeout: float | None) -> None:
        """Another soft timeout from here on (seconds), None for the option's. The change counts as progress."""
        self._refresh()
        self.slots[SOFT] = 0 if soft_timeout is None else int(soft_timeout * 1e9)

    def patience(self, soft_timeout: float) -> float | None:
        """How long the rank may show no progress, where it is now (seconds); None: for any time."""
        if self.slots[UNHANG]:
            return None
        return self.slots[SOFT] / 1e9 or soft_timeout

    def _refresh(self) -> None:
        now = monotonic_ns()
        self.slots[PROGRESS] = now
        if self.slots[PING]:
            self.slots[PING] = now

    def answer(self, iteration: int) -> None:
        """The function of this iteration has been left."""
        self.slots[PROGRESS] = monotonic_ns()
        self.slots[ANSWERED] = iteration

    def show_steps(self) -> None:
        """As many as there are now."""
        self.slots[STEPS] = self.steps()

    def answer_stacks(self, take: Callable[[], bytes]) -> None:
        """Where the monitor asks for stacks: take them. One thread alone may do that."""
        slots = self.slots
        if (asked := slots[ASKED]) == slots[TAKEN]:
            return
        text = take()[:STACKS_BYTES]
        self._memory[_SLOTS : _SLOTS + len(text)] = text
        slots[LENGTH] = len(text)
        slots[TAKEN] = asked  # last: from here on it is read

    def leave(self) -> None:
        """The call is over on this rank."""
        self.show_steps()
        self.slots[LEFT] = 1

    # --- the monitor reads -------------------------------------------------------------------------------------

    def ask_stacks(self) -> int:
        """Ask for them; returns the number for `stacks`. One thread of the monitor alone may do that."""
        self.slots[ASKED] += 1
        return self.slots[ASKED]

    def stacks(self, number: int) -> bytes | None:
        """The answer to that request; None: not yet. The user's code may have written there, too."""
        if self.slots[TAKEN] != number:
            return None
        return self._memory[_SLOTS : _SLOTS + max(0, min(self.slots[LENGTH], STACKS_BYTES))]

    def await_end(self) -> bool:
        """Wait until the rank's main thread begins to end (True), or the board is closed there."""
        return thread_end.await_end(self._memory, _MUTEX)

    def snapshot(self) -> Snapshot:
        """A copy that does not mix two iterations or phases."""
        slots = self.slots
        for _ in range(_TRIES):
            before = slots[ITERATION], slots[PHASE]
            values = slots.tolist()
            if (slots[ITERATION], slots[PHASE]) == before == (values[ITERATION], values[PHASE]):
                break
        return Snapshot(
            progress=values[PROGRESS],
            ping=values[PING],
            iteration=values[ITERATION],
            phase=PHASES.get(values[PHASE], Phase.JOIN),
            reserve=bool(values[RESERVE]),
            atomic=bool(values[ATOMIC]),
            hang_protection=values[UNHANG] == 0,
            soft_timeout=values[SOFT],
            answered=values[ANSWERED],
            rank=max(0, values[RANK]),  # the user's code may write here too, and a monitor must not die of it
            left=bool(values[LEFT]),
            steps=max(0, values[STEPS]),
            active=max(0, values[ACTIVE]),
            reserves=max(0, values[RESERVES]),
            question=values[QUESTION],
        )


def _none() -> int:
    return 0
