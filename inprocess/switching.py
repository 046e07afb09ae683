"""The interpreter's switch interval while a restart is under way.

A thread that wants the interpreter lock while another one runs Python code waits for one switch interval, 5 ms by
default, and gives the lock up again at its next system call. The abort makes some 80 system calls: beside a training
function that computes in Python it took 0.2 to 0.4 s, most of it waiting for the lock. So the interval is short from
the moment an interruption is known until the function is called again.
"""

from __future__ import annotations

import sys
import threading

#: seconds; about what the switch itself takes
SHORT = 2e-5


class SwitchInterval:
    """Shortens the interpreter's switch interval, and puts it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # under the lock: whether a call is running; the program's own interval while it is replaced
        self._running = False
        self._before: float | None = None

    def begin(self) -> None:
        """A call begins: from now on the interval may be shortened."""
        with self._lock:
            self._running = True

    def shorten(self) -> None:
        """An interruption is known. Any thread."""
        with self._lock:
            if self._running and self._before is None and sys.getswitchinterval() > SHORT:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(SHORT)

    def restore(self) -> None:
        """The function is called again. What the program itself has set meanwhile stays."""
        with self._lock:
            before, self._before = self._before, None
            if before is not None and abs(sys.getswitchinterval() - SHORT) < SHORT / 10:
                sys.setswitchinterval(before)

    def end(self) -> None:
        """The call is over: a MonitorThread that is late changes nothing any more."""
        with self._lock:
            self._running = False
        self.restore()


#: one per process, like the interpreter's interval
switch_interval = SwitchInterval()
