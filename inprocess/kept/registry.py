"""What is reset between two iterations: what the libraries of this room keep, and what the program names itself."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from inprocess.call.part import CallContext, IterationContext, Part
from inprocess.call_wrapper import restarting_call
from inprocess.kept import (
    accelerate,
    asyncio_run,
    context_parallel,
    debug_server,
    deepspeed,
    dynamo,
    lightning,
    local_main,
    profiler,
    rpc,
    source,
    torch_checkpoint,
    torch_thread,
)
from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger

__all__ = ["on_restart", "registry"]

log = get_logger("inprocess")
Reset = TypeVar("Reset", bound=Callable[[], object])


@dataclass(frozen=True)
class Entry:
    """Something to reset, where the program has imported this module (empty: always)."""

    name: str
    module: str
    reset: Callable[[], object]
    #: registered while the function ran, so it belongs to that iteration
    once: bool = False
    #: what is there when a call begins is of the program around it
    inside: bool = False


#: in this order; the checkpoint process and thread first, since they may be using what the others reset
KNOWN = (
    Entry("torch's process for asynchronous checkpoints", torch_checkpoint.MODULE, torch_checkpoint.reset),
    Entry("torch's threads for asynchronous checkpoints", torch_thread.MODULE, torch_thread.reset),
    Entry("torch's profiler", profiler.MODULE, profiler.reset, inside=True),
    Entry("torch.distributed.rpc", rpc.MODULE, rpc.reset),
    Entry("torch's debug server", debug_server.MODULE, debug_server.reset),
    Entry("asyncio", asyncio_run.MODULE, asyncio_run.reset, inside=True),
    Entry("torch's context parallelism", context_parallel.MODULE, context_parallel.reset),
    Entry("accelerate", accelerate.MODULE, accelerate.reset),
    Entry("DeepSpeed's ZeRO", deepspeed.MODULE, deepspeed.reset),
    *(Entry(name, name, functools.partial(source.restore, name)) for name in source.MODULES),
)


class Registry:
    """One per process. Used by the main thread."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, reset: Callable[[], object], once: bool) -> None:
        """A reset of the program's own. The same one again changes nothing."""
        if not any(entry.reset == reset for entry in self._entries):  # a bound method is another object each time
            self._entries.append(Entry(getattr(reset, "__qualname__", repr(reset)), "", reset, once))

    def reset(self, between_calls: bool = False) -> None:
        """The function was left, perhaps in the call before. What raises is logged, and the others are reset all the
        same."""
        entries, self._entries = self._entries, [entry for entry in self._entries if not entry.once]
        for entry in (*KNOWN, *entries):
            if (not entry.module or entry.module in sys.modules) and not (between_calls and entry.inside):
                _apply(entry.name, entry.reset)

    def enter(self, rank: int | None, world_size: int) -> None:
        """An iteration begins, with this rank and world size in the environment; None: in which this is a reserve."""
        # also where it is not loaded yet: torch imports it with the first use, while the function runs
        _apply("torch.compile", lambda: dynamo.enter(rank, world_size))
        if rank is None:
            return
        _apply("torch's debug server", debug_server.enter)
        _apply("torch's profiler", profiler.enter)
        _apply("asyncio", asyncio_run.enter)
        if lightning.MODULE in sys.modules:
            _apply("lightning", lambda: lightning.enter(rank))
        for name in local_main.MODULES:
            if name in sys.modules:
                _apply(name, functools.partial(local_main.enter, name))


def _apply(name: str, reset: Callable[[], object]) -> None:
    try:
        reset()
    except Exception as error:
        log.warning(
            "the reset of %s before a restart failed (%s): what it keeps is that of the last iteration",
            name,
            in_words(error),
        )


def on_restart(reset: Reset) -> Reset:
    """Have a function called at each restart: for what the program, or a library that is not known here, keeps.

    It is called in the main thread, after this rank has left the wrapped function. May be used as a decorator.

    Registered while the wrapped function runs, it is called at the end of that iteration only. Otherwise it is called
    at each restart, and before the first iteration of each later call; registering it twice changes nothing. It must
    not use ``torch.distributed``: the groups are aborted. What it raises is logged, and the restart goes on.

    Args:
        reset: takes no argument; what it returns is ignored.

    Returns:
        The function itself.

    Raises:
        TypeError: it cannot be called.
    """
    if not callable(reset):
        raise TypeError(f"on_restart={reset!r}: a function without arguments is needed")
    registry.add(reset, once=restarting_call() is not None)
    return reset


#: one per process
registry = Registry()


def _begin(call: CallContext) -> None:
    if call.number > 1:
        registry.reset(between_calls=True)  # the call before may have ended without a restart


def _enter(iteration: IterationContext) -> None:
    registry.enter(iteration.state.active_rank, iteration.state.active_world_size)


part = Part(call_begins=_begin, iteration_begins=_enter, function_left=registry.reset)
