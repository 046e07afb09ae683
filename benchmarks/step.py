"""How much slower a training step of 2 ms gets with `ping()` and `atomic()` in it, at default options.

Two ranks, one for each core, run the same steps bare, wrapped, and bare again. ``python -m benchmarks.step`` prints one
line of JSON: percent, of the mean step and of the median one.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import libraries
from benchmarks.job import Job, free_port, mark, output

RANKS = 2
#: seconds
STEP = 2e-3
#: seconds until all have the same thing to do
MEET = 1.0
AVERAGES = {"mean_percent": statistics.mean, "median_percent": statistics.median}


def work(matrix: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)


def calibrate(matrix: torch.Tensor) -> int:
    """How often makes a step."""
    work(matrix, 2000)
    begin = time.perf_counter()
    work(matrix, 2000)
    return max(1, round(2000 * STEP / (time.perf_counter() - begin)))


def steps(count: int, action: Callable[[], None], ping: Callable[[], None], atomic: Callable[[], Any]) -> list[float]:
    took = []
    for _ in range(count):
        begin = time.perf_counter()
        ping()
        action()
        with atomic():
            pass
        took.append(time.perf_counter() - begin)
    return took


def main(options: argparse.Namespace, rank: int) -> None:
    torch.set_num_threads(1)
    matrix = torch.rand(64, 64)
    times = calibrate(matrix)

    def action() -> None:
        work(matrix, times)

    def bare() -> list[float]:
        return steps(options.steps, action, nothing, contextlib.nullcontext)

    def body(call: libraries.Call) -> list[float]:
        time.sleep(MEET)  # its own start-up is not what is measured
        return steps(options.steps, action, call.ping, call.atomic)

    first = bare()
    if options.library == "plain":  # what the measurement itself says where there is nothing to measure
        time.sleep(MEET)
        wrapped = bare()
    else:
        wrapped = libraries.wrap(options.library, options.setting, rank, body, {})()
    second = bare()
    measured = (first, wrapped, second)
    mark("slower", rank, 0, **{name: slower(of, *measured) for name, of in AVERAGES.items()})


def nothing() -> None:
    """In place of ping()."""


def slower(of: Callable[[list[float]], float], first: list[float], wrapped: list[float], second: list[float]) -> float:
    return (of(wrapped) / ((of(first) + of(second)) / 2) - 1) * 100


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with Job(RANKS) as job:
        job.start(lambda rank: main(options, rank), free_port())
        job.wait(lambda marks: len([found for found in marks if found.name == "slower"]) == RANKS, 120)
        job.let_end()
        told = [found.fields for found in job.marks if found.name == "slower"]
    values = {name: round(statistics.mean(fields[name] for fields in told), 3) for name in AVERAGES}
    return {"library": options.library, "setting": options.setting, "values": values, "note": ""}


if __name__ == "__main__":
    arguments = libraries.parser(__doc__, "inprocess", "nvrx", "plain")
    arguments.add_argument("--steps", type=int, default=1500, help="of each of the three runs")
    output(**measure(arguments.parse_args()))
