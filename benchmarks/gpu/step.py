"""What the library costs while nothing happens: steps of a small transformer in bf16, bare and with it, in turn.

Each turn trains the same model for as many steps in each of `VARIANTS`, in the same processes, each time with a new
process group. A step is the mean of these steps, from one synchronization of the device to the next.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import inprocess
from benchmarks.gpu.place import Place
from benchmarks.gpu.plan import Request
from benchmarks.job import Job, Mark, free_port, mark
from benchmarks.work import Transformer

BARE, AGAIN = "no library", "no library, again"
#: in this order in each turn; what is bare twice shows what the measurement says where there is nothing to measure
VARIANTS = (BARE, "ping()", "ping() and commit()", "ping(), commit(), copies", AGAIN)
WARM_UP = 3

Commit = Callable[[int], contextlib.AbstractContextManager[Any]]


# --- inside a rank ------------------------------------------------------------------------------------------------


class Training:
    """A rank's model, and one variant of its steps after the other."""

    def __init__(self, place: Place, request: Request, rank: int, folder: str) -> None:
        self._place, self._rank, self._folder = place, rank, folder
        self._device = place.enter(rank, request.world_size)
        sizes = self._sizes = request.sizes
        torch.manual_seed(0)
        self._model = Transformer(sizes["words"], sizes["width"], sizes["layers"]).to(self._device)
        self._optim = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._words = torch.randint(sizes["words"], (sizes["batch"], sizes["length"] + 1), device=self._device)
        self._stores = self._count = 0

    def run(self) -> None:
        self._calibrate()
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        mark("begins", self._rank, 0, parameters=parameters, steps=self._count)
        for turn in range(self._sizes["turns"]):
            for variant in VARIANTS:
                seconds = self._variant(variant)
                mark("step", self._rank, turn, variant=variant, seconds=seconds)
        mark("trained", self._rank, 0)

    def _calibrate(self) -> None:
        """As many steps as there is time for, a multiple of those between two copies, on all ranks the same."""
        self._count = every = self._sizes["every"]
        seconds = torch.tensor(self._bare(), device=self._device)
        self._place.init_process_group(self._new_store())
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        steps = self._sizes["seconds"] / seconds.item()
        dist.destroy_process_group()
        self._count = max(2, min(20, round(steps / every))) * every

    def _new_store(self) -> str:
        self._stores += 1
        return os.path.join(self._folder, f"store{self._stores}")

    def _bare(self) -> float:
        self._place.init_process_group(self._new_store())
        return self._train(_nothing, _no_commit, 0)

    def _variant(self, variant: str) -> float:
        if variant in (BARE, AGAIN):
            return self._bare()

        @inprocess.Wrapper()
        def train(call: inprocess.CallWrapper = None) -> float:  # type: ignore[assignment]
            self._place.init_process_group()
            if "commit" not in variant:
                return self._train(call.ping, _no_commit, 0)
            every = self._sizes["every"] if "copies" in variant else 0
            # parameters were written to meanwhile: to one of an earlier turn they would be torn
            live = inprocess.LiveState(model=self._model, optim=self._optim, copy_every=every)
            return self._train(call.ping, live.commit, live.recover(call))

        seconds: float = train()
        return seconds

    def _train(self, ping: Callable[[], None], commit: Commit, step: int) -> float:
        """The mean of steps (seconds); ends the process group."""
        model = DistributedDataParallel(self._model)
        warm_up = WARM_UP + 2 * self._sizes["every"]  # both copies have their room then
        for number in range(step, step + warm_up):
            self._step(model, ping, commit, number)
        self._place.synchronize()
        begin = time.perf_counter()
        for number in range(step + warm_up, step + warm_up + self._count):
            self._step(model, ping, commit, number)
        self._place.synchronize()
        seconds = time.perf_counter() - begin
        del model  # before its group
        dist.destroy_process_group()
        return seconds / self._count

    def _step(self, model: DistributedDataParallel, ping: Callable[[], None], commit: Commit, number: int) -> None:
        ping()
        inputs, targets = self._words[:, :-1], self._words[:, 1:]
        with torch.autocast(self._device.type, torch.bfloat16):
            predicted = model(inputs)
            loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1), targets.flatten())
        self._optim.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with commit(number + 1):
            self._optim.step()


def _nothing() -> None:
    """In place of ping()."""


def _no_commit(step: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


# --- outside ------------------------------------------------------------------------------------------------------


def measure(place: Place, request: Request) -> dict[str, Any]:
    """Run all turns, or as many as there is time for."""
    size = request.world_size
    with Job(size) as job:
        folder = str(job.folder)
        job.start(lambda rank: Training(place, request, rank, folder).run(), free_port())
        done = job.wait(lambda marks: sum(found.name == "trained" for found in marks) == size, request.limit)
        job.let_end()
        return evaluate(request, job, done)


def evaluate(request: Request, job: Job, done: bool) -> dict[str, Any]:
    """What the turns that were completed say."""
    turns = complete_turns(job.marks, request.world_size)
    note = "" if turns else "no turn was completed"
    return {"values": slower(turns), "note": note, "errors": [] if done else job.errors(), **size_of(job.marks)}


def slower(turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Milliseconds of the bare step, and percent that the others take more, by turn."""
    values: dict[str, list[float]] = {}
    for turn in turns:
        bare = (turn[BARE] + turn[AGAIN]) / 2
        values.setdefault("ms", []).append(round(bare * 1e3, 3))
        for name in VARIANTS[1:]:
            other = turn[BARE] if name == AGAIN else bare
            values.setdefault(name, []).append(round((turn[name] / other - 1) * 100, 3))
    return values


def size_of(marks: list[Mark]) -> dict[str, int]:
    """Parameters of the model, and how many steps a figure is the mean of."""
    found = next((found.fields for found in marks if found.name == "begins"), {})
    return {name: found.get(name, 0) for name in ("parameters", "steps")}


def complete_turns(marks: list[Mark], world_size: int) -> list[dict[str, float]]:
    """Of each turn that all ranks have done: variant -> seconds, the mean of the ranks."""
    found: dict[int, dict[str, list[float]]] = {}
    for one in marks:
        if one.name == "step":
            turn = found.setdefault(one.iteration, {name: [] for name in VARIANTS})
            turn[one.fields["variant"]].append(one.fields["seconds"])
    whole = [turn for turn in found.values() if all(len(seconds) == world_size for seconds in turn.values())]
    return [{name: statistics.mean(seconds) for name, seconds in turn.items()} for turn in whole]
