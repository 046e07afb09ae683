"""Warm workers: spare interpreters that have imported what the workers have, and take the place of one that failed.

A process that is started again spends nearly all of its time with imports. A warm worker (`warm_worker` is its program)
has done that before, beside the training, and gets the rest when it is needed: variables, log files, and the word to
run the program. It is a child of the launcher from the beginning, in a session of its own, like every worker.

A failed worker is started cold where no warm one is ready, or where that one was started with other arguments or
variables, apart from those in `SPECIFIC`; where a stopped or dead one does not answer; and always at the first start
and when all workers are restarted, for their store is another one then.

Where the user names no number, one waits as long as the node has memory for it: `ROOM_BYTES` must be available when it
is started, and it ends where less than `LEAST_BYTES` are left. Where memory runs out at once, the kernel takes a warm
worker before a rank (`warm_worker.first_to_go`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import psutil

from inprocess.heartbeats.modules import Modules
from inprocess.launcher.warm_worker import GO, MAX_BYTES, TAKEN
from inprocess.launcher.workers import RESTART_VARIABLE
from inprocess.monitor.starting import memory_file
from inprocess.system import cgroup, clock, descriptors, environment, strict_json
from inprocess.system.logs import get_logger
from inprocess.system.program import first_on_path

__all__ = ["ROOM_BYTES", "SPECIFIC", "WarmWorkers"]

log = get_logger("inprocess.run")
#: variables that differ between the processes of one program on a node
SPECIFIC = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"),
    *(RESTART_VARIABLE, environment.LAUNCHER_KEY, environment.LAUNCHER_LEARNS),
)
#: between the start of workers and that of a warm one (seconds): it is not to be in their way
PAUSE_S = 2.0
#: how long one may import, which it does slowly, and how long it may take to answer (seconds)
IMPORT_LIMIT_S, ANSWER_LIMIT_S = 600.0, 1.0
#: how long one that was killed may take to go (seconds)
KILL_LIMIT_S = 5.0
#: so many in a row that ended before they were used are enough
ATTEMPTS = 8
#: memory that must be available before one is started, and while it waits; how often to look (seconds)
ROOM_BYTES, LEAST_BYTES, LOOK_S = 4 << 30, 2 << 30, 10.0
CODE = """
import sys
if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    sys.path[0] = sys.argv[3]
from inprocess.launcher.warm_worker import main
main()
"""


class WarmWorkers:
    """Those of one launcher. Everything from its main thread, with which they end.

    Args:
        number: how many wait at a time; 0: there are none; None: one, as memory allows.
        preload: modules to import besides those of the workers.
        limits: of open descriptors, as the launcher was given them.
    """

    def __init__(self, number: int | None, preload: Sequence[str], limits: descriptors.DescriptorLimits) -> None:
        self._number, self._preload, self._limits = 1 if number is None else number, tuple(preload), limits
        self._room = _Room() if number is None else None
        self._spares: list[_Spare] = []
        #: command and variables of the workers, and their ``sys.path[0]``
        self._start: tuple[tuple[str, ...], dict[str, str]] | None = None
        self._first = ""
        #: variables that the program, or a module, has set, changed or removed (None); None: not known yet
        self._changed: dict[str, str | None] | None = None
        #: modules that must not be imported ahead
        self._left_out: set[str] = set()
        #: modules of ``preload`` of which was told that they cannot be imported
        self._told: set[str] = set()
        #: how many ended in a row before they were used
        self._failed = 0
        #: when the next may be started (monotonic seconds)
        self._due = 0.0

    def take(
        self, command: tuple[str, ...], env: Mapping[str, str], out: IO[Any] | None, err: IO[Any] | None
    ) -> subprocess.Popen[bytes] | None:
        """A worker is to be started: a warm one that has become it, or None.

        Args:
            command: the interpreter and its arguments.
            env: all variables.
            out, err: None: those of the launcher.
        """
        if not self._number or not _runs_program(command):
            return None
        start = (command, {name: text for name, text in env.items() if name not in SPECIFIC})
        if start != self._start:
            self.close()
            self._start = start
            self._first = os.getcwd() if command[2] == "-m" else first_on_path(command[2])
        self._due = clock.monotonic() + PAUSE_S
        while spare := next((spare for spare in self._spares if spare.ready), None):
            self._spares.remove(spare)
            specific = {name: env[name] for name in SPECIFIC if name in env}
            if spare.hand_over(specific, 1 if out is None else out.fileno(), 2 if err is None else err.fileno()):
                self._failed = 0
                return spare.process
            log.warning("a warm worker (pid %d) does not answer; the worker is started cold", spare.process.pid)
            spare.end()
        return None

    def tend(self, modules: Modules | None) -> None:
        """Now and then; ``modules``: what the workers have imported, None: not known yet."""
        for spare in list(self._spares):
            if (said := spare.hear()) is not None:
                self._spares.remove(spare)
                spare.end()
                self._learn(said)
            self._tell(spare.failed)
        if self._room and self._spares and not self._room.is_there(LEAST_BYTES, "is ended"):
            self.close()
        missing = self._start is not None and modules is not None and len(self._spares) < self._number
        if not missing or clock.monotonic() < self._due:
            return
        if self._room and not self._room.is_there(ROOM_BYTES, "is not started"):
            return
        assert self._start is not None and modules is not None
        self._due = clock.monotonic() + PAUSE_S
        try:
            spare = _Spare(*self._start, self._first, self._plan(modules))
        except OSError as error:
            log.debug("no warm worker can be started: %s", error)
            self._learn({})
        else:
            descriptors.give_back(spare.process.pid, self._limits)
            self._spares.append(spare)

    def close(self) -> None:
        """End those that wait; more than once is fine."""
        while self._spares:
            self._spares.pop().end()

    def _plan(self, modules: Modules) -> dict[str, Any]:
        if self._changed is None:  # later on the workers may have been given others
            assert self._start is not None
            self._changed = _changed(self._start[1], modules.environ)
        names = [name for name in modules.names if not self._left_out.intersection(_with_parents(name))]
        return {
            "names": names,
            "own": modules.own,
            "changed": self._changed,
            "preload": self._preload,
            "specific": SPECIFIC,
        }

    def _tell(self, failed: Mapping[str, str]) -> None:
        for name in failed.keys() - self._told:
            self._told.add(name)
            log.warning("--preload %s: a warm worker cannot import it: %s", name, failed[name])

    def _learn(self, said: dict[str, Any]) -> None:
        """From one that has ended without being used."""
        spoiled = said.get("spoiled", [])
        log.debug("a warm worker has ended; left out from now on: %s", ", ".join(spoiled) or "nothing")
        self._left_out.update(spoiled)
        self._failed += 1
        if why := said.get("unfit"):
            self._give_up(why)
        elif self._failed >= ATTEMPTS:
            self._give_up(f"{ATTEMPTS} in a row ended before they were used")

    def _give_up(self, why: str) -> None:
        log.warning("there are no warm workers from now on: %s", why)
        self.close()
        self._number = 0


class _Room:
    """Whether the node has memory for one; looks now and then."""

    def __init__(self) -> None:
        self._next, self._left, self._limit = 0.0, 0, ""
        self._said: set[str] = set()

    def is_there(self, needed: int, otherwise: str) -> bool:
        """Whether so many bytes are available; else it says once what follows."""
        if clock.monotonic() >= self._next:
            self._next = clock.monotonic() + LOOK_S
            self._left, self._limit = cgroup.available_memory()
        if self._left < needed and otherwise not in self._said:
            self._said.add(otherwise)
            short = f"{self._limit} has {self._left / 2**30:.1f} GiB of memory available, {needed >> 30} are needed"
            log.info("a warm worker %s: %s. --warm-workers 1 keeps one all the same", otherwise, short)
        return self._left >= needed


class _Spare:
    """One warm worker, until it has become a worker or has ended."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str], first: str, plan: dict[str, Any]) -> None:
        self.ready, self._since = False, clock.monotonic()
        #: modules of ``--preload`` that it could not import, and why
        self.failed: dict[str, str] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = memory_file(json.dumps(plan))
        try:
            self.process = subprocess.Popen(
                [*command[:2], "-c", CODE, str(theirs.fileno()), str(memory), first, *command[1:]],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), memory],
                start_new_session=True,
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
            os.close(memory)

    def hear(self) -> dict[str, Any] | None:
        """What it says in the end, empty where it says nothing; None: it goes on."""
        try:
            said = strict_json.parse(self._control.recv(MAX_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            slow = not self.ready and clock.monotonic() > self._since + IMPORT_LIMIT_S
            return {} if slow else None
        except (OSError, ValueError):  # it has ended
            return {}
        if not said.get("ready"):
            return dict(said)
        self.ready, self.failed = True, said.get("failed", {})
        pid = self.process.pid
        log.info("a warm worker waits (pid %d), with %d MB of memory", pid, _memory(pid) // 10**6)
        return None

    def hand_over(self, env: Mapping[str, str], out: int, err: int) -> bool:
        """Make it the worker with these variables; whether it is."""
        try:
            self._control.settimeout(ANSWER_LIMIT_S)
            socket.send_fds(self._control, [json.dumps({"env": env}).encode()], [out, err])
            became = self._control.recv(len(TAKEN)) == TAKEN and self._control.send(GO) == len(GO)
        except OSError:
            return False
        if became:
            self._control.close()
        return became

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_LIMIT_S)
        self._control.close()


def _runs_program(command: Sequence[str]) -> bool:
    """Whether it is this interpreter with a script or a module."""
    if len(command) < 3 or tuple(command[:2]) != (sys.executable, "-u"):
        return False
    return len(command) > 3 if command[2] == "-m" else command[2] != "-" and not command[2].endswith(".pyc")


def _changed(given: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str | None]:
    names = {*given, *found} - {*SPECIFIC}
    return {name: found.get(name) for name in sorted(names) if given.get(name) != found.get(name)}


def _with_parents(name: str) -> set[str]:
    """A module and the packages that it is in."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


def _memory(pid: int) -> int:
    """What a warm worker and its monitor's program take (bytes), shared pages by their shares; 0: it has ended."""
    try:
        warm = psutil.Process(pid)
        return sum(each.memory_full_info().pss for each in (warm, *warm.children(recursive=True)))
    except psutil.Error:
        return 0
