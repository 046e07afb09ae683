"""The libraries that restart a function inside its process, behind one shape: `wrap(library, setting, ...)`.

``inprocess`` runs with its defaults. ``nvrx`` is nvidia-resiliency-ext, with its defaults and with the settings that
were fastest among those tried; nothing of it is changed.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from benchmarks.job import LIBUV, mark

#: of the process group (seconds); torch's default is half an hour
GLOO_TIMEOUT = 10.0
#: the fastest of the intervals that were tried (1, 10, 100 ms and 1 s), and no wait for last calls
SHORT = {
    "monitor_thread_interval": 0.01,
    "monitor_process_interval": 0.01,
    "progress_watchdog_interval": 0.01,
    "heartbeat_interval": 0.1,
    "last_call_wait": 0.0,
}


@dataclass(frozen=True)
class Call:
    """What the benchmark's function gets, whatever the library."""

    rank: int
    iteration: int
    ping: Callable[[], None]
    atomic: Callable[[], Any]


def parser(description: str | None, *libraries: str) -> argparse.ArgumentParser:
    """What every script wants to know: which library, with which setting."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", choices=libraries, default="inprocess")
    parser.add_argument("--setting", choices=("default", "tuned", "tree", "warm"), default="default")
    return parser


def wrap(
    library: str,
    setting: str,
    rank: int,
    fn: Callable[[Call], Any],
    timeouts: Mapping[str, float],
    active: int = 0,
    warm_up: Callable[[Any], None] | None = None,
) -> Callable[[], Any]:
    """The function, restarted by a library; ``rank`` is the initial one, ``active`` limits the active ranks (0: all);
    with the setting "tree" by a `Tree` of hosts of four, where the library has one. With the setting "warm" a reserve
    runs ``warm_up``.

    Marks ``abort``, ``aborted`` (in the library's own thread), ``left`` (the function), ``assign``, ``assigned`` and
    ``initialize`` in between.
    """
    durations = {name: datetime.timedelta(seconds=value) for name, value in timeouts.items()}
    if library == "inprocess":
        hooks = {"warm_up": warm_up} if setting == "warm" else {}
        return _inprocess(rank, fn, durations | hooks, active, setting == "tree")
    if setting == "tuned":
        durations = {name: datetime.timedelta(seconds=value) for name, value in SHORT.items()} | durations
    return _nvrx(rank, fn, durations, active)


def init_process_group(library: str, iteration: int, seconds: float = GLOO_TIMEOUT) -> None:
    """The rendezvous as the library's documentation has it; ``seconds``: the group's timeout."""
    limit = datetime.timedelta(seconds=seconds)
    if library in ("inprocess", "plain"):
        dist.init_process_group("gloo", timeout=limit)
        return
    # every restart needs keys of its own: nvrx's guide keeps one store outside the wrapped function; torchrun's agent
    # has one, where new workers would otherwise read the addresses of the dead
    port = os.environ["MASTER_PORT" if library == "torchrun" else "BENCHMARK_STORE"]
    host = os.environ["MASTER_ADDR"]
    store = dist.TCPStore(host, int(port), is_master=False, timeout=limit, use_libuv=LIBUV)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"iteration{iteration}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=limit,
    )


class Marks:
    """Hooks that mark when they are called."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def hook(self, name: str) -> Callable[[Any], Any]:
        def call(state: Any) -> Any:
            mark(name, self._rank, state.iteration)
            return state

        return call

    def around(self, first: str, fn: Callable[[Any], Any], then: str) -> Callable[[Any], Any]:
        def call(state: Any) -> Any:
            iteration = state.state.iteration if hasattr(state, "state") else state.iteration
            mark(first, self._rank, iteration)
            try:
                return fn(state)
            finally:
                mark(then, self._rank, iteration)

        return call


def _inprocess(
    rank: int, fn: Callable[[Call], Any], options: Mapping[str, Any], active: int, tree: bool
) -> Callable[[], Any]:
    import inprocess  # noqa: PLC0415
    from inprocess.rank_assignment import Layer, LayerFlag, MaxActiveWorldSize, ShiftRanks, Tree  # noqa: PLC0415

    marks = Marks(rank)
    order: Any = inprocess.Compose(MaxActiveWorldSize(active), ShiftRanks()) if active else ShiftRanks()
    if tree:
        root = Layer(max_ranks=active, key_or_fn=lambda state: "root", flag=LayerFlag.RESERVE)
        order = Tree([root, Layer(key_or_fn=lambda state: str(state.rank // 4), flag=LayerFlag.RESERVE)])

    def call(call: inprocess.CallWrapper = None) -> Any:  # type: ignore[assignment]
        return fn(Call(rank, call.iteration, call.ping, call.atomic))

    return inprocess.Wrapper(
        abort=marks.around("abort", inprocess.abort.AbortTorchDistributed(), "aborted"),
        finalize=marks.hook("left"),
        initialize=marks.hook("initialize"),
        rank_assignment=marks.around("assign", order, "assigned"),
        max_repeats=None,  # the same fault again and again is what is measured
        **options,
    )(call)


def _nvrx(rank: int, fn: Callable[[Call], Any], durations: Mapping[str, Any], active: int) -> Callable[[], Any]:
    import nvidia_resiliency_ext.inprocess as peer  # noqa: PLC0415

    marks = Marks(rank)
    assignment = peer.rank_assignment
    chosen = assignment.MaxActiveWorldSize(active) if active else assignment.ActivateAllRanks()
    order = peer.Compose(chosen, assignment.ShiftRanks())

    def of(base: type, call: Callable[[Any], Any]) -> Any:  # the peer takes instances of its own classes only
        return type("Marked", (base,), {"__call__": lambda self, state: call(state)})()

    def call(call: Any = None) -> Any:
        return fn(Call(rank, call.iteration, call.ping, call.atomic))

    call.__annotations__["call"] = peer.CallWrapper  # the peer does not resolve annotations that are texts
    return peer.Wrapper(
        store_kwargs={"host_name": "127.0.0.1", "port": int(os.environ["MASTER_PORT"])},
        abort=of(peer.abort.Abort, marks.around("abort", peer.abort.AbortTorchDistributed(), "aborted")),
        finalize=of(peer.finalize.Finalize, marks.hook("left")),
        initialize=of(peer.initialize.Initialize, marks.hook("initialize")),
        rank_assignment=of(assignment.RankAssignment, marks.around("assign", order, "assigned")),
        **durations,
    )(call)
