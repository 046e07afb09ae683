"""The training process's side of its monitor process: start it, hear from it, say goodbye, replace it when it died.

The monitor is a program of its own, started with exec in its own session; nothing of this process is forked. The two
share the board, and a socket with one JSON object per line. Death is told by pidfds alone, never by the end of the
socket: children forked by the user may hold copies of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from inprocess.exception import OptionError, RestartError, StoreLost, TimeoutError
from inprocess.monitor import starting
from inprocess.monitor.board import Board
from inprocess.monitor.configuration import MonitorConfig
from inprocess.monitor.starting import memory_file, search_path
from inprocess.protocol.keys import JOINING
from inprocess.protocol.membership import Membership
from inprocess.system import clock, descriptors
from inprocess.system.interpreter import SLICE
from inprocess.system.json_lines import Lines, send_now
from inprocess.system.latch import Latch

__all__ = ["MonitorConfig", "MonitorProcess", "reap_lingering"]

#: a monitor that dies this often within so many seconds will not live
REPLACEMENTS, PER_SECONDS = 5, 60.0
#: how long it is listened to before the board is looked at again (seconds); what it says wakes at once
POLL_INTERVAL_S = 0.05
#: a monitor that stands still for less is left alone (seconds): a new one would take about as long to begin
SHORTEST_SILENCE_S = 3.0
#: how long one that was killed may take to end (seconds); after that, later calls reap it
KILL_WARNING_S = 5.0

#: monitors that stay after the call because others need them: pid -> the port they serve; reaped by later calls
_lingering: dict[int, int | None] = {}


class _Ends:
    """The descriptors of one monitor: closed once it has been dropped and nobody looks at them any more.

    Otherwise somebody would wait for, or read from, what has got the same number since.
    """

    def __init__(self, pidfd: int, control: socket.socket) -> None:
        self.pidfd, self.control = pidfd, control
        self._lock = threading.Lock()
        # under the lock: the monitor's own, and one for each thread inside `in_use`
        self._users = 1

    @contextlib.contextmanager
    def in_use(self) -> Iterator[bool]:
        """They stay open meanwhile; False: they are closed already."""
        is_open = False
        try:
            with self._lock:
                is_open = self._users > 0
                self._users += is_open
            yield is_open
        finally:
            if is_open:
                self.let_go()

    def let_go(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                os.close(self.pidfd)
                self.control.close()


class MonitorProcess:
    """One rank's monitor process during one call. Methods may be called from any thread.

    Args:
        config: what it has to know; ``training_pid`` and ``sys_path`` are filled in by :meth:`start`.
        board: shared with it.
    """

    def __init__(self, config: MonitorConfig, board: Board) -> None:
        self.config = config
        self._board = board
        self._process: starting.Program | None = None
        # replaced, never changed: may be read without the lock
        self._ends: _Ends | None = None
        self._lines = Lines()
        # protects the fields below and reading from the socket
        self._lock = threading.RLock()
        # set when the next one has started; replaced by then. Of two threads that wait, one is woken at once
        self._another = Latch()
        self._said: dict[str, Any] = {}
        self._deaths: list[float] = []
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id; None where none was started, or it has been reaped."""
        return None if self._process is None else self._process.pid

    @contextlib.contextmanager
    def pidfd(self) -> Iterator[int]:
        """Becomes readable when the monitor has died; -1 where there is none. Stays open meanwhile."""
        if (ends := self._ends) is None:
            yield -1
            return
        with ends.in_use() as is_open:
            yield ends.pidfd if is_open else -1

    @property
    def silence(self) -> float:
        """Seconds without life on the board after which it has to be killed: before the others miss its heartbeats.

        Not the one that serves the store: without it the job ends.
        """
        share = max(self.config.heartbeat_timeout / 3, SHORTEST_SILENCE_S)
        return share if self.config.serve_port is None else math.inf

    @property
    def failed(self) -> str | None:
        """Why the monitor gave up, in words; None where it did not (or was killed)."""
        self._hear()
        return self._said.get("failed")

    @property
    def connected(self) -> bool:
        """Whether it has reached the store, so that heartbeats can begin."""
        self._hear()
        return "connected" in self._said

    # --- start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the program; returns at once. It protects this process before it has joined the store.

        Raises:
            RestartError: it cannot be started (no interpreter, no processes left, a kernel before 5.3).
        """
        reap_lingering()
        with self._lock:
            mine: list[int] = []
            ours: socket.socket | None = None
            try:
                self.config = dataclasses.replace(self.config, training_pid=os.getpid(), sys_path=search_path())
                self._said, self._lines = {}, Lines()
                ours, theirs = socket.socketpair()
                inherited = [theirs.detach(), self._board.fd]
                mine += inherited[:1]
                mine.append(memory_file(self.config.to_json()))
                mine.append(os.pidfd_open(os.getpid()))
                mine += self._predecessor()
                self._process = starting.spawn([mine[1], *inherited, *mine[2:]], not self.config.needs_full_torch)
                self._ends = _Ends(os.pidfd_open(self._process.pid), ours)
            except (OSError, AttributeError) as error:
                if ours is not None:
                    ours.close()
                reason = descriptors.shortage(error) or (
                    f"{error}. It needs Linux 5.3 or later, a Python interpreter that can be executed, and one more "
                    "process within the limits (ulimit -u)."
                )
                raise RestartError(f"cannot start the monitor process with {sys.executable!r}: {reason}") from error
            finally:
                for fd in mine:
                    os.close(fd)
            another, self._another = self._another, Latch()
            another.set()

    def _predecessor(self) -> list[int]:
        """A descriptor of the monitor that still serves our port for an earlier call, if there is one."""
        port = self.config.serve_port
        pids = [pid for pid, its_port in _lingering.items() if port and its_port == port]
        return [os.pidfd_open(pid) for pid in pids[-1:]]

    def wait_serving(self, timeout: float) -> int:
        """Wait until the base store is up (only where ``serve_port`` is set); returns its port.

        Raises:
            OptionError: the port is taken, or another option is wrong.
            RestartError: the monitor failed or died.
            TimeoutError: nothing of that within ``timeout`` seconds.
        """
        return int(self._await("serving", timeout))

    def listen(self, timeout: float) -> None:
        """Wait until the monitor says something, or another one takes its place; ``timeout`` seconds at most."""
        another = self._another
        if not self._hear(timeout):
            another.wait(timeout)

    def _await(self, what: str, timeout: float) -> Any:
        deadline = clock.monotonic() + timeout
        while what not in self._said:
            # in slices: the monitor protects this process already, and may take long to import torch
            alive = self._hear(max(0.0, min(SLICE, deadline - clock.monotonic())))
            if "failed" in self._said:
                self.check()
            if not alive and what not in self._said:
                raise RestartError(f"the monitor process died before it said {what!r}; its log has more")
            if what not in self._said and clock.monotonic() >= deadline:
                raise TimeoutError(
                    f"the monitor process did not say {what!r} within {timeout:g} s (barrier_timeout). Is the store at "
                    f"{self.config.store} up, and the host not overloaded?"
                )
        return self._said[what]

    def check(self) -> None:
        """Raises OptionError or RestartError where the monitor gave up, with its reason."""
        text = self.failed
        if text is not None:
            raise (OptionError if self._said.get("option") else RestartError)(text)

    def await_connected(self, timeout: float) -> None:
        """Wait until it has reached the store. Raises TimeoutError, or why there is none."""
        missing = f"the monitor process did not reach the store within barrier_timeout={timeout:g}s"
        self.await_until(lambda: self.connected, timeout, missing)

    def await_until(self, ready: Callable[[], bool], timeout: float, missing: str) -> None:
        """Wait until it, or the one that the watchdog starts in its place, has come so far.

        Raises TimeoutError with the words ``missing``, or why there is none.
        """
        deadline = clock.monotonic() + timeout
        while not ready():
            self.check()
            if clock.monotonic() >= deadline:
                raise TimeoutError(missing)
            self.listen(POLL_INTERVAL_S)

    def identify(self, member: int) -> None:
        """Tell it, and those that may replace it, the id on the ticket of this process."""
        with self._lock:
            self.config = dataclasses.replace(self.config, member=member, roster=(), identified=True)
            self._tell(member=member)  # one that is dead: the next one reads it from its configuration

    def moves(self) -> None:
        """This process asks an arbiter where the job goes on; no heartbeats any more."""
        with self._lock:
            self._tell(moves=True)

    def _tell(self, **message: Any) -> None:
        """Under the lock."""
        if self._ends is not None:
            send_now(self._ends.control, message)

    def serves(self, port: int) -> None:
        """It serves the store from now on, on this port: who takes it over one day waits for its end."""
        with self._lock:
            self.config = dataclasses.replace(self.config, serve_port=port)

    def step_aside(self) -> None:
        """The port is served already, by a monitor of the same job: start one that does not serve."""
        with self._lock:
            self.config = dataclasses.replace(self.config, serve_port=None, rendezvous="never")
            self._drop()
            self.start()

    # --- hearing from it -------------------------------------------------------------------------------------------

    def _hear(self, timeout: float = 0.0) -> bool:
        """Take in what it says, waiting up to ``timeout`` seconds for something; False where it is dead."""
        if (ends := self._ends) is None:
            return False
        with ends.in_use() as is_open:
            return is_open and self._hear_from(ends, timeout)

    def _hear_from(self, ends: _Ends, timeout: float) -> bool:
        poll = select.poll()
        poll.register(ends.pidfd, select.POLLIN)
        poll.register(ends.control, select.POLLIN)
        ready = dict(poll.poll(descriptors.milliseconds(timeout)))
        with self._lock:
            while self._ends is ends and self._receive(ends.control):
                pass
        return ends.pidfd not in ready

    def _receive(self, control: socket.socket) -> bool:
        try:
            data = control.recv(1 << 16, socket.MSG_DONTWAIT)
        except OSError:
            return False
        for message in self._lines.take(data):
            self._said.update(message)
        return bool(data)

    # --- the end ---------------------------------------------------------------------------------------------------

    def bye(self, how: str, why: str = "") -> None:
        """Tell the monitor that this rank has left the call, and wait until it has gone.

        One on whose stores others still depend stays; it goes when they are done.

        Args:
            how: "completed"; "left" where the rank itself has said so in the end round; "failed" where it could not:
                then the monitor speaks for it.
            why: for "failed": the reason, for the others' reports.
        """
        with self._lock:
            if self._ends is None or self._closed:
                return
            self._tell(bye=how, why=why[:400])  # one that is dead is seen below
        deadline = clock.monotonic() + self.config.termination_grace_time
        try:
            while self._hear(max(0.0, deadline - clock.monotonic())):
                if "lingering" in self._said:
                    self._let_linger()
                if self._process is None or clock.monotonic() >= deadline:
                    break
        except BaseException:  # Ctrl-C: it does what it was told, and a later call reaps it
            self._let_linger()
            raise
        finally:
            self.close()

    def _let_linger(self) -> None:
        with self._lock:
            if self._process is not None:
                _lingering[self._process.pid] = None if "idle" in self._said else self.config.serve_port
                # reaped by reap_lingering; its destructor must not complain
                self._process.returncode = 0
                self._process = None

    def close(self) -> None:
        """Kill the monitor if it is still there, reap it, and close everything. More than once is fine."""
        with self._lock:
            self._closed = True
            self._drop()
        reap_lingering()

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()  # by Popen, which knows whether it has been reaped
            try:
                self._process.wait(KILL_WARNING_S)
                self._process = None
            except subprocess.TimeoutExpired:  # the kernel keeps it, for a disk that does not answer
                self._let_linger()
        if self._ends is not None:
            self._ends.let_go()
            self._ends = None

    # --- replacing it ----------------------------------------------------------------------------------------------

    def replace(self, membership: Membership) -> bool:
        """Start a new monitor after one has died; ``membership``: of this process. False: the call has ended already.

        Raises:
            StoreLost: the dead one served the store.
            OptionError, RestartError: it gave up for a reason that a new one would share, or too many died.
        """
        with self._lock:
            if self._closed:
                return False
            if self._hear():  # there is another one already
                return True
            self.check()
            if self.config.serve_port is not None:
                raise StoreLost("the monitor process that served the store was killed, and the store with it")
            self._count_death()
            # perhaps the light import of torch is what ended it, unless somebody else did
            crashed = "joined" not in self._said and self._ended_by() != signal.SIGKILL
            self.config = dataclasses.replace(self.config, full_torch=self.config.full_torch or crashed)
            if membership.iteration > JOINING:
                self.config = dataclasses.replace(
                    self.config,
                    member=membership.member,
                    roster=membership.roster,
                    iteration=membership.iteration,
                    known=tuple(sorted(membership.known)),
                    slots=tuple(chain.from_iterable(sorted(membership.slots.items()))),
                    identified=True,
                )
            self._drop()
            self.start()
            return True

    def _ended_by(self) -> int:
        """The signal that ended a monitor that is dead; 0 where it exited."""
        return 0 if self._process is None else max(0, -self._process.wait())

    def _count_death(self) -> None:
        now = clock.monotonic()
        self._deaths = [when for when in self._deaths if now - when < PER_SECONDS] + [now]
        if len(self._deaths) > REPLACEMENTS:
            raise RestartError(
                f"the monitor process died {len(self._deaths)} times within {PER_SECONDS:g} s; its log says why "
                f"(monitor_process_logfile={self.config.logfile!r}), unless something kills it"
            )


def reap_lingering() -> list[int]:
    """Collect monitors of earlier calls that have ended meanwhile; answers those that go on and serve no port, such as
    those that write a report."""
    for pid in list(_lingering):
        try:
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:  # reaped by somebody else, or this is a forked child
            ended = True
        if ended:
            _lingering.pop(pid, None)
    return [pid for pid, port in _lingering.items() if port is None]
