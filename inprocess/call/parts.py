"""The parts of a call in their order: what begins first ends last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from inprocess.call.part import CallContext, CallEnd, IterationContext, Part
from inprocess.collectives import nccl
from inprocess.collectives.coalescing import contexts
from inprocess.collectives.dead_connections import dead_connections
from inprocess.collectives.dead_groups import dead_groups
from inprocess.collectives.default_group import default_groups
from inprocess.collectives.gloo_lost import lost_operations
from inprocess.collectives.nccl_bootstrap import bootstrap
from inprocess.collectives.nccl_shutdown import shutdowns
from inprocess.collectives.remembered import remembered
from inprocess.collectives.results import results
from inprocess.collectives.store_clients import store_clients
from inprocess.system import extensions
from inprocess.system.heap import heap
from inprocess.system.interpreter import interpreter

__all__ = ["Parts"]


def _show_group(context: IterationContext) -> None:
    state = context.state
    if state.active_rank is not None:
        default_groups.begin_iteration(state.active_rank, state.active_world_size, context.rendezvous, state.iteration)


#: those of the extensions, imported now: in a call there may be no descriptor left for that
BEFORE: tuple[Part, ...] = extensions.load("Part")
#: behind these, which so see an iteration first, and its garbage last
CORE = (
    Part(call_begins=lambda _: interpreter.begin(), call_ends=lambda _: interpreter.end()),
    Part(call_begins=lambda _: heap.begin(), function_begins=heap.enter, call_ended=heap.end),
    Part(call_begins=lambda call: shutdowns.begin(wakes=call.wakes_nccl), call_ended=shutdowns.end),
    Part(call_begins=lambda _: contexts.begin(), call_ended=contexts.end),
    Part(call_begins=lambda _: default_groups.begin(), iteration_begins=_show_group, call_ended=default_groups.end),
    Part(call_begins=lambda call: store_clients.begin(call.patience), call_ended=store_clients.end),
    Part(call_begins=lambda _: nccl.graphs.begin(), call_ended=nccl.graphs.end),
    # behind the heap: what that freezes has to be among what was there before
    Part(iteration_begins=lambda _: bootstrap.begin(), function_begins=bootstrap.enter, call_ended=bootstrap.end),
    Part(
        next_iteration=dead_groups.begin,
        started=dead_groups.free,
        collect=dead_groups.collect,
        call_ended=dead_groups.end,
    ),
    Part(next_iteration=remembered.forget, collect=remembered.collect, call_ended=remembered.forget),
    Part(next_iteration=results.begin, collect=results.collect, call_ended=results.end),
    # ends before the groups: their destructors may wait for the other side of a connection
    Part(next_iteration=dead_connections.begin, call_ended=dead_connections.end),
    Part(next_iteration=lost_operations.begin),
)


class Parts:
    """All of them, for one call. The methods are those of `Part`; only those parts are called that do something."""

    def __init__(self) -> None:
        parts = (*BEFORE, *CORE)
        self._acts: dict[str, list[Callable[..., object]]] = {
            field.name: [act for part in parts if (act := getattr(part, field.name)) is not field.default]
            for field in dataclasses.fields(Part)
        }

    def call_begins(self, context: CallContext) -> None:
        for act in self._acts["call_begins"]:
            act(context)

    def next_iteration(self) -> None:
        for act in self._acts["next_iteration"]:
            act()

    def started(self) -> None:
        for act in self._acts["started"]:
            act()

    def iteration_begins(self, context: IterationContext) -> None:
        for act in self._acts["iteration_begins"]:
            act(context)

    def function_begins(self) -> None:
        for act in self._acts["function_begins"]:
            act()

    def function_left(self) -> None:
        for act in self._acts["function_left"]:
            act()

    def collect(self) -> None:
        for act in reversed(self._acts["collect"]):
            act()

    def everybody_leaves(self) -> None:
        for act in self._acts["everybody_leaves"]:
            act()

    def call_ends(self, end: CallEnd) -> None:
        """Of each, also where another one raises."""
        with contextlib.ExitStack() as ends:
            for act in self._acts["call_ends"]:
                ends.callback(act, end)

    def call_ended(self) -> None:
        """Of each, also where another one raises."""
        with contextlib.ExitStack() as ends:
            for act in self._acts["call_ended"]:
                ends.callback(act)
