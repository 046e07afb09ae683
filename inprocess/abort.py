"""The abort: unblocks whatever the main thread waits for inside torch.distributed, so that it can be interrupted.

A ladder of steps. Each has a deadline and a recorded result; one that fails or hangs does not stop the next. Runs in
the MonitorThread, and once more in the main thread for what the function made while the first run was under way.

Gloo
    torch has no way to release a pending Gloo collective: ``abort()`` and ``destroy_process_group()`` leave it blocked
    until its timeout (measured on torch 2.13: 25 to 30 s). Shutting its connections down releases it in under a
    millisecond. Only connections that are certainly Gloo's may be touched. The kernel knows which these are: Gloo's
    event thread is named ``gloo_tcp_loop`` and waits on an epoll instance, and ``/proc/self/fdinfo`` lists what is
    registered there. A user's socket cannot be in that list.
NCCL
    All groups in one coalesced abort: one after the other deadlocks (github.com/pytorch/pytorch/issues/119797).
"""

from __future__ import annotations

import abc
import logging
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inprocess import clock
from inprocess.state import FrozenState

__all__ = [
    "Abort",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
    "Ladder",
    "StepResult",
    "shutdown_gloo_connections",
]

log = logging.getLogger(__name__)

#: seconds a step may take before the ladder goes on without it
DEADLINE = 10.0
#: name of Gloo's event threads
GLOO_THREAD = "gloo_tcp_loop"
#: system call numbers of epoll_wait, epoll_pwait and epoll_pwait2: x86-64 and aarch64
_EPOLL_CALLS = frozenset({"232", "281", "441", "22"})
#: how often to look at an event thread that is busy, hence in no system call; it is so for microseconds
_LOOKS = 1000


class Abort(abc.ABC):
    """Base class of ``abort`` hooks; any callable from state to state does as well.

    An abort hook runs in the monitor thread while the main thread is still inside the wrapped function. What it raises
    is logged and does not stop the restart.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState | None:
        """Unblock the main thread and return the state (None: unchanged)."""


@dataclass(frozen=True)
class StepResult:
    """How a step of the ladder ended."""

    name: str
    #: how long it took
    seconds: float
    #: what it raised or "did not end within ...", empty where it succeeded
    error: str = ""


class Ladder:
    """Steps that are tried one after the other, whatever becomes of the ones before.

    Args:
        steps: name and action of each.
        deadline: seconds after which a step is left to itself, in a daemon thread, and the next one begins.
    """

    def __init__(self, steps: Sequence[tuple[str, Callable[[], object]]], deadline: float = DEADLINE) -> None:
        self._steps, self._deadline = list(steps), deadline

    def run(self) -> list[StepResult]:
        """Run all steps; errors are logged and returned, never raised."""
        results: list[StepResult] = []
        while len(results) < len(self._steps):
            done: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
            rest = self._steps[len(results) :]
            thread = threading.Thread(target=_climb, args=(rest, done), name="inprocess-abort", daemon=True)
            thread.start()
            results += self._collect(rest, done)
            if len(results) == len(self._steps) and not results[-1].error.startswith("did not end"):
                thread.join()
        for result in results:
            if result.error:
                log.warning("abort: the step %r failed after %.3f s: %s", *_shown(result))
        return results

    def _collect(
        self, rest: Sequence[tuple[str, Callable[[], object]]], done: queue.SimpleQueue[StepResult]
    ) -> list[StepResult]:
        """Results of the worker's steps, up to the first one that hangs."""
        results = []
        for name, _ in rest:
            try:
                results.append(done.get(timeout=self._deadline))
            except queue.Empty:
                late = f"did not end within {self._deadline:g} s; it is left to itself"
                return [*results, StepResult(name, self._deadline, late)]
        return results


def _climb(steps: Sequence[tuple[str, Callable[[], object]]], done: queue.SimpleQueue[StepResult]) -> None:
    for name, action in steps:
        begin, error = clock.monotonic(), ""
        try:
            action()
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        done.put(StepResult(name, clock.monotonic() - begin, error))


def _shown(result: StepResult) -> tuple[str, float, str]:
    return result.name, result.seconds, result.error


class AbortTorchDistributed(Abort):
    """Releases pending Gloo and NCCL operations and takes all process groups down.

    Does nothing where torch.distributed is not in use; may be called at any moment, and more than once.

    Args:
        deadline: seconds for each step; default 10.
    """

    def __init__(self, deadline: float = DEADLINE) -> None:
        self.deadline = deadline

    def __call__(self, state: FrozenState) -> FrozenState:
        steps: list[tuple[str, Callable[[], object]]] = [("Gloo connections", shutdown_gloo_connections)]
        if dist.is_available() and dist.is_initialized():
            if _records_flights():
                steps.insert(0, ("flight recorder", lambda: _dump_flight_record(state.rank)))
            steps += [("process groups", _abort_groups), ("what is left", _destroy_groups)]
        if dist.is_available():
            steps.append(("group names", _forget_begun_groups))
        # connections of a group that the main thread was just making
        steps.append(("Gloo connections again", shutdown_gloo_connections))
        Ladder(steps, self.deadline).run()
        return state


class AbortTransformerEngine(Abort):
    """Frees TransformerEngine's user buffers, which hold communicators. Nothing where it is not installed."""

    def __call__(self, state: FrozenState) -> FrozenState:
        try:
            import transformer_engine.pytorch as te  # noqa: PLC0415  (optional)
        except ImportError:
            return state
        Ladder([("TransformerEngine user buffers", te.module.base.destroy_ub)]).run()
        return state


# --- process groups -----------------------------------------------------------------------------------------------


def _abort_groups() -> None:
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415  (absent where torch is built without)

    coalesced = getattr(c10d, "_abort_process_group", None)
    if coalesced is not None:
        coalesced()
        return
    for group in list(c10d._world.pg_map):  # torch before 2.6
        abort = getattr(_cuda_backend(group), "_abort", None)
        if abort is not None:
            abort()


def _cuda_backend(group: Any) -> Any:
    try:
        return group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def unfinished() -> bool:
    """Whether torch.distributed has process groups, or only began to make some: then the abort is needed again."""
    return dist.is_available() and (dist.is_initialized() or _groups_begun() > 0)


def _groups_begun() -> int:
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    return int(getattr(c10d._world, "group_count", 0))


def _forget_begun_groups() -> None:
    """Groups are named by number: a rank that began to make one and a rank that did not would never meet again."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    if not dist.is_initialized() and hasattr(c10d._world, "group_count"):
        c10d._world.group_count = 0


def _records_flights() -> bool:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    return any(os.environ.get(name, "0").strip("0") for name in names) and _flight_file() != ""


def _flight_file() -> str:
    """Where the user wants NCCL's flight record; torch adds the rank. Nowhere unless asked for."""
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") or ""


def _dump_flight_record(rank: int) -> None:
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return
    descriptor = os.open(f"{_flight_file()}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(dump())


# --- Gloo's connections -------------------------------------------------------------------------------------------


def shutdown_gloo_connections() -> int:
    """Shut down every connection that Gloo has in this process; answers how many.

    Pending collectives then fail at once, here and on the peers. The sockets stay open until their group is destroyed.
    """
    return sum(_shutdown(descriptor, inode) for descriptor, inode in _gloo_descriptors())


def _gloo_descriptors() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of everything registered with an event loop of Gloo."""
    for task in os.listdir("/proc/self/task"):
        epoll = _epoll_of(f"/proc/self/task/{task}")
        if epoll is not None:
            yield from _registered(epoll)


def _epoll_of(task: str) -> int | None:
    """The epoll instance on which a Gloo thread waits; None where it is no Gloo thread, or has ended."""
    try:
        if _read(f"{task}/comm").strip() != GLOO_THREAD:
            return None
        for _ in range(_LOOKS):
            call, *arguments = _read(f"{task}/syscall").split()
            if call in _EPOLL_CALLS:
                return int(arguments[0], 16)
            os.sched_yield()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        log.warning("Gloo's connections cannot be found, so collectives end at their own timeout: %s", error)
        return None
    log.warning("Gloo's event thread is busy for long; its connections were not shut down")
    return None


def _registered(epoll: int) -> list[tuple[int, int]]:
    try:
        lines = _read(f"/proc/self/fdinfo/{epoll}")
    except FileNotFoundError:
        return []
    found = re.findall(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", lines, re.MULTILINE)
    return [(int(descriptor), int(inode, 16)) for descriptor, inode in found]


def _shutdown(descriptor: int, inode: int) -> bool:
    """Shut a connection down, unless the number has been given to another file meanwhile."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return False
    try:
        if os.fstat(copy).st_ino != inode:
            raise OSError("another file by now")
        connection = socket.socket(fileno=copy)
    except OSError:  # or the loop's own pipe
        os.close(copy)
        return False
    with connection:
        try:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False  # the listening socket goes with the group
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected (any more)
            return False
        return True


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
