"""How long after a fault a rank has its batches again: a ``DataLoader`` made in the function, and a ``KeptLoader``.

``python -m benchmarks.loader``: one of two ranks raises in the middle of a step, while the other waits for it in an
all-reduce. Each has four workers, which decode for some milliseconds per sample. Times are from the fault until the
last rank has entered the function, has its first batch, and has the second one, a step later. The first restart of a
job is told apart from later ones. Jobs of the two kinds run in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import inprocess
from benchmarks.job import Job, free_port, last, mark
from benchmarks.restart import explain, in_ms
from benchmarks.work import Packed

WORLD_SIZE, VICTIM, WORKERS, BATCH = 2, 1, 4, 8
#: bytes of a sample once it is decoded; seconds of a step, in which the processor is free as beside a GPU
SAMPLE, STEP = 3 * 320 * 320, 0.1
#: the fault is in this step of each run of the function
STEPS = 8
LIMIT = 120.0
KINDS = {"fresh": "`DataLoader` made in the function", "kept": "`KeptLoader`"}
MOMENTS = {"entry": "function entered", "batch": "first batch", "next": "second batch"}


class Images(Dataset[Any]):
    """Each is unpacked, and scaled as pictures are."""

    def __init__(self) -> None:
        self._packed = Packed(SAMPLE)

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._packed.unpack().reshape(3, 320, 320).float().sub_(8).div_(4)
        return torch.nn.functional.interpolate(image[None], scale_factor=0.5, mode="bilinear")[0], index


class Rank:
    """What one process of the job does."""

    def __init__(self, kind: str, restarts: int, rank: int) -> None:
        self._kind, self._restarts, self._rank = kind, restarts, rank
        self._sampler = inprocess.ElasticSampler(10_000, BATCH)
        self._images, self._step = Images(), 0
        self._kept = inprocess.KeptLoader(self._loader())

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(self._images, batch_sampler=self._sampler, num_workers=WORKERS, generator=torch.Generator())

    def run(self) -> None:
        inprocess.Wrapper(max_repeats=None)(self.train)()

    def train(self, call: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]
        mark("entry", self._rank, call.iteration)
        dist.init_process_group("gloo")
        self._sampler.position = self._step * BATCH * WORLD_SIZE
        batches: Iterator[Any] = self._kept.from_step(self._step) if self._kind == "kept" else iter(self._loader())
        for number, (_, indices) in zip(range(STEPS + 1), batches, strict=False):
            assert indices.tolist()[0] == self._sampler._at(self._sampler.position + self._rank * BATCH)
            if number < 2:
                mark(("batch", "next")[number], self._rank, call.iteration)
            call.ping()
            time.sleep(STEP)
            if number == STEPS and self._rank == VICTIM and call.iteration < self._restarts:
                mark("fault", self._rank, call.iteration)
                raise RuntimeError("injected by the benchmark")
            dist.all_reduce(torch.ones(1))
            self._step += 1
            self._sampler.advance()
        dist.destroy_process_group()


def measure(kind: str, restarts: int) -> list[dict[str, Any]]:
    """One job: milliseconds for each of its restarts."""
    everybody, found = set(range(WORLD_SIZE)), list[dict[str, Any]]()
    with Job(WORLD_SIZE) as job:
        job.start(lambda rank: Rank(kind, restarts, rank).run(), free_port())
        if not job.wait(lambda marks: last(marks, "next", restarts, everybody) is not None, LIMIT):
            raise SystemExit(f"{kind}: {explain(LIMIT, job, everybody, [])}; {job.errors()}")
        job.let_end()
        for iteration in range(restarts):
            fault = last(job.marks, "fault", iteration, {VICTIM}) or 0
            times = {name: last(job.marks, name, iteration + 1, everybody) or 0 for name in MOMENTS}
            found.append({"first": iteration == 0, **{name: in_ms(at - fault) for name, at in times.items()}})
    return found


def decoding() -> float:
    """Milliseconds of a processor for a sample."""
    images, begin = Images(), time.process_time()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    for index in range(50):
        images[index]
    torch.set_num_threads(threads)
    return (time.process_time() - begin) / 50 * 1000


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians, in milliseconds."""
    lines = [f"| fault to | {' | '.join(f'{KINDS[kind]}, {when}' for when in ('first', 'later') for kind in KINDS)} |"]
    lines.append("| --- |" + " --- |" * 2 * len(KINDS))
    for name, words in MOMENTS.items():
        cells = [
            f"{statistics.median(each[name] for each in found[kind] if each['first'] == first):.0f} ms"
            for first in (True, False)
            for kind in KINDS
        ]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=6, help="of each kind (default 6)")
    parser.add_argument("--restarts", type=int, default=4, help="in each job (default 4)")
    options = parser.parse_args()
    print(f"{decoding():.1f} ms of a processor per sample, {BATCH} per batch, {STEP * 1000:.0f} ms per step")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(options.jobs):
        for kind in KINDS:
            found[kind] += measure(kind, options.restarts)
            print(number, kind, json.dumps(found[kind][-options.restarts :]), file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
