"""The long test for leaks: a thousand restarts in one process, and what grows. `python -m tests.growth --help`.

Each rank takes a sample now and then when it enters the function: what it holds, what its monitor holds, how many keys
the job's store has. What an early stretch of samples and a late one differ by, per restart, must be less than
`TOLERANCE`.
The controls do without this library what a restart does to torch: groups are made and destroyed, with an all-reduce
that succeeds or fails. What they grow by is torch's own; the tolerance for bytes is a little more than that.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import datetime
import gc
import io
import logging
import math
import os
import random
import statistics
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from inprocess import events
from inprocess.collectives.background import FREEING
from inprocess.collectives.dead_groups import dead_groups
from inprocess.events import Event
from inprocess.testing import forked_monitor, leaks
from inprocess.testing.server import become_subreaper
from tests.harness import Run, start_server
from tests.harness.child import Context
from tests.ranks import regrouping, targets

#: what one restart may add on average. Numbers of things: nothing, but for those that are just ending or beginning when
#: the sample is taken
TOLERANCE: Mapping[str, float] = {
    "heap": 4096,  # bytes that malloc has given out
    "blocks": 2.0,  # blocks of Python's allocator
    "rss": 4096,
    "uss": 12288,  # of a process that was forked: pages of its parent count from the first write on
    "monitor rss": 512,  # one that makes and ends a store server in each iteration
    "monitor uss": 512,
    "threads": 0.01,
    "descriptors": 0.02,
    "sockets": 0.02,
    "objects": 0.5,  # what the garbage collector knows
    "library": 0.01,  # objects of this library's types
    "tensors": 0.01,
    "groups": 0.01,
    "tables": 0.01,  # entries of torch's tables of groups
    "stores": 0.01,
    "modules": 0.01,
    "loggers": 0.01,
    "keys": 0.01,  # the store's, in the monitor that serves it
}
#: of these there may be no more late than early, in a run of any length
COUNTED = (
    "threads",
    "descriptors",
    "sockets",
    "library",
    "tensors",
    "groups",
    "tables",
    "stores",
    "modules",
    "loggers",
)
#: of an iteration's groups, which end in the background
ENDING = ("groups", "threads", "descriptors", "sockets")
#: what the user's own list of exceptions adds in the kind `kept`: the exception, its frames, what is in them
KEPT_MORE: Mapping[str, float] = {"heap": 8192, "blocks": 80, "rss": 12288, "uss": 20480, "objects": 40}
#: DistributedDataParallel adds this by itself: see its control
DDP_MORE: Mapping[str, float] = {"heap": 16384, "blocks": 8, "rss": 16384, "uss": 20480, "objects": 4}
#: kind -> its own tolerances
MORE: Mapping[str, Mapping[str, float]] = {"kept": KEPT_MORE, "ddp": DDP_MORE}

#: torch's own, of process groups
TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")

#: how long a thread that has ended may take to exit (seconds)
EXITING_S = 1.0

#: how many there were in each sample
_threads: list[float] = [math.inf]
_kept: list[BaseException] = []
_groups: weakref.WeakSet[Any] = weakref.WeakSet()
_stores: weakref.WeakSet[Any] = weakref.WeakSet()


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "mapped", "f", "g", "used", "h", "i")]


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Mallinfo


# --- in the rank ----------------------------------------------------------------------------------------------------


def run_kind(context: Context) -> Any:
    if context.args["kind"] in BACKENDS:
        _register()
    gc.unfreeze()  # the server that forks ranks has frozen what it imported; a user's program has not
    forked_monitor.forget()  # each page of its rank that it writes to would count; a user's monitor is a program
    try:
        return context.wrap(_body, max_repeats=None)()
    finally:
        gc.enable()
        _base.clear()
        _kept.clear()
        del _threads[1:]


def _body(context: Context, call: Any) -> list[int]:
    rank, size = targets.place_in_world()
    context.emit("entered", iteration=call.iteration)
    if call.iteration % context.args["every"] == 0:
        context.emit("sample", **_sample(context, call))
    kind = context.args["kind"]
    dist.init_process_group(BACKENDS.get(kind, "gloo"), timeout=targets.LONG, **OPTIONS.get(kind, {}))
    if kind in OPTIONS:
        regrouping.reconfigure(call.store, 1)
    _groups.add(dist.group.WORLD)
    _stores.add(call.store)
    targets.check_sum(size)
    if call.iteration < context.args["restarts"]:
        try:
            KINDS[kind](call.iteration % size == rank)
        except ValueError:  # this rank's own
            context.emit("raised", iteration=call.iteration)
            raise
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def _ordinary(raises: bool) -> None:
    """One rank raises, the others wait for it in an all-reduce."""
    tensor = torch.ones(1000)
    if raises:
        raise ValueError("growth")
    dist.all_reduce(tensor)


def _loop(raises: bool) -> None:
    while not raises:
        pass
    raise ValueError("growth")


def _sleep(raises: bool) -> None:
    if raises:
        raise ValueError("growth")
    time.sleep(600)


def _ddp(raises: bool) -> None:
    """Two steps of a model, and an all-reduce in which one rank does not take part."""
    model = _train()
    _ordinary(raises)
    del model


def _train() -> Any:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
    return model


def _tensor_parallel(raises: bool) -> None:
    """Meshes, and modules that refer to them, are in reference cycles; each group has threads and sockets."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16 * len(mesh.mesh)), torch.nn.Linear(16 * len(mesh.mesh), 8))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    until = time.monotonic() + random.uniform(0, 0.02)
    while not raises or time.monotonic() < until:  # so that the others are interrupted anywhere in a step
        model(torch.ones(4, 8)).sum().backward()
    raise ValueError("growth")


def _pending(raises: bool) -> None:
    """Results of functional collectives that nobody waits for."""
    from torch.distributed import _functional_collectives as functional

    results = [functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD) for _ in range(3)]
    _sleep(raises)
    del results


def _sharded(raises: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicas", "shards"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    for module in (*model, model):
        fully_shard(module, mesh=mesh["shards"])
    model(torch.ones(4, 8)).sum().backward()
    _ordinary(raises)


class _Plain(dist.ProcessGroup):
    """A group in Python, as small backends are: torch keeps it itself, and it can do nothing that it need not."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def getBackendName(self) -> str:
        return "plain"

    @property
    def supports_splitting(self) -> bool:
        return False


def _make_foreign(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _make_plain(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return _Plain(rank, size)


def _register() -> None:
    """Backends that torch does not know, as its plug-ins register them, once in a process."""
    import_module("torch.testing._internal.distributed.fake_pg")  # registers "fake"

    for name, make in (("foreign", _make_foreign), ("plain", _make_plain)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, make, devices=["cpu"])


def _other_backends(raises: bool) -> None:
    """The default group's backend is not torch's; beside it one that does nothing, and one in Python."""
    for name in ("foreign", "fake", "plain"):
        group = dist.new_group(backend=name, timeout=targets.LONG)
        _groups.add(group)
        dist.all_reduce(torch.ones(4), group=group)
    _ordinary(raises)


def _keep(raises: bool) -> None:
    """Every exception, with its traceback, stays for ever, as in a list of errors that somebody keeps to print it."""
    try:
        _ordinary(raises)
    except BaseException as error:
        _kept.append(error)
        raise


KINDS: dict[str, Callable[[bool], None]] = {
    "ordinary": _ordinary,
    "loop": _loop,
    "sleep": _sleep,
    "ddp": _ddp,
    "tensor parallel": _tensor_parallel,
    "sharded": _sharded,
    "pending": _pending,
    "kept": _keep,
    "other backends": _other_backends,
}
#: of the default group, where it is not Gloo
BACKENDS = {"other backends": "foreign"}
#: and how it is made
OPTIONS = {"reconfigured": {"enable_reconfigure": True}}
if regrouping.CAN_RECONFIGURE:
    KINDS["reconfigured"] = _ordinary
#: so many times as many restarts: its resident memory levels off later (per restart, in 1,000 of them: 2.0 to 5.5 kB;
#: in 4,000: 1.5 kB), while its heap, blocks and objects are those of the others
LONGER = {"pending": 4}
CONTROLS = ("control", "failing", "ddp control")
#: torch itself leaves things behind: a pipe of the first store server; the last model, and the folder of its compiler
UNCHECKED = (*CONTROLS, "ddp")


def _sample(context: Context, call: Any) -> dict[str, float]:
    """What this process and its monitor hold now, once the groups of the last iteration have ended."""
    wait_for_groups()
    if context.args["collect"]:
        gc.collect()
    else:
        gc.disable()  # what only a collection frees is to be seen
    numbers = _python()
    if context.args["memory"]:
        numbers |= _own_memory() | _monitor()
    links = [_link(name) for name in os.listdir("/proc/self/fd")]
    numbers |= {
        "threads": _count_threads(),
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
    }
    if context.rank == 0:
        numbers["keys"] = _base_store(context).num_keys()
    return numbers


def wait_for_groups() -> None:
    """Until those of the last iteration have ended."""
    for thread in [*dead_groups.free(), *threading.enumerate()]:  # the MonitorThread frees them, perhaps just now
        if thread.name == FREEING and thread._started.wait(1.0):
            thread.join(1.0)  # where Gloo does not end an operation, that thread waits for its timeout


def _count_threads() -> int:
    """One that has been joined exits a moment later, and for that there is no event: where there are more than in the
    last sample, look again for a bounded time."""
    until = time.monotonic() + EXITING_S
    while (count := psutil.Process().num_threads()) > _threads[-1] and time.monotonic() < until:
        time.sleep(0.002)
    _threads.append(count)
    return count


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""


def _monitor() -> dict[str, float]:
    children = leaks.children_of(os.getpid())
    if not children:  # the control
        return {}
    memory = psutil.Process(children[0]).memory_full_info()
    return {"monitor rss": memory.rss, "monitor uss": memory.uss}


def _python() -> dict[str, float]:
    info = _mallinfo()
    objects = gc.get_objects()
    kinds = Counter(type(thing) for thing in objects)
    kinds[Event] -= len(events.recent())  # 1,000 at most
    return {
        "heap": info.used + info.mapped,
        "blocks": sys.getallocatedblocks(),
        "objects": len(objects),
        "library": sum(count for kind, count in kinds.items() if _is_ours(kind)),
        "tensors": sum(count for kind, count in kinds.items() if issubclass(kind, torch.Tensor)),
        "groups": len(_groups),
        "stores": len(_stores),
        "tables": sum(len(getattr(c10d._world, name)) for name in TABLES),
        "modules": len(sys.modules),
        "loggers": len(logging.root.manager.loggerDict),
    }


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith("inprocess") and not issubclass(
        kind, BaseException
    )  # those may be kept by the user


_base: list[Any] = []


def _base_store(context: Context) -> Any:
    """A connection of our own to the job's store."""
    if not _base:
        port = int(context.spec.environment["MASTER_PORT"])
        _base.append(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    return _base[0]


def run_control(context: Context) -> Any:
    """Groups made and destroyed, an all-reduce in each, and connections to a store; this library is not used."""
    rank, size = targets.place_in_world()
    hook = sys.excepthook
    port = int(os.environ["MASTER_PORT"])
    base = dist.TCPStore("127.0.0.1", port, size, rank == 0, targets.LONG)
    for number in range(context.args["restarts"] + 1):
        if number % context.args["every"] == 0:
            context.emit("sample", iteration=number, **(_python() | _own_memory()))
        store = None  # the last group and its connections end here
        clients = [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(2)]
        store = dist.PrefixStore(str(number), clients[0])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=targets.LONG)
        targets.check_sum(size)
        if context.args["kind"] == "ddp control":
            model = _train()
            del model  # before its group: the last owner of a group waits for it
        if context.args["kind"] == "failing" and rank > 0:
            with contextlib.suppress(RuntimeError):  # rank 0 is gone
                dist.all_reduce(torch.ones(1000))
        dist.destroy_process_group()
    del base
    sys.excepthook = hook
    return "done"


def _own_memory() -> dict[str, float]:
    memory = psutil.Process().memory_full_info()
    return {"rss": memory.rss, "uss": memory.uss}


# --- in the parent --------------------------------------------------------------------------------------------------


def series(
    start: Callable[..., Run],
    kind: str,
    size: int,
    restarts: int,
    every: int,
    deadline: float,
    memory: bool = True,
    collect: bool = True,
) -> dict[tuple[int, str], list[tuple[int, float]]]:
    """(rank, name of a number) -> its values by iteration."""
    return numbers_of(restart(start, kind, size, restarts, every, deadline, memory, collect))


def restart(
    start: Callable[..., Run],
    kind: str,
    size: int,
    restarts: int,
    every: int,
    deadline: float,
    memory: bool,
    collect: bool,
) -> list[Any]:
    """The ranks, which have restarted so often."""
    target = run_control if kind in CONTROLS else run_kind
    args = {"kind": kind, "restarts": restarts, "every": every, "memory": memory, "collect": collect}
    with contextlib.redirect_stdout(io.StringIO()) as story:
        ranks = start(target, size, args=args).wait(deadline, check=kind not in UNCHECKED)
    assert [rank.exception for rank in ranks] == [None] * size, [rank.trace for rank in ranks]
    assert all(len(rank.of("sample")) > restarts // every for rank in ranks), story.getvalue()
    return list(ranks)


def numbers_of(ranks: Sequence[Any]) -> dict[tuple[int, str], list[tuple[int, float]]]:
    found: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for rank in ranks:
        for event in rank.of("sample"):
            for name, value in event.items():
                if name in TOLERANCE:
                    found.setdefault((rank.rank, name), []).append((event["iteration"], value))
    return found


def latencies(ranks: Sequence[Any]) -> list[float]:
    """Of each restart, in seconds: from the error of one rank to the function's entry on the last one."""
    raised = {event["iteration"]: event["t"] for rank in ranks for event in rank.of("raised")}
    entered: dict[int, float] = {}
    for event in (event for rank in ranks for event in rank.of("entered")):
        entered[event["iteration"]] = max(entered.get(event["iteration"], 0.0), event["t"])
    return [entered[iteration + 1] - at for iteration, at in sorted(raised.items())]


def more_than_early(found: Mapping[tuple[int, str], Sequence[tuple[int, float]]]) -> list[str]:
    """What there is more of at the end of a short run than at its begin: groups, threads, descriptors, sockets."""
    wrong = []
    for (rank, name), points in found.items():
        values = [value for _, value in points]
        if name in ENDING and min(values[-4:]) > max(values[1:4]):
            wrong.append(f"{name} of rank {rank}: {values}")
    return wrong


def growth(name: str, values: Sequence[tuple[int, float]]) -> float:
    """Per restart, between the second fifth of the samples and the last one: the first fifth is warming up.

    Resident memory: the median of the slopes between one tenth and the next. malloc takes memory from the kernel in
    steps of megabytes, one of which in a thousand restarts is no growth; what was given out (``heap``) has no steps.
    """
    fifth = max(len(values) // 5, 1)
    if name.endswith(("rss", "uss")):
        tenth = max(fifth // 2, 1)
        parts = [values[start : start + tenth] for start in range(fifth, len(values) - tenth + 1, tenth)]
        return statistics.median(_slope(early, late) for early, late in pairwise(parts))
    return _slope(values[fifth : 2 * fifth], values[-fifth:])


def _slope(early: Sequence[tuple[int, float]], late: Sequence[tuple[int, float]]) -> float:
    x0, x1 = (statistics.median(x for x, _ in part) for part in (early, late))
    y0, y1 = (statistics.median(y for _, y in part) for part in (early, late))
    return (y1 - y0) / (x1 - x0)


def limits(kind: str) -> dict[str, float]:
    return {**TOLERANCE, **MORE.get(kind, {})}


def grown(found: Mapping[tuple[int, str], Sequence[tuple[int, float]]], kind: str) -> list[str]:
    """One line for each number that grows by more than its tolerance."""
    allowed = limits(kind)
    return [
        f"{kind}: {name} of rank {rank} grows by {per_restart:.3f} per restart, more than {allowed[name]:g}"
        for (rank, name), values in found.items()
        if (per_restart := growth(name, values)) > allowed[name]
    ]


def table(found: Mapping[tuple[int, str], Sequence[tuple[int, float]]], kind: str) -> str:
    """For people: first, early and late value of each number, and its growth per restart; the rank that grows most."""
    lines = [f"{kind:14}{'first':>14}{'after 20%':>14}{'last':>14}{'per restart':>14}{'tolerance':>12}"]
    for name, allowed in limits(kind).items():
        of_name = [values for (_, number), values in found.items() if number == name]
        if of_name:
            worst = max(of_name, key=partial(growth, name))
            shown = "".join(f"{worst[place][1]:14,.0f}" for place in (0, len(worst) // 5, -1))
            lines.append(f"{name:14}{shown}{growth(name, worst):14.3f}{allowed:12g}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.growth", description=__doc__)
    parser.add_argument("--restarts", type=int, default=1000)
    parser.add_argument("--ranks", type=int, action="append", help="default: 2 and 3")
    parser.add_argument("--kind", action="append", choices=[*KINDS, *CONTROLS], help="default: all")
    parser.add_argument("--every", type=int, default=10, help="iterations between two samples")
    parser.add_argument("--csv", help="write all samples into this file")
    options = parser.parse_args(arguments)
    become_subreaper()
    start_server()
    wrong: list[str] = []
    rows: list[tuple[object, ...]] = []
    for size in options.ranks or [2, 3]:
        for kind in options.kind or [*KINDS, *CONTROLS]:
            begin = time.monotonic()
            restarts = options.restarts * LONGER.get(kind, 1)
            found = series(Run, kind, size, restarts, options.every, deadline=restarts * 2 + 60)
            print(table(found, kind), f"{size} ranks, {time.monotonic() - begin:.0f} s\n", sep="\n", flush=True)
            wrong += grown(found, kind) if kind in KINDS else []
            rows += [(kind, size, rank, name, *point) for (rank, name), points in found.items() for point in points]
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([("kind", "ranks", "rank", "name", "iteration", "value"), *rows])
    print("\n".join(wrong) or "nothing grows")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
