"""The abort: unblocks whatever the main thread waits for inside torch.distributed, so that it can be interrupted.

A ladder of steps. Each has a deadline and a recorded result; one that fails or hangs does not stop the next. Runs in
the MonitorThread, and once more in the main thread for what the function made while the first run was under way.

`inprocess.collectives` lists all steps by which a group ends, in their order, and where each one is.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import functools
import itertools
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from inprocess.collectives import groups, nccl, nccl_wake
from inprocess.collectives.dead_groups import dead_groups
from inprocess.collectives.gloo import shutdown_gloo_connections
from inprocess.collectives.nccl_bootstrap import bootstrap
from inprocess.collectives.nccl_shutdown import shutdowns
from inprocess.collectives.remembered import remembered
from inprocess.collectives.results import results
from inprocess.exception import OptionError
from inprocess.options import seconds
from inprocess.state import FrozenState
from inprocess.system import clock
from inprocess.system.logs import get_logger

__all__ = [
    "Abort",
    "AbortPersistentCheckpointProcesses",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
    "Ladder",
    "StepResult",
    "shutdown_gloo_connections",
]

log = get_logger(__name__)

#: seconds that a ladder may take in all
DEADLINE_S = 10.0
#: seconds that a rung leaves for each of those after it
RESERVE_S = 0.5

Step = tuple[str, Callable[[], object]]


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
    #: what it raised, or how long it was waited for; empty where it succeeded
    error: str = ""
    #: whether it was left to itself
    hung: bool = False

    def outcome(self) -> str:
        """For the log."""
        return f"failed after {self.seconds:.3f} s: {self.error}" if self.error else f"took {self.seconds:.3f} s"


class Ladder:
    """Rungs that are tried one after the other, whatever becomes of the ones before.

    Args:
        rungs: a step, or several that run at the same time; each has a name and an action.
        deadline: seconds for all together, default 10. A step that takes longer is left to itself, in a daemon thread,
            early enough for half a second of each of the other rungs.
    """

    def __init__(self, rungs: Sequence[Step | Sequence[Step]], deadline: float = DEADLINE_S) -> None:
        self._rungs: list[Sequence[Any]] = [[rung] if isinstance(rung[0], str) else rung for rung in rungs]
        self._deadline = deadline

    def run(self) -> list[StepResult]:
        """Run all steps; errors are logged and returned, never raised."""
        end, count = clock.monotonic() + self._deadline, len(self._rungs)
        limits = [end - RESERVE_S * (count - index - 1) for index in range(count)]
        results: list[StepResult] = []
        threads: list[_Thread] = []  # none of which hangs; to start one for each step would take 0.1 ms
        try:
            index = 0
            while index < count:
                # those of one step are taken in one go: where this thread was woken after each, 0.9 ms of work took 2.6
                alone = [rung[0] for rung in itertools.takewhile(lambda rung: len(rung) == 1, self._rungs[index:])]
                found = _run([alone] if alone else [[step] for step in self._rungs[index]], limits[index:], threads)
                results += found
                index += len(found) if alone else 1
        except BaseException:  # Ctrl-C; a step may hang
            for thread in threads:
                thread.abandon()
            raise
        for thread in threads:
            thread.end()
        return results


def _run(turns: Sequence[Sequence[Step]], limits: Sequence[float], threads: list[_Thread]) -> list[StepResult]:
    """All turns at the same time, a thread each: the results of their steps, as far as the first of a turn that hangs.

    ``limits``: until when (s) the first, second, ... step of a turn is waited for.
    """
    with contextlib.suppress(RuntimeError):  # the process may have no more threads; this one takes the other turns
        while len(threads) < len(turns):
            threads.append(_Thread())
    given = [_Turn(steps) for steps in turns]
    taken = threads[: len(given)]
    for thread, turn in zip(taken, given, strict=False):
        thread.take(turn)
    for turn in given[len(taken) :]:
        turn.act()
    results: list[StepResult] = []
    for place, turn in enumerate(given):
        found = turn.results(limits)
        for result in found:
            level = logging.WARNING if result.error else logging.DEBUG
            log.log(level, "abort: the step %r %s", result.name, result.outcome())
        if found[-1].hung:  # in a thread
            taken[place].abandon()
            threads.remove(taken[place])
        results += found
    return results


class _Thread:
    """Takes one turn after the other. One that is left to itself gets no other turn, however late it comes back."""

    def __init__(self) -> None:
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="inprocess-abort", daemon=True)
        self._thread.start()

    def take(self, turn: _Turn) -> None:
        self._turns.put(turn)

    def abandon(self) -> None:
        self._turns.put(None)

    def end(self) -> None:
        self.abandon()
        self._thread.join()

    def _work(self) -> None:
        while (turn := self._turns.get()) is not None:
            turn.act()
            del turn  # what its actions refer to must not outlive it here


class _Turn:
    """Steps that a thread takes one after the other."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._attempts = [_Attempt(*step) for step in steps]
        self._running = threading.Lock()
        self._running.acquire()
        # held while a step begins, and while the turn is given up
        self._changing = threading.Lock()
        self._is_given_up = False

    def act(self) -> None:
        for attempt in self._attempts:
            with self._changing:
                if self._is_given_up:
                    return
                attempt.begin()
            attempt.act()
        self._running.release()

    def results(self, limits: Sequence[float]) -> list[StepResult]:
        """Of all steps, or as far as the first that hangs: then the turn is given up."""
        for place, (attempt, limit) in enumerate(zip(self._attempts, limits, strict=False)):
            if self._hangs(attempt, limit):
                return [*(each.result() for each in self._attempts[:place]), attempt.as_hung()]
        return [attempt.result() for attempt in self._attempts]

    def _hangs(self, attempt: _Attempt, limit: float) -> bool:
        """Whether it goes on after ``limit``, and for longer than `RESERVE_S`."""
        while attempt.ended_at is None:
            now = clock.monotonic()
            begun_at = attempt.begun_at
            until = max(limit, (now if begun_at is None else begun_at) + RESERVE_S)
            if self._running.acquire(timeout=max(0.0, until - now)):  # the whole turn has ended
                self._running.release()
                return False
            with self._changing:
                if begun_at is not None and attempt.ended_at is None:
                    self._is_given_up = True
                    return True
        return False


class _Attempt:
    """A step that is taken in a thread."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name, self._action, self._error = name, action, ""
        self.begun_at: float | None = None
        self.ended_at: float | None = None

    def begin(self) -> None:
        self.begun_at = clock.monotonic()

    def act(self) -> None:
        try:
            self._action()
        except BaseException as raised:
            self._error = traceback.format_exception_only(type(raised), raised)[-1].strip()
        self.ended_at = clock.monotonic()

    def result(self) -> StepResult:
        return StepResult(self._name, self._seconds(), self._error)

    def as_hung(self) -> StepResult:
        return StepResult(self._name, self._seconds(), "did not end in time: abandoned, still running", hung=True)

    def _seconds(self) -> float:
        """Of a step that has begun."""
        assert self.begun_at is not None
        return (clock.monotonic() if self.ended_at is None else self.ended_at) - self.begun_at


class AbortTorchDistributed(Abort):
    """Releases pending Gloo and NCCL operations and takes all process groups down.

    Does nothing where torch.distributed is not in use; may be called at any moment, and more than once. With NCCL all
    groups are aborted at the same time, and the CUDA graphs of the process are reset, since an abort waits for those
    that captured a collective. During a call of a wrapped function a group that the program is just shutting down is
    waited for, 2 s at most, and not aborted.

    Args:
        torch_fr_trace_path: nvidia-resiliency-ext's name for ``flight_records``, which counts where both are given.
        deadline: a timedelta, or seconds, in all; default 10.
        flight_records: folder for the records of torch's flight recorder, written before the abort: ``rank_R`` in a
            folder ``iteration_I``; NCCL's are for ``torchfrtrace``. Default None: where ``NVRX_FR_TRACE_PATH`` says,
            else ``TORCH_FR_DUMP_TEMP_FILE``, if one is set; in the latter each restart over the one before.
        cuda_graphs: False: CUDA graphs stay as they are; for programs whose graphs capture no collective and outlive a
            restart. Default True.
        nccl_bootstrap: False: a rank that waits in NCCL's bootstrap (``ncclCommInitRank``) for one that is gone is not
            released, but killed at ``hard_timeout``; for programs with network code of their own that this library
            might take for NCCL's, see `inprocess.collectives.nccl_bootstrap`. Default True.
        nccl_wake: False: NCCL's service threads are left to notice an abort by themselves, which takes half a second;
            see `inprocess.collectives.nccl_wake`. Default True.

    Raises:
        OptionError: `deadline` is not a duration greater than 0, or the first argument is no folder.
    """

    def __init__(
        self,
        torch_fr_trace_path: str | Path | None = None,
        *,
        deadline: datetime.timedelta | float = DEADLINE_S,
        flight_records: str | Path | None = None,
        cuda_graphs: bool = True,
        nccl_bootstrap: bool = True,
        nccl_wake: bool = True,
    ) -> None:
        if not isinstance(torch_fr_trace_path, str | os.PathLike | None):
            raise OptionError(
                f"AbortTorchDistributed({torch_fr_trace_path!r}): the first argument is torch_fr_trace_path, a folder; "
                f"pass deadline={torch_fr_trace_path!r} by name"
            )
        self.deadline = seconds("deadline", deadline, positive=True)
        self.flight_records = flight_records or torch_fr_trace_path or os.environ.get("NVRX_FR_TRACE_PATH") or None
        self.cuda_graphs = cuda_graphs
        self.nccl_bootstrap = nccl_bootstrap
        self.nccl_wake = nccl_wake

    def __call__(self, state: FrozenState) -> FrozenState:
        bootstrap.allowed = self.nccl_bootstrap
        if dist.is_available():
            Ladder(self._rungs(state), self.deadline).run()
        return state

    def _rungs(self, state: FrozenState) -> list[Step | Sequence[Step]]:
        pairs, current = state.world_size, groups.current()
        of_nccl = [group for group in current if nccl.is_used_by(group)]
        with_nccl = bool(of_nccl)
        alone = any(map(nccl.is_recorded_by_itself, of_nccl))
        shutdowns.doom(of_nccl)
        rungs: list[Step | Sequence[Step]] = []
        rank = state.rank if state.active_rank is None else state.active_rank
        if current and (record := nccl.record_file(self.flight_records, state.iteration, rank)):
            rungs.append(("flight recorder", lambda: nccl.dump_flight_record(record, alone)))
        # before anything that makes the function fail, which frees them all
        rungs.append(("results of functional collectives", results.pending))
        rungs.append(("Gloo connections", lambda: shutdown_gloo_connections(pairs)))
        if bootstrap.is_needed():  # before the aborts: one that is in the making holds them up
            rungs.append(("NCCL's bootstrap", bootstrap.cut))
        under_way = _Countdown(len(current))
        together: list[Step] = [
            (f"process group {groups.name_of(group)}", functools.partial(_abort_group, current, place, under_way))
            for place, group in enumerate(current)
        ]
        if bootstrap.is_needed() and current:
            again = functools.partial(bootstrap.keep_cutting, under_way.wait, self.deadline)
            together.append(("NCCL's bootstrap again", again))
        if with_nccl and self.nccl_wake:
            together.append(("NCCL's service threads", lambda: nccl_wake.until(under_way.wait)))
        if with_nccl and self.cuda_graphs:
            together.append(("CUDA graphs", self._reset_graphs))
        if together:
            rungs.append(together)
        if with_nccl:
            rungs.append(("flight recorder's memory", nccl.forget_flight_record))
        rungs.append(("torch's tables", lambda: _forget(current)))
        if groups.is_making():  # it may have made connections meanwhile
            rungs.append(("Gloo connections again", lambda: shutdown_gloo_connections(pairs)))
        return rungs

    def _reset_graphs(self) -> None:
        if nccl.graphs.reset(min(nccl.REPLAY_LIMIT_S, self.deadline / 2)):
            remembered.graphs_were_reset()


def _abort_group(current: Sequence[Any], place: int, under_way: _Countdown) -> None:
    """Not as a bound method: the list is emptied in the end, and no step may be a group's last owner."""
    try:
        current[place].abort()
    finally:
        under_way.ended()


class _Countdown:
    """So many steps that have not ended yet."""

    def __init__(self, steps: int) -> None:
        self._changed = threading.Condition()
        self._left = steps

    def ended(self) -> None:
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether all have ended within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left <= 0, timeout)


def _forget(current: list[Any]) -> None:
    groups.forget()
    remembered.aborted()
    dead_groups.keep(current)


class AbortTransformerEngine(Abort):
    """Frees what TransformerEngine keeps of communicators: its user buffers, and the group in its state of FP8.

    Does nothing where the program does not use it. Freeing waits for the GPU: let it run after the groups are aborted,
    with ``Compose(AbortTransformerEngine(), AbortTorchDistributed())``, whose last part runs first.

    Args:
        deadline: a timedelta, or seconds; default 10.

    Raises:
        OptionError: `deadline` is not a duration greater than 0.
    """

    def __init__(self, deadline: datetime.timedelta | float = DEADLINE_S) -> None:
        self.deadline = seconds("deadline", deadline, positive=True)

    def __call__(self, state: FrozenState) -> FrozenState:
        # imported by the program or not in use; importing it takes seconds, and the main thread may be importing it
        engine = sys.modules.get("transformer_engine.pytorch")
        if engine is not None:
            rungs = [("TransformerEngine user buffers", engine.module.base.destroy_ub)]
            modules = [sys.modules.get(f"transformer_engine.pytorch.{each}") for each in ("quantization", "fp8")]
            manager: Any = next(filter(None, (getattr(each, "FP8GlobalStateManager", None) for each in modules)), None)
            if manager is not None:
                rungs.append(("TransformerEngine's state of FP8", manager.reset))
            Ladder(rungs, self.deadline).run()
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Ends the processes that write nvidia-resiliency-ext's asynchronous checkpoints; the next save starts new ones.

    Does nothing where the program does not use ``nvidia_resiliency_ext.checkpointing``.

    Args:
        deadline: a timedelta, or seconds; default 10.

    Raises:
        OptionError: `deadline` is not a duration greater than 0.
    """

    def __init__(self, deadline: datetime.timedelta | float = DEADLINE_S) -> None:
        self.deadline = seconds("deadline", deadline, positive=True)

    def __call__(self, state: FrozenState) -> FrozenState:
        core = sys.modules.get("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
        if core is not None:
            Ladder([("asynchronous checkpoints", core.abort_nvrx_checkpoint)], self.deadline).run()
        return state
