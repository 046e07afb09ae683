"""One of four workers is killed: until four take part again, and for how long nobody trained meanwhile.

``python -m benchmarks.respawn`` measures this library's launcher and torchrun, which restarts all workers, in turn,
and prints medians and their ratios. Times are from the SIGKILL to the first all-reduce of all four, in milliseconds.
A new process imports torch first, which is most of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks import libraries
from benchmarks.job import Job, Mark, mark

WORKERS, VICTIM = 4, 1
#: seconds of a step, and for how long the job trains before the fault
STEP, BEFORE = 0.01, 1.0
#: seconds until an attempt is given up
LIMIT = 60.0
MODULES = {"inprocess": "inprocess.run", "torchrun": "torch.distributed.run"}


# --- inside a worker ----------------------------------------------------------------------------------------------


def train(library: str, iteration: int) -> None:
    """Steps with an all-reduce each, until the victim has died and everybody is there again."""
    libraries.init_process_group(library, iteration)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1))
    begin = time.monotonic()
    if iteration and size == WORKERS:
        mark("whole", rank, iteration)
    while not iteration or size < WORKERS:
        if not iteration and rank == VICTIM and time.monotonic() > begin + BEFORE:
            mark("fault", rank, iteration)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP)
        dist.all_reduce(torch.ones(1))
        mark("step", rank, iteration)
    dist.destroy_process_group()


def work(library: str) -> None:
    if library == "torchrun":
        train(library, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        return
    from inprocess import CallWrapper, Wrapper  # noqa: PLC0415  (torchrun's workers do without it)

    @Wrapper()
    def wrapped(call: CallWrapper | None = None) -> None:
        assert call is not None
        train(library, call.iteration)

    wrapped()


# --- outside ------------------------------------------------------------------------------------------------------


def measure(library: str) -> dict[str, float]:
    """One job."""
    with Job(WORKERS) as job:
        options = ["--warm-workers=0"] if library == "inprocess" else []  # `benchmarks.warm` has them
        args = ["--library", library, "--in-rank"]
        job.launch(MODULES[library], "benchmarks.respawn", args, restarts=1, options=options)
        job.wait(lambda marks: sum(found.name == "whole" for found in marks) == WORKERS, LIMIT)
        job.let_end()
        fault = next(found.t for found in job.marks if found.name == "fault")
        whole = max(found.t for found in job.marks if found.name == "whole")
        return {"whole": (whole - fault) / 1e6, "idle": idle(job.marks, fault, whole) / 1e6}


def idle(marks: Sequence[Mark], fault: int, whole: int) -> int:
    """Nanoseconds between the two in which no step ended: gaps of more than ten steps."""
    steps = sorted({fault, whole, *(found.t for found in marks if found.name == "step" and fault < found.t < whole)})
    return sum(after - before for before, after in pairwise(steps) if after - before > 10 * STEP * 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=MODULES, help="measure only this one")
    parser.add_argument("--repeat", type=int, default=5, help="jobs for each (default 5)")
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_rank:
        work(options.library)
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MODULES if options.library in (None, name)}
    for _ in range(options.repeat):
        for name, results in found.items():
            results.append(measure(name))
            print(name, json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps(summary(found)))


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians; and how many times longer torchrun takes, where ours takes any time."""
    middle = {
        name: {what: round(statistics.median(result[what] for result in results)) for what in results[0]}
        for name, results in found.items()
    }
    if len(middle) == 2:
        ours, theirs = middle["inprocess"], middle["torchrun"]
        middle["ratio"] = {what: round(theirs[what] / ours[what], 1) for what in ours if ours[what]}
    return middle


if __name__ == "__main__":
    main()
