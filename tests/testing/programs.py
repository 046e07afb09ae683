"""Functions that the tests of `inprocess.testing` run, as a user's would be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import inprocess
from inprocess.store import FileStore
from inprocess.testing import here

FOLDER = os.environ.get("CHECKPOINTS", ".")


@inprocess.Wrapper()
def train(steps: int, call: inprocess.CallWrapper = None) -> torch.Tensor:  # type: ignore[assignment]
    """All ranks add up the same numbers; a checkpoint every five steps."""
    dist.init_process_group("gloo")
    weight, start, path = torch.zeros(4), 0, f"{FOLDER}/state.pt"
    if os.path.exists(path):
        state = torch.load(path)
        weight, start = state["weight"], state["step"]
    here("resume", step=start)
    for step in range(start, steps):
        call.ping()
        part = torch.full((4,), float(step))
        dist.all_reduce(part)
        weight += part / dist.get_world_size()
        if step % 5 == 4 and dist.get_rank() == 0:
            here("save")
            torch.save({"weight": weight, "step": step + 1}, f"{path}.new")
            os.replace(f"{path}.new", path)
        dist.barrier()
    dist.destroy_process_group()
    return weight


@inprocess.Wrapper()
def until_whole(size: int, call: inprocess.CallWrapper = None) -> int:  # type: ignore[assignment]
    """Until so many ranks are there in another iteration than the first."""
    dist.init_process_group("gloo")
    while True:
        call.ping()
        dist.barrier()
        if dist.get_world_size() == size and call.iteration > 0:
            dist.destroy_process_group()
            return call.iteration


def prepared(steps: int, *, offset: int = 0) -> Any:
    """Calls a wrapped function."""
    return train(steps) + offset


def group_outside(steps: int) -> Any:
    dist.init_process_group("gloo")
    return train(steps)


@inprocess.Wrapper()
def leaks(folder: str, steps: int, call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
    """A thread and a file more in each run."""
    threading.Thread(target=threading.Event().wait, name=f"prefetch-{call.iteration}", daemon=True).start()
    _open.append(open(f"{folder}/log", "a"))  # noqa: SIM115
    for _ in range(steps):
        call.ping()


_open: list[Any] = []


class Trainer:
    """Has what it trains with, as users' own do; torch compiles nothing, but makes a folder for it."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def fit(self, steps: int) -> int:
        return self.offset + len(optimized(steps))

    @classmethod
    def make(cls, offset: int) -> str:
        return type(cls(offset)).__name__


class Later(Trainer):
    """Inherits `make`."""


@inprocess.Wrapper()
def optimized(steps: int, call: inprocess.CallWrapper = None) -> list[int]:  # type: ignore[assignment]
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    for _ in range(steps):
        call.ping()
        optimizer.step()
    return list(range(steps))


@inprocess.Wrapper()
def leaves_a_child() -> None:
    subprocess.Popen(["sleep", "60"])


_kept: dict[str, Any] = {}


@inprocess.Wrapper()
def keeps_in_a_dict(steps: int, call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
    _kept.setdefault("steps", []).append(steps)  # before a peer can fail, which may interrupt the next line
    dist.init_process_group("gloo")
    if "group" not in _kept:
        _kept["group"] = dist.new_group([0, 1])
    for _ in range(steps):
        call.ping()
        dist.barrier(_kept["group"])


@inprocess.Wrapper()
def unpicklable() -> Any:
    return (one for one in ())


def nothing_wrapped() -> int:
    return 1


@inprocess.Wrapper()
def handles_sigterm(call: inprocess.CallWrapper = None) -> int:  # type: ignore[assignment]
    """SIGTERM is no fault for it."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    while not got:
        call.ping()
        time.sleep(0.001)
    signal.signal(signal.SIGTERM, before)
    return len(got)


@inprocess.Wrapper()
def start_method() -> str:
    return multiprocessing.get_start_method()


@inprocess.Wrapper()
def saves_by_keyword(folder: str, call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
    call.ping()
    torch.save({}, f=f"{folder}/state.pt")


@inprocess.Wrapper()
def says_event() -> None:
    here("x", event=1)


@inprocess.Wrapper()
def environment() -> dict[str, str]:
    return dict(os.environ)


@inprocess.Wrapper()
def makes_files(removes: bool, call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
    """A rank that is killed leaves its file; the others leave theirs only where they do not remove it."""
    with tempfile.NamedTemporaryFile(delete=removes):
        for _ in range(2):
            call.ping()


@inprocess.Wrapper()
def exits(code: int) -> None:
    sys.exit(code)


def in_a_file(folder: str) -> None:
    """The ranks' store is a file, which no process serves."""
    inprocess.Wrapper(store_factory=FileStore, store_kwargs={"file_name": f"{folder}/store"})(_pings)()


def _pings(call: inprocess.CallWrapper) -> None:
    call.ping()
