"""The processes of a node's workers: each in a torch process context of its own, so that one may fail alone.

torch's context for several workers ends the others at the first failure. Here each has one with a single process, and
`WorkerPool` answers for all of them what the agent asks of a context. Log files are laid out once for all workers of a
generation, by torch; a worker that is started again gets the directory ``restart_<n>`` below its own, so that what its
predecessor said last is still there.
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO, cast

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import (
    LogsDest,
    MultiprocessContext,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from inprocess.launcher.signals import Signals
from inprocess.system import clock, descriptors, private_folder, procfs
from inprocess.system.logs import get_logger

__all__ = ["WorkerPool", "Ended", "Process", "ProcessSpec", "StreamFilters", "all_shown", "say_cut"]

log = get_logger(__name__)
#: how long processes that were killed may take to go (seconds); one that waits for hardware may never
KILL_LIMIT_S = 30.0
#: how long the output of workers is waited for that nobody reads (seconds)
SHOW_LIMIT_S = 2.0
#: longest text that a stream is given at once (characters)
PIECE = 1 << 16
#: of a process whose exit code nobody can tell any more: no program of ours ends with it
UNKNOWN_CODE = 255


#: threads that show output, or wait for those that do, and took longer; and the files that they show
_late: dict[threading.Thread, tuple[str, ...]] = {}


class _Counted:
    """A stream of torch's TailLog: `taken` grows while somebody reads one of them."""

    taken = 0

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        for start in range(0, len(text), PIECE):
            self._stream.write(text[start : start + PIECE])
            _Counted.taken += 1


def all_shown() -> bool:
    """Whether the output of all workers that have ended is shown. Waits as long as somebody reads it."""
    while late := [thread for thread in _late if thread.is_alive()]:
        before = _Counted.taken
        late[0].join(SHOW_LIMIT_S)
        if late[0].is_alive() and _Counted.taken == before:
            return False
    return True


def say_cut(more: str) -> None:
    """Say that output is not shown to its end, and ``more``; nobody may read this either."""
    files = {file for thread, files in _late.items() if thread.is_alive() for file in files}
    where = f"; all of it is in {os.path.commonpath(files)}" if files else ""
    said = f"\ninprocess run: the end of the workers' output is not shown, as nobody reads it{where}\n"
    text = f"{said}{more}\n" if more else said
    thread = threading.Thread(target=_say, args=(text,), name="inprocess-say", daemon=True)
    thread.start()
    thread.join(SHOW_LIMIT_S)


def _say(text: str) -> None:
    """Past the stream's buffer: a thread that waits for a reader may hold its lock."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        os.write(sys.stderr.fileno(), text.encode(errors="backslashreplace"))


def _show(show: Callable[[], object], files: tuple[str, ...] = ()) -> None:
    """In a thread of its own: a terminal may be stopped, and the launcher has signals to act on."""
    thread = threading.Thread(target=show, name="inprocess-show", daemon=True)
    thread.start()
    if not any(each.is_alive() for each in _late):  # else this one does not come to its end either
        thread.join(SHOW_LIMIT_S)
    if thread.is_alive():
        _late[thread] = files


@dataclass(frozen=True)
class StreamFilters:
    """--duplicate-stdout-filters and --duplicate-stderr-filters: lines with one of the words go to a file as well."""

    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessSpec:
    """How each worker is started."""

    role: str
    #: a program, or a function with --run-path
    entrypoint: str | Callable[..., Any]
    start_method: str
    #: torch's NumaOptions, or None
    numa: Any
    filters: StreamFilters
    #: of open descriptors, as the launcher was given them
    limits: descriptors.DescriptorLimits
    #: a process that has become the worker already, or None: see `WarmWorkers.take`
    take: Callable[..., subprocess.Popen[bytes] | None]


@dataclass(frozen=True)
class Ended:
    """A worker's process is gone."""

    exitcode: int
    #: None: exit code 0
    failure: ProcessFailure | None = None
    #: of the function, with --run-path
    value: Any = None


class Logs:
    """Where the workers of one generation write, as torch lays it out."""

    def __init__(self, specs: LogsSpecs, envs: dict[int, dict[str, str]], filters: StreamFilters) -> None:
        self._dest = specs.reify(envs)  # also puts TORCHELASTIC_ERROR_FILE into the environments
        self._filters = {
            "stdout": (filters.out, _append(filters.out, getattr(self._dest, "filtered_stdout", ""))),
            "stderr": (filters.err, _append(filters.err, getattr(self._dest, "filtered_stderr", ""))),
        }

    def close(self) -> None:
        for _, file in self._filters.values():
            if file:
                file.close()

    def of(self, local_rank: int, restart: int) -> LogsDest:
        """One worker's files, under the key 0."""

        def one(paths: Mapping[int, str]) -> dict[int, str]:
            return {0: _again(paths[local_rank], restart)} if local_rank in paths else {}

        dest = self._dest
        return LogsDest(
            stdouts=one(dest.stdouts),
            stderrs=one(dest.stderrs),
            tee_stdouts=one(dest.tee_stdouts),
            tee_stderrs=one(dest.tee_stderrs),
            error_files=one(dest.error_files),
        )

    def tails(self, role: str, dest: LogsDest, prefixes: dict[int, str]) -> Iterator[TailLog]:
        """What shows a worker's output, where that goes into files, and what copies chosen lines into one file for all.

        In place of those of torch's context, whose streams do not count.
        """
        for stream, paths in ((sys.stdout, dest.tee_stdouts), (sys.stderr, dest.tee_stderrs)):
            if stream is not None:  # closed when the launcher was started
                yield TailLog(role, paths, cast(TextIO, _Counted(stream)), prefixes)
        for (words, file), paths in zip(self._filters.values(), (dest.tee_stdouts, dest.tee_stderrs), strict=True):
            if file:
                yield TailLog(role, paths, cast(TextIO, _Counted(file)), prefixes, log_line_filter=_any_of(words))


def _append(words: tuple[str, ...], path: str) -> TextIO | None:
    if not words:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    return os.fdopen(descriptor, "a", errors="replace", buffering=1)


def _any_of(words: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda line: any(word in line for word in words)


def _again(path: str, restart: int) -> str:
    """Where the n-th process of a worker writes instead of the first."""
    if not restart or path in ("", os.devnull):
        return path
    folder = os.path.join(os.path.dirname(path), f"restart_{restart}")
    private_folder.own(folder).close()
    return os.path.join(folder, os.path.basename(path))


class _Given(LogsSpecs):
    """Log files that were laid out before."""

    def __init__(self, dest: LogsDest) -> None:
        super().__init__()
        self._dest = dest

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return self._dest

    @property
    def root_log_dir(self) -> str:
        return ""


class Process(abc.ABC):
    """One process of a worker, from its start until it is gone."""

    #: whose content is shown
    _files: tuple[str, ...] = ()

    def __init__(self, spec: ProcessSpec, logs: Logs, local_rank: int, restart: int, start: WorkerLaunch) -> None:
        dest = logs.of(local_rank, restart)
        env = dict(start.env)
        if restart and env.get("TORCHELASTIC_ERROR_FILE"):
            env["TORCHELASTIC_ERROR_FILE"] = dest.error_files[0]
        prefixes = {0: start.prefix or f"[{spec.role}{local_rank}]:"}
        self.local_rank = local_rank
        self.ended: Ended | None = None
        self._context = self._make(spec, local_rank, start.args, _common(spec, env, dest, prefixes))
        self._tails: list[Any] = []
        self._files = (*dest.tee_stdouts.values(), *dest.tee_stderrs.values())
        try:
            self._context._start()  # not start(), which installs torch's handlers of signals over ours
            self._tails += logs.tails(spec.role, dest, prefixes)
            for tail in self._tails:
                tail.start()
            self.pid = int(self._context.pids()[0])
            self._descriptor = _pidfd(self.pid)
            descriptors.give_back(self.pid, spec.limits)
        except BaseException:  # nobody else knows of it
            self._context.close(signal.SIGKILL)
            self._stop_tails()
            raise

    @abc.abstractmethod
    def _make(self, spec: ProcessSpec, local_rank: int, args: tuple[str, ...], common: dict[str, Any]) -> Any:
        """torch's context with one process."""

    @abc.abstractmethod
    def _look(self) -> Ended | None:
        """How it ended, or None while it runs; the answer that is not None is asked for once.

        Raises ChildProcessError where something else in this process has waited for it.
        """

    @abc.abstractmethod
    def _kill(self, number: signal.Signals) -> None:
        """Send it a signal. Raises ProcessLookupError where it is gone."""

    def fileno(self) -> int | None:
        """Readable when the process has ended; None: the kernel has no such thing, look now and then."""
        return self._descriptor

    def poll(self) -> Ended | None:
        """How it ended, or None while it runs."""
        if self.ended is None:
            try:
                self.ended = self._look()
            except ChildProcessError:
                self.ended = self._lost()
            if self.ended:
                self._drop()
        return self.ended

    def _lost(self) -> Ended:
        """It is gone, and its exit code with it, unless the kernel keeps that for its descriptor. As a failure: a job
        must not succeed because a failure was not seen."""
        status = None if self._descriptor is None else procfs.exit_status(self._descriptor)
        code = UNKNOWN_CODE if status is None else os.waitstatus_to_exitcode(status)
        told = "counts as failed" if status is None else f"was {code}"
        log.warning("pid %d was waited for by something else in this process; its exit code %s", self.pid, told)
        return Ended(code, ProcessFailure(self.local_rank, self.pid, code, error_file="") if code else None)

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._kill(number)

    def pass_on(self, number: signal.Signals) -> bool:
        """Send it a signal that it would die of, where it handles that; whether it does. Not to what it has started:
        loader workers have its handlers, too."""
        if self.poll() is not None:
            return False
        with contextlib.suppress(OSError):  # it has just ended
            if procfs.caught_signals(self.pid) & 1 << number - 1:
                os.kill(self.pid, number)
                return True
        return False

    def close(self, deadline: float | None = None) -> None:
        """Kill it where it still runs, and stop copying its output. ``deadline``: until when it may take to go."""
        self.send(signal.SIGKILL)
        deadline = clock.monotonic() + KILL_LIMIT_S if deadline is None else deadline
        while self.poll() is None and clock.monotonic() < deadline:
            descriptors.await_readable(self._descriptor, 0.05)
        if self.poll() is None:
            log.error("pid %d does not go after SIGKILL: it waits for the kernel, perhaps for a device", self.pid)
        self._drop()

    def _drop(self) -> None:
        self._stop_tails()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _stop_tails(self) -> None:
        """Once they have read what is there."""
        tails, self._tails = self._tails, []
        if tails:
            # first those that write to files
            _show(lambda: [tail.stop() for tail in reversed(tails)], self._files)


class _Program(Process):
    """A program, in a session of its own."""

    def _make(self, spec: ProcessSpec, local_rank: int, args: tuple[str, ...], common: dict[str, Any]) -> Any:
        program = str(spec.entrypoint)
        return _ProgramContext(
            local_rank, spec.take, entrypoint=program, args={0: args}, numa_options=spec.numa, **common
        )

    def _look(self) -> Ended | None:
        # without taking it from the kernel: its number, which is its group's, must not become another's yet
        process = self._context.subprocess_handlers[0].proc
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            process.wait()  # takes it for granted; its destructor would complain otherwise
            raise
        if status is None:
            return None
        if status.si_status != 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # what it started may hold devices and ports
        code = process.wait()
        return Ended(code, self._failure(code) if code else None)

    def _failure(self, code: int) -> ProcessFailure:
        arguments = {"local_rank": self.local_rank, "pid": self.pid, "exitcode": code}
        path = self._context.error_files[0]
        try:
            return ProcessFailure(**arguments, error_file=path)
        except Exception as error:  # it was killed while it wrote the file
            log.warning("the error file %s of pid %d cannot be read: %s", path, self.pid, error)
            return ProcessFailure(**arguments, error_file="")

    def _kill(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)


class _Function(Process):
    """A function in a process of multiprocessing (--run-path)."""

    def _make(self, spec: ProcessSpec, local_rank: int, args: tuple[str, ...], common: dict[str, Any]) -> Any:
        function: Any = spec.entrypoint
        given: tuple[Any, ...] = args
        if spec.numa is not None:
            function, given = _bound, (spec.numa, local_rank, spec.entrypoint, *args)
        return MultiprocessContext(entrypoint=function, args={0: given}, start_method=spec.start_method, **common)

    def _look(self) -> Ended | None:
        process = self._context._pc.processes[0]
        if descriptors.await_readable(self._descriptor, 0) and process.exitcode is None:
            process._popen.returncode = UNKNOWN_CODE  # multiprocessing would keep it for ever
            process.join()
            raise ChildProcessError
        result = self._context.wait(0)  # also takes the value, without which the process does not end
        if result is None:
            return self._vanished()
        if failure := result.failures.get(0):
            failure.local_rank = self.local_rank
            return Ended(failure.exitcode, failure)
        return Ended(0, None, result.return_values.get(0))

    def _vanished(self) -> Ended | None:
        """It ended with exit code 0 and without a value (`os._exit(0)`), for which torch would wait for ever."""
        gone = self._context._pc.processes[0].exitcode == 0 and not self._context._return_values
        return Ended(0) if gone else None

    def _kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class _ProgramContext(SubprocessContext):
    """torch's context of a program, which knows its local rank: NUMA binding goes by it."""

    def __init__(self, local_rank: int, take: Callable[..., subprocess.Popen[bytes] | None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._local_rank, self._take = local_rank, take

    def _start(self) -> None:
        handler = _Handler(
            self._take,
            entrypoint=str(self.entrypoint),
            args=self.args[0],
            env=self.envs[0],
            stdout=self.stdouts[0],
            stderr=self.stderrs[0],
            local_rank_id=self._local_rank,
            numa_options=self._numa_options,
        )
        self.subprocess_handlers = {0: handler}


class _Handler(SubprocessHandler):
    """torch's handler of a program, which may be a process that is there already."""

    def __init__(self, take: Callable[..., subprocess.Popen[bytes] | None], **kwargs: Any) -> None:
        self._take = take
        super().__init__(**kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return self._take(args, env, self._stdout, self._stderr) or super()._popen(args, env)


@dataclass(frozen=True)
class WorkerLaunch:
    """What one process is given."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    #: before each line that is shown; empty: role and local rank
    prefix: str = ""


def _common(spec: ProcessSpec, env: dict[str, str], dest: LogsDest, prefixes: dict[int, str]) -> dict[str, Any]:
    return {"name": spec.role, "envs": {0: env}, "logs_specs": _Given(dest), "log_line_prefixes": prefixes}


def _bound(numa: Any, local_rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """In the worker, whose index in its own context is 0: bind it by its local rank, then call the function."""
    from torch.numa.binding import _maybe_wrap_with_numa_binding  # noqa: PLC0415  (in newer torch only)

    return _maybe_wrap_with_numa_binding(function, gpu_index=local_rank, numa_options=numa)(*args)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody can read it any more
        sys.stdout.flush()


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel
        return None


class WorkerPool:
    """All workers of a node. Plays the part of torch's process context towards its agent."""

    def __init__(self, spec: ProcessSpec, logs: Logs, signals: Signals) -> None:
        self._spec, self._logs, self._signals = spec, logs, signals
        self._processes: dict[int, Process] = {}

    def start(self, local_rank: int, restart: int, start: WorkerLaunch) -> Process:
        """Start a worker; ``restart`` is how often it was started alone before."""
        if old := self._processes.get(local_rank):
            old.close()
        kind = _Program if isinstance(self._spec.entrypoint, str) else _Function
        with descriptors.explained(f"the worker with local rank {local_rank} cannot be started"):
            process = kind(self._spec, self._logs, local_rank, restart, start)
        self._processes[local_rank] = process
        return process

    def running(self) -> list[Process]:
        return [process for process in self._processes.values() if process.poll() is None]

    def pids(self) -> dict[int, int]:
        return {process.local_rank: process.pid for process in self.running()}

    def send(self, local_rank: int, number: signal.Signals) -> None:
        self._processes[local_rank].send(number)

    def wait(self, seconds: float) -> None:
        """Until a worker ends, a signal comes, or the time is over."""
        known = [process for process in self._processes.values() if process.ended is None]
        running = self.running()
        if len(running) < len(known):  # one has just been found
            return
        found = [process.fileno() for process in running]
        self._signals.wait([descriptor for descriptor in found if descriptor is not None], seconds)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """End all workers: the signal to all of them, ``timeout`` seconds of grace together, then SIGKILL.

        A second signal to the launcher ends the grace; the first one begins it anew, where they end for another reason.
        """
        before = self._signals.count
        for process in self.running():
            process.send(death_sig or signal.SIGTERM)
        deadline = clock.monotonic() + timeout
        while self.running() and clock.monotonic() < deadline:
            self.wait(min(1.0, deadline - clock.monotonic()))
            if (came := self._signals.count) > max(before, 1):
                break
            if came > before:
                before, deadline = came, clock.monotonic() + timeout
        for process in self.running():
            log.warning("the worker with local rank %d (pid %d) is killed", process.local_rank, process.pid)
            process.send(signal.SIGKILL)
        deadline = clock.monotonic() + KILL_LIMIT_S  # of all together
        for process in self._processes.values():
            process.close(deadline)
        self._processes.clear()
        self._logs.close()
        if sys.stdout is not None:  # closed when the launcher was started
            _show(_flush)
