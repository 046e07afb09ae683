"""Reports of faults in a training with DistributedDataParallel and a DataLoader: causes deeper than one call."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.child import Context
from tests.harness.launch import HASTY, PATIENT

from . import targets
from .test_reports import report

MEMORY = Path("/sys/fs/cgroup/memory")
SIZE, VICTIM = 3, 1
#: the step of the fault. After a collective of another size Gloo ends the process (SIGABRT), and so would the next step
LAST = 7


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Those of one rank; in its worker the third one strikes."""

    def __init__(self, strike: Callable[[], None] | None) -> None:
        self._strike = strike

    def __len__(self) -> int:
        return LAST + 1

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2 and self._strike is not None:
            self._strike()
        return torch.ones(4)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def block() -> None:
    threading.Event().wait()


def deadlock(_: Any) -> None:
    """Two threads, each with the lock that the other one wants."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        second.acquire()


def skip_a_collective(_: Any) -> None:
    """The others have one more all-reduce before the next step."""


def another_collective(_: Any) -> None:
    dist.barrier()


def allocate(context: Context) -> None:
    """More than the limit of this rank's cgroup."""
    limit = MEMORY / context.args["cgroup"]
    used = int((limit / "memory.usage_in_bytes").read_text())
    (limit / "memory.limit_in_bytes").write_text(str(used + (32 << 20)))
    bytearray(os.urandom(1 << 20) * 256)


#: name -> (in the loader's worker, or on the rank; class)
KINDS: dict[str, tuple[Callable[[], None] | None, Callable[[Context], None] | None, str]] = {
    "a loader worker dies": (die, None, "input"),
    "a loader worker hangs": (block, None, "input"),
    "two locks": (None, deadlock, "hang"),
    "skips a collective": (None, skip_a_collective, "collective"),
    "another collective": (None, another_collective, "collective"),
    "the memory limit of a cgroup": (None, allocate, "oom"),
}


def train(context: Context, call: Any) -> list[int]:
    rank, size = targets.place_in_world()
    dist.init_process_group("gloo", timeout=targets.LONG)
    strikes = call.iteration == 0 and context.rank == VICTIM
    in_worker, on_rank, _ = KINDS[context.args["kind"]]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    samples = Samples(in_worker if strikes else None)
    loader = torch.utils.data.DataLoader(samples, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
    for step, batch in enumerate(loader):
        call.ping()
        model(batch).sum().backward()
        if strikes and step == LAST and on_rank is not None:
            on_rank(context)
        else:
            targets.check_sum(size)
    dist.destroy_process_group()
    return [call.iteration, rank, size]


def run(context: Context) -> Any:
    if "cgroup" in context.args and context.rank == VICTIM:  # with its monitor, as in a container
        (MEMORY / context.args["cgroup"] / "cgroup.procs").write_text(str(os.getpid()))
    try:
        return context.wrap(train)()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader leaves its own


@contextlib.contextmanager
def cgroup() -> Iterator[str]:
    """Of version 1: where both are mounted, that one has the memory controller."""
    name = f"inprocess-tests-{os.getpid()}"
    try:
        (MEMORY / name).mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup of version 1: {error}")
    try:
        yield name
    finally:
        (MEMORY / name).rmdir()


@pytest.mark.parametrize("name", KINDS)
def test_the_cause_is_named(launch, tmp_path, name):
    in_worker, _, kind = KINDS[name]
    options = (PATIENT if in_worker is die or kind == "oom" else HASTY) | {"run_dir": str(tmp_path)}
    with cgroup() if kind == "oom" else contextlib.nullcontext() as group:
        args = {"kind": name} | ({"cgroup": group} if group else {})
        results = launch(run, SIZE, wrapper=options, args=args).wait()
    (incident,) = report(tmp_path)
    assert (incident.verdict.kind, incident.verdict.initial_rank) == (kind, VICTIM), incident.verdict
    survivors = SIZE - (kind == "oom")
    assert [result.value[2] for result in results if result.value] == [survivors] * survivors
