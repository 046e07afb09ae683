"""What the interpreter does of its own accord, and should not do while a restart is under way.

*Switching threads.* A thread that wants the interpreter lock while another one runs Python code waits for one switch
interval, 5 ms by default, and gives the lock up again at its next system call. The abort makes many of them: beside a
training function that computes in Python it took 0.2 to 0.4 s, most of it waiting for the lock.

*Collecting garbage.* A full collection in a process with torch takes 30 to 40 ms, and up to 300 ms in one that was
forked, since it copies every page. It begins when enough objects have been made, on all ranks at the same moment.

So from the moment an interruption is known until the function is called again the interval is short and no collection
begins. What is freed by its last reference is freed as ever.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import TypeVar

from inprocess.system import clock

T = TypeVar("T")
#: seconds; about what a switch between two threads takes
SHORT = 2e-5
#: a main thread that waits wakes this often, so that pending calls (progress stamps) run (seconds)
SLICE = 0.5


def sleep_with_progress(seconds: float) -> None:
    """In the main thread: wait for nothing, and show now and then that it runs."""
    until, nobody = clock.monotonic() + seconds, threading.Event()
    while (left := until - clock.monotonic()) > 0:
        nobody.wait(min(left, SLICE))


def join_with_progress(thread: threading.Thread, seconds: float) -> bool:
    """In the main thread: wait until that one ends, and show now and then that this one runs. Whether it has ended."""
    until = clock.monotonic() + seconds
    while thread.is_alive() and (left := until - clock.monotonic()) > 0:
        thread.join(min(left, SLICE))
    return not thread.is_alive()


def repeat_with_progress(action: Callable[[], T], seconds: float, pause: float) -> T:
    """In the main thread: repeat this until it returns nothing, and show now and then that this one runs. What it
    returns last: something where the time was over."""
    until = clock.monotonic() + seconds
    while (found := action()) and clock.monotonic() <= until:
        sleep_with_progress(pause)
    return found


def running_frames() -> Iterator[tuple[int, FrameType]]:
    """What all threads are at: the thread and each of its frames, from the innermost outwards."""
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None:
            yield thread, frame
            frame = frame.f_back


def is_inside(names: Collection[str], file: str) -> bool:
    """Whether a thread is inside a function of one of these names, in a file whose path ends so."""
    codes = (frame.f_code for _, frame in running_frames() if frame.f_code.co_name in names)
    return any(code.co_filename.endswith(file) for code in codes)


class Interpreter:
    """Makes the interpreter hurry, and puts back what it changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # under the lock: whether a call is running; the program's own interval while it is replaced; whether garbage
        # collection was turned off here
        self._running = False
        self._interval: float | None = None
        self._collects = False

    def begin(self) -> None:
        """A call begins: from now on `hurry` does something."""
        with self._lock:
            self._running = True

    def hurry(self) -> None:
        """An interruption is known. Any thread; again does nothing."""
        with self._lock:
            if not self._running:
                return
            if self._interval is None and sys.getswitchinterval() > SHORT:
                self._interval = sys.getswitchinterval()
                sys.setswitchinterval(SHORT)
            if gc.isenabled():
                self._collects = True
                gc.disable()

    def relax(self) -> None:
        """The function is called again. What the program itself has set meanwhile stays."""
        with self._lock:
            # forgotten once it is back: Ctrl-C may come in between, and `end` follows
            if self._interval is not None and abs(sys.getswitchinterval() - SHORT) < SHORT / 10:
                # Python cuts off what is below a microsecond, also of what it has just told: 231 us became 230
                sys.setswitchinterval(self._interval + 5e-7)
            self._interval = None
            if self._collects:
                gc.enable()
            self._collects = False

    def end(self) -> None:
        """The call is over: a MonitorThread that is late changes nothing any more."""
        with self._lock:
            self._running = False
        self.relax()


#: one per process
interpreter = Interpreter()
