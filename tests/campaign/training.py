"""What the ranks of the campaign do, and its faults that the harness does not have.

A small network in DistributedDataParallel, with batches from a DataLoader. An iteration begins anew, from the same
seeds, so what it returns depends on nothing but the number of ranks: whoever went on with the right ones has it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from inprocess.events import files
from inprocess.testing.faults import FOREVER, Fault
from tests.harness import faults
from tests.harness.child import Context
from tests.ranks.targets import LONG, check_sum, place_in_world

#: of each iteration, on each rank
STEPS, BATCH, WIDTH = 12, 4, 8
#: the step in which a worker of a DataLoader fails
BAD_STEP = 5
#: a worker that is late has given away everything before, and the rank waits for it (seconds)
LATE_S = 0.5
#: bytes that a rank may take in its cgroup before it takes `GREED`
MEMORY = 384 << 20
GREED = 64 << 20


class Samples(Dataset[torch.Tensor]):
    """Number ``index`` is made from it; a worker does what it is told to at the first one of `BAD_STEP`."""

    def __init__(self, size: int, harm: str) -> None:
        self._size, self._harm, self._taken = size, harm, 0

    def __len__(self) -> int:
        return STEPS * BATCH * self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        self._taken += 1
        if self._harm and self._taken > BAD_STEP * BATCH:
            time.sleep({"dies": 0.0, "is late and dies": LATE_S, "hangs": FOREVER}[self._harm])
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def run(context: Context) -> Any:
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        return context.wrap(CLEAN_UPS[context.args.get("clean_up", "none")])()
    finally:
        signal.signal(signal.SIGCHLD, handler)  # a DataLoader's own, which stays
        _comes_back.set()


def learn(context: Context, call: Any) -> list[Any]:
    """Returns [world size, digest of the weights]; leaves its group open."""
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    struck = call.iteration == 0 and rank == context.args.get("loader", -1)
    samples = Samples(size, context.args["harm"] if struck else "")
    sampler: Any = DistributedSampler(samples, size, rank, seed=1)
    workers = 1 if "loader" in context.args else 0
    start = "fork" if workers else None
    loader = DataLoader(samples, BATCH, sampler=sampler, num_workers=workers, multiprocessing_context=start)
    for step, batch in enumerate(loader):
        with _reduced(context, model, step):
            call.ping()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    dist.barrier()
    check_sum(size)
    return [size, digest(model)]


def meet_and_close() -> None:
    """A clean-up in which all ranks meet, as usual."""
    dist.barrier()
    dist.destroy_process_group()


def and_close(context: Context, call: Any) -> list[Any]:
    value = learn(context, call)
    dist.destroy_process_group()
    return value


def in_finally(context: Context, call: Any) -> list[Any]:
    try:
        return learn(context, call)
    finally:
        meet_and_close()


class Closing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        meet_and_close()


def in_exit(context: Context, call: Any) -> list[Any]:
    with Closing():
        return learn(context, call)


@contextmanager
def closing() -> Iterator[None]:
    try:
        yield
    finally:
        meet_and_close()


def in_generator(context: Context, call: Any) -> list[Any]:
    with closing():
        return learn(context, call)


def in_except(context: Context, call: Any) -> list[Any]:
    try:
        value = learn(context, call)
    except Exception as error:
        print(error)
        meet_and_close()
        raise
    meet_and_close()
    return value


def after_another(context: Context, call: Any) -> list[Any]:
    """A second error follows while the first one is looked at."""
    try:
        try:
            return learn(context, call)
        except ValueError as error:
            raise KeyError(error.args[7]) from None
    finally:
        meet_and_close()


#: how the function ends, by the word of the kind
CLEAN_UPS = {
    "none": and_close,
    "finally": in_finally,
    "__exit__": in_exit,
    "generator": in_generator,
    "except": in_except,
    "another": after_another,
}


class Skips(Exception):
    """Raised and caught at a point: gradients of this step are not reduced."""


def _reduced(context: Context, model: DistributedDataParallel, step: int) -> AbstractContextManager[None]:
    try:
        context.point(step)
    except Skips:
        return model.no_sync()
    return nullcontext()


def digest(model: torch.nn.Module) -> str:
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


# --- faults


@dataclass(frozen=True, repr=False)
class Spin(Fault):
    """An endless loop in Python."""

    noticed_by: ClassVar[str] = "soft_timeout"

    def strike(self, context: Any) -> None:
        faults.spin()


@dataclass(frozen=True, repr=False)
class Deadlock(Fault):
    """Two threads take two locks, each in an order of its own."""

    noticed_by: ClassVar[str] = "soft_timeout"

    def strike(self, context: Any) -> None:
        first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

        def other() -> None:
            with second:
                both.wait()
                with first:
                    pass

        thread = threading.Thread(target=other, name="saver")
        thread.start()
        try:
            with first:
                both.wait()
                with second:
                    pass
        finally:
            thread.join()


@dataclass(frozen=True, repr=False)
class OtherCollective(Fault):
    """This rank gathers, while the others reduce gradients."""

    noticed_by: ClassVar[str] = "soft_timeout"

    def strike(self, context: Any) -> None:
        mine = torch.ones(1 << 10)
        dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)


@dataclass(frozen=True, repr=False)
class SkippedCollective(Fault):
    """This rank does not take part in one reduction of gradients."""

    noticed_by: ClassVar[str] = "soft_timeout"

    def strike(self, context: Any) -> None:
        raise Skips


@dataclass(frozen=True, repr=False)
class ReturnsEarly(Fault):
    """The function returns on this rank, without a word to the others; ``closes``: its connections to them, too."""

    closes: bool = False
    noticed_by: ClassVar[str] = "soft_timeout"

    def strike(self, context: Any) -> None:
        if self.closes:
            dist.destroy_process_group()
        raise faults.Returns


@dataclass(frozen=True, repr=False)
class Greed(Fault):
    """Take memory until the kernel says no."""

    ends: ClassVar[bool] = True

    def strike(self, context: Any) -> None:
        taken = []
        while True:
            taken.append(bytearray(b"x" * (GREED >> 4)))


# --- where ranks live


@dataclass(frozen=True)
class InCgroup:
    """Moves one rank, and its monitor with it, into a memory cgroup."""

    path: str
    rank: int

    def __call__(self, rank: int) -> None:
        if rank == self.rank:
            Path(self.path, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


_comes_back = threading.Event()


class _HangingDisk:
    """`os`, but no write answers before the call has ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: bytes) -> int:
        _comes_back.wait()
        return os.write(fd, data)


@dataclass(frozen=True)
class OnHangingDisk:
    """Its events go to a disk that has stopped to answer; its monitor's do not."""

    def __call__(self, rank: int) -> None:
        files.os = _HangingDisk()  # type: ignore[attr-defined]
