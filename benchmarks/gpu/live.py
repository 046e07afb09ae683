"""A state of some GB on its way from GPU to GPU by `LiveState`, and to host memory, beside the plain ways to do it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.place import Place
from benchmarks.gpu.plan import Request
from benchmarks.job import Job, free_port, mark
from benchmarks.live import PLAIN, SIDE, Layers, plain, recover
from inprocess import LiveState

RECOVER = "recover(), from the other rank"
BROADCAST = "a plain broadcast of the same bytes"
BEGIN, COPY = "commit() that begins a copy", "a copy in host memory, until it is there"
PINNED = "a plain copy to pinned memory"
#: what each is compared with
BESIDE = {RECOVER: PLAIN, COPY: PINNED}
NAMES = (PLAIN, BROADCAST, RECOVER, PINNED, BEGIN, COPY)


# --- inside a rank ------------------------------------------------------------------------------------------------


class Rank:
    """One of two: 0 has the state, 1 is new. Rank 1 marks how long things took."""

    def __init__(self, place: Place, request: Request, rank: int) -> None:
        self._place, self._rank, self._rounds = place, rank, request.sizes["rounds"]
        device = place.enter(rank, request.world_size)
        with device:
            self._model = Layers(layers(request.sizes["gigabytes"]))

    def run(self) -> None:
        self._place.init_process_group()
        #: to wait on without keeping a GPU busy that both may share
        self._host = dist.new_group(backend="gloo")
        live = LiveState(model=self._model, copy_every=1)
        live.recover()
        if self._rank == 1:
            self._copies(live)
        del live
        for number in range(self._rounds + 1):
            self._note(number, PLAIN, lambda: plain(self._model, self._rank))
            self._note(number, BROADCAST, self._broadcast)
            self._note(number, RECOVER, lambda: recover(self._model, self._rank))
        dist.barrier(self._host)
        mark("done", self._rank, 0)
        dist.destroy_process_group()

    def _broadcast(self) -> None:
        for parameter in self._model.layers:
            dist.broadcast(parameter.data, 0)

    def _copies(self, live: LiveState) -> None:
        parameters = [parameter.data for parameter in self._model.layers]
        room = torch.empty(len(parameters), SIDE, SIDE, pin_memory=self._place.is_cuda)

        def copy() -> None:
            for target, source in zip(room, parameters, strict=True):
                target.copy_(source, non_blocking=True)

        def settle() -> None:
            live._saving.copies.settle()

        for number in range(self._rounds + 2):  # the first two make room for a copy each
            self._timed(number - 1, PINNED, copy)
            began = self._timed(number - 1, BEGIN, lambda number=number: commit(live, number), waits=False)  # type: ignore[misc]
            self._timed(number - 1, COPY, settle, began)

    def _note(self, number: int, name: str, action: Callable[[], object]) -> None:
        """Both ranks do it, from the same moment on."""
        dist.barrier(self._host)
        self._place.synchronize()
        self._timed(number, name, action)

    def _timed(
        self, number: int, name: str, action: Callable[[], object], before: float = 0.0, waits: bool = True
    ) -> float:
        """How long it took (seconds); the first time does not count. ``before`` belongs to it."""
        begin = time.perf_counter()
        action()
        if waits:
            self._place.synchronize()
        seconds = before + time.perf_counter() - begin
        if self._rank == 1 and number > 0:
            mark("took", self._rank, number, action=name, seconds=seconds)
        return seconds


def commit(live: LiveState, step: int) -> None:
    with live.commit(step):
        pass


# --- outside ------------------------------------------------------------------------------------------------------


def layers(gigabytes: float) -> int:
    """How many have about this size."""
    return max(1, round(gigabytes * 1e9 / (4 * SIDE * SIDE)))


def measure(place: Place, request: Request) -> dict[str, Any]:
    """All rounds, or as many as there is time for."""
    with Job(request.world_size) as job:
        job.start(lambda rank: Rank(place, request, rank).run(), free_port())
        done = job.wait(lambda marks: any(found.name == "done" for found in marks), request.limit)
        job.let_end()
        values: dict[str, list[float]] = {}
        for found in job.marks:
            if found.name == "took":
                values.setdefault(found.fields["action"], []).append(round(found.fields["seconds"], 6))
        note, errors = "" if values else "nothing was measured", [] if done else job.errors()
    nbytes = layers(request.sizes["gigabytes"]) * 4 * SIDE * SIDE
    return {"values": values, "note": note, "errors": errors, "bytes": nbytes}
