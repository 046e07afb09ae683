"""Starts ranks and waits for them under one deadline: on their pipes and their ends, never by sleeping.

At the deadline every rank dumps its stacks and dies (SIGABRT, with faulthandler), and the story of each is printed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from . import invariants, leaks
from .child import Context, Options, Spec, rank_main
from .faults import At, Fault
from .ports import ReservedPort

PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",  # the first optimizer would import it
    "inprocess",
    "inprocess.wrap",
    "tests.harness.child",
    "tests.ranks.targets",
    "tests.ranks.learning",
    "tests.chaos.training",
]
ROOT = Path(__file__).parents[2]
#: what `Run.wait` calls meanwhile
Act = Callable[[], float]
PR_SET_CHILD_SUBREAPER = 36
#: a resolver option of glibc: look into /etc/hosts only
NO_NAME_SERVER = "attempts:0"
#: of options that no test is about: far longer than a test runs, so that a slow machine is never a fault
PATIENT: Mapping[str, Any] = {
    "soft_timeout": 40,
    "hard_timeout": 45,
    "heartbeat_timeout": 30,
    "barrier_timeout": 50,
    "completion_timeout": 50,
    "heartbeat_interval": 0.5,
    "monitor_thread_interval": 0.25,
    "monitor_process_interval": 0.25,
    "progress_watchdog_interval": 0.25,
    "termination_grace_time": 0.5,
}
#: for tests of hangs: a rank without progress is noticed after two seconds
HASTY: Mapping[str, Any] = PATIENT | {"soft_timeout": 2, "hard_timeout": 20, "progress_watchdog_interval": 0.1}
#: and killed after five, so a healthy one must never stand still for three
KILLING: Mapping[str, Any] = HASTY | {"hard_timeout": 5}
#: for tests of lost hosts
BEATING: Mapping[str, Any] = PATIENT | {"heartbeat_interval": 0.2, "heartbeat_timeout": 4}
#: and where the job ends with the host of its store
ALONE: Mapping[str, Any] = BEATING | {"standby_stores": 0}


class Deadline(AssertionError):
    """The ranks were not done in time; the text tells where each of them was."""


def become_subreaper() -> None:
    """Daemons that escape from a rank become children of this process, and so can be seen."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def heed_ctrl_c() -> None:
    """A shell has SIGINT ignored in what it runs in the background, and children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.lru_cache(maxsize=1)
def start_server() -> None:
    """Start the forkserver; it imports torch while other tests run."""
    become_subreaper()
    before = os.environ.copy()
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    here = os.getcwd()
    os.chdir(ROOT)  # the server looks for the modules to preload in its working directory
    try:
        multiprocessing.set_forkserver_preload(PRELOAD)
        multiprocessing.resource_tracker.ensure_running()
        multiprocessing.forkserver.ensure_running()
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def servers() -> set[int]:
    """Process ids of multiprocessing's own helpers, which stay until the end."""
    pids = (
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),  # type: ignore[attr-defined]
        getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),  # type: ignore[attr-defined]
    )
    return {pid for pid in pids if pid is not None}


def server_descriptors() -> set[int]:
    fds = (
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_alive_fd", None),  # type: ignore[attr-defined]
        getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None),  # type: ignore[attr-defined]
    )
    return {fd for fd in fds if fd is not None}


@dataclass(frozen=True)
class RankResult:
    """How one rank ended."""

    rank: int
    pid: int
    #: minus the signal number when a signal killed it
    exitcode: int | None
    #: what the target returned, as JSON gives it back
    value: Any
    #: type name, message and traceback of what the target raised; None when it returned
    exception: str | None
    message: str
    trace: str = field(repr=False)
    events: list[dict[str, Any]] = field(repr=False)
    leftovers: list[str]
    log: str = field(repr=False)

    @property
    def done(self) -> bool:
        """The target came to its end, with a value or an exception."""
        return any(event["event"] == "done" for event in self.events)

    def of(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """This rank's events with that name and those fields."""
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def entries(self, call: int = 0) -> list[tuple[int, int, int]]:
        """(iteration, rank, world size) of every entry of the wrapped function."""
        return [(e["iteration"], e["rank"], e["world_size"]) for e in self.of("enter", call=call)]


class Ranks(list[RankResult]):
    """The results, by initial rank."""

    #: what was left behind, exit codes that are wrong, invariants that do not hold; one line each
    problems: Sequence[str] = ()
    #: how long processes below the ranks were there after the last rank had ended (seconds)
    lingered: float = 0.0

    @property
    def values(self) -> list[Any]:
        return [result.value for result in self]

    @property
    def exitcodes(self) -> list[int | None]:
        return [result.exitcode for result in self]

    @property
    def exceptions(self) -> list[str | None]:
        return [result.exception for result in self]


@dataclass
class _Rank:
    rank: int
    process: Any
    pipe: connection.Connection
    control: connection.Connection
    pidfd: int
    log: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    rest: bytes = b""
    at_end: bool = False
    ended: bool = False

    def read(self) -> None:
        """Take what is in the pipe."""
        data = os.read(self.pipe.fileno(), 1 << 16)
        self.at_end = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.events.extend(json.loads(line) for line in lines)

    def note_end(self) -> None:
        """The process is gone: an event of its own (`ended`), which others can wait for."""
        self.ended = True
        self.drain()
        self.events.append({"event": "ended", "t": time.monotonic()})

    def drain(self) -> None:
        """What an ended rank had still written. Its children may hold the pipe open, so do not wait for its end."""
        while not self.at_end and self.pipe.poll(0):
            self.read()

    def signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signum)

    def find(self, name: str) -> dict[str, Any]:
        return next((event for event in reversed(self.events) if event["event"] == name), {})

    def result(self) -> RankResult:
        raised = self.find("exception")
        return RankResult(
            rank=self.rank,
            pid=self.process.pid,
            exitcode=self.process.exitcode,
            value=self.find("value").get("value"),
            exception=raised.get("type"),
            message=raised.get("message", ""),
            trace=raised.get("trace", ""),
            events=self.events,
            leftovers=self.find("leftovers").get("lines", []),
            log=self.log.read_text(errors="replace") if self.log.exists() else "",
        )

    def close(self) -> None:
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.control.close()
        os.close(self.pidfd)


class Run:
    """Ranks that were started together. `wait` ends the run; `close` kills whatever is left of it.

    ``respawn``: for each of the first so many ranks that die or fail, another one is started in its place; it stands
    behind those that were there.
    """

    def __init__(
        self,
        target: Callable[[Context], Any],
        world_size: int,
        *,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        faults: Mapping[At, Fault] | None = None,
        wrapper: Options | None = None,
        place: Callable[[int], None] | None = None,
        respawn: int = 0,
    ) -> None:
        start_server()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        (self._folder / "tmp").mkdir()
        self._port = ReservedPort()
        self._known = set(leaks.descendants_of(os.getpid()))
        self._answered: set[tuple[int, int]] = set()
        #: pids that were killed together
        self._killed: set[int] = set()
        self._closed = False
        self._respawns = respawn
        #: nobody is replaced after that (monotonic): the job is about to end
        self.respawn_until = math.inf
        self.ranks: list[_Rank] = []
        options = PATIENT if wrapper is None else wrapper
        for rank in range(world_size):
            self._template = Spec(
                rank=rank,
                target=target,
                environment=self._environment(rank, world_size, env or {}),
                log=str(self._folder / f"rank{rank}.log"),
                faults={at: fault for at, fault in (faults or {}).items() if at.rank == rank},
                wrapper=options,
                args={"world_size": world_size} | dict(args or {}),
                place=place,
            )
            self.ranks.append(self._start(self._template))

    def start_another(
        self,
        rank: int,
        *,
        faults: Mapping[At, Fault] | None = None,
        env: Mapping[str, str] | None = None,
        wrapper: Options | None = None,
        place: Callable[[int], None] | None = None,
    ) -> None:
        """Start one process more, with this RANK and what a launcher says to one that replaces another."""
        spec = self._template
        environment = spec.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "INPROCESS_RESTART": "1"}
        self.ranks.append(
            self._start(
                replace(
                    spec,
                    rank=rank,
                    environment=environment | dict(env or {}),
                    log=str(self._folder / f"rank{rank}.{len(self.ranks)}.log"),
                    faults=dict(faults or {}),
                    wrapper=spec.wrapper if wrapper is None else wrapper,
                    place=spec.place if place is None else place,
                )
            )
        )

    def _respawn(self, rank: _Rank) -> None:
        rank.process.join()
        if (
            self._respawns
            and time.monotonic() < self.respawn_until
            and (rank.process.exitcode or rank.find("exception"))
        ):
            self._respawns -= 1
            self.start_another(rank.rank)

    @property
    def port(self) -> int:
        return self._port.number

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self.ranks]

    def _environment(self, rank: int, world_size: int, more: Mapping[str, str | None]) -> dict[str, str]:
        environment: dict[str, str | None] = {
            name: text for name, text in os.environ.items() if name not in leaks.IGNORED_VARIABLES
        }
        environment |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.number),
            "TMPDIR": str(self._folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            # torch looks up the name of each peer it connects to; a name server that does not answer costs 5 s
            "RES_OPTIONS": NO_NAME_SERVER,
        }
        environment |= {name: text and text.replace("{rank}", str(rank)) for name, text in more.items()}
        return {name: text for name, text in environment.items() if text is not None}

    def _start(self, spec: Spec) -> _Rank:
        context = multiprocessing.get_context("forkserver")
        events, write_end = context.Pipe(duplex=False)
        read_end, control = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(spec, write_end, read_end), daemon=False)
        process.start()
        write_end.close()
        read_end.close()
        assert process.pid is not None
        return _Rank(spec.rank, process, events, control, os.pidfd_open(process.pid), Path(spec.log))

    def wait(
        self,
        deadline: float = 30.0,
        *,
        check: bool = True,
        act: Act = lambda: math.inf,
        fenced: Collection[int] = (),
    ) -> Ranks:
        """Wait until every rank has ended and nothing of the run is left; check leftovers and invariants.

        Args:
            deadline: seconds.
            check: whether problems are errors; the results have them in any case.
            act: called again and again meanwhile; answers when it wants to be called at the latest (monotonic).
            fenced: see `invariants.broken`.

        Raises:
            Deadline: not done after `deadline` seconds; the text has every rank's events, stacks and log.
            AssertionError: something was left behind, an exit code is wrong, or an invariant does not hold.
        """
        end = time.monotonic() + deadline
        self._pump(lambda: all(rank.ended for rank in self.ranks), end, act)
        ended = time.monotonic()
        remaining = reap(self._known, end)
        lingered = time.monotonic() - ended
        files = sorted(str(path.relative_to(self._folder)) for path in (self._folder / "tmp").rglob("*"))
        for rank in self.ranks:
            rank.process.join()
        results = Ranks(rank.result() for rank in self.ranks)
        print(self.story(results))  # pytest shows it where the test fails
        self.close()
        problems = [f"still running: {line}" for line in remaining]
        problems += [f"file left in the temporary directory: {name}" for name in files]
        results.problems, results.lingered = problems + _problems(results, fenced), lingered
        assert not check or not results.problems, "\n".join(results.problems)
        return results

    def tolerate(self, pids: Collection[int]) -> None:
        """These belong to the test, which has started them since the run began."""
        self._known.update(pids)

    def wait_event(self, name: str, *, count: int = 1, deadline: float = 20.0, **fields: Any) -> None:
        """Wait until `count` ranks have reported that event."""

        def seen() -> bool:
            return sum(self._has(rank, name, fields) for rank in self.ranks) >= count

        self._pump(seen, time.monotonic() + deadline)

    @staticmethod
    def _has(rank: _Rank, name: str, fields: Mapping[str, Any]) -> bool:
        return any(
            event["event"] == name and all(event.get(key) == value for key, value in fields.items())
            for event in rank.events
        )

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        self.ranks[rank].signal(signum)

    def _pump(self, until: Callable[[], bool], end: float, act: Act = lambda: math.inf) -> None:
        while not until():
            waitables: list[Any] = [rank.pipe for rank in self.ranks if not rank.at_end]
            waitables += [rank.process.sentinel for rank in self.ranks if not rank.ended]
            left = min(end, act()) - time.monotonic()
            ready = connection.wait(waitables, max(left, 0.0)) if waitables else []
            if not waitables or time.monotonic() > end:
                raise Deadline(self._abort())
            for rank in list(self.ranks):
                if rank.pipe in ready:
                    rank.read()
                if rank.process.sentinel in ready:
                    rank.note_end()
                    self._respawn(rank)
            self._answer()
            self._kill_together()

    def _kill_together(self) -> None:
        """Those that wait for it (`KillTogether`): all stand still before the first one dies."""
        events = [event for rank in self.ranks for event in rank.events if event["event"] == "together"]
        waiting = [event for event in events if self._killed.isdisjoint(event["pids"])]
        if waiting and len(waiting) >= waiting[0]["count"]:
            pids = [pid for event in waiting for pid in event["pids"]]
            self._killed.update(pids)
            for signum in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    os.kill(pid, signum)

    def _answer(self) -> None:
        """Let those go on that wait for an event of the others (`When`)."""
        for rank in self.ranks:
            for index, event in enumerate(rank.events):
                if event["event"] != "wait_for" or (rank.rank, index) in self._answered:
                    continue
                if self._others_with(rank, event["awaited"]) >= event["count"]:
                    self._answered.add((rank.rank, index))
                    with suppress(BrokenPipeError):
                        os.write(rank.control.fileno(), bytes([event["number"]]))

    def _others_with(self, rank: _Rank, name: str) -> int:
        return sum(other is not rank and self._has(other, name, {}) for other in self.ranks)

    def _abort(self) -> str:
        """Every rank dumps its stacks and dies; then the stories."""
        for signum in (signal.SIGCONT, signal.SIGABRT):
            for rank in self.ranks:
                rank.signal(signum)
        for rank in self.ranks:
            rank.process.join(5)
            rank.signal(signal.SIGKILL)
            rank.process.join()
            rank.drain()
        below = [leaks.command_of(pid) for pid in strangers(self._known)]
        results = Ranks(rank.result() for rank in self.ranks)
        story = self.story(results)
        self.close()
        return "the deadline has passed\n" + story + "\n".join(["processes left:", *below])

    def story(self, results: Sequence[RankResult]) -> str:
        """For people: what every rank reported, and the end of its log and of its monitor's log."""
        lines = []
        for result in results:
            lines.append(f"--- initial rank {result.rank}: pid {result.pid}, exit code {result.exitcode}")
            lines += [_line(event) for event in result.events[-25:]]
            lines += ["log:", *result.log.splitlines()[-60:]]
        for path in sorted(self._folder.glob("monitor*.log")):
            lines += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-40:]]
        return "\n".join(lines)

    def close(self) -> None:
        """Kill what is left, reap it, give everything back. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
            rank.close()
        reap(self._known, time.monotonic())
        self._port.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def strangers(known: Collection[int]) -> list[int]:
    """Processes below this one that are neither known nor multiprocessing's own."""
    return [pid for pid in leaks.descendants_of(os.getpid(), servers()) if pid not in known]


def reap(known: Collection[int], end: float) -> list[str]:
    """Wait until `end` (monotonic) for daemons that came to this process; kill those that stay, and name them."""
    late: list[str] = []
    while pids := strangers(known):
        for pid in pids:
            left = end - time.monotonic()
            if not _ended(pid, max(left, 0.0)):
                late.append(f"pid {pid}: {leaks.command_of(pid)}")
                os.kill(pid, signal.SIGKILL)
                _ended(pid, 5.0)
    return late


def _ended(pid: int, seconds: float) -> bool:
    """Wait for the end of a process through its pidfd, then reap it if it is ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        done = bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)
    if done:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return done


def _line(event: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("event", "t", "trace")}
    return f"  {event['t']:.4f} {event['event']:<10} {rest}"


def _problems(results: Ranks, fenced: Collection[int]) -> list[str]:
    problems = [f"rank {result.rank} left behind: {line}" for result in results for line in result.leftovers]
    problems += [
        f"rank {result.rank} exited with {result.exitcode} after it was done"
        for result in results
        if result.done and result.exitcode != 0
    ]
    return problems + invariants.broken(results, fenced)
