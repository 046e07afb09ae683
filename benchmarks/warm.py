"""One of four workers is killed, again and again: until four take part again, with and without a warm worker.

``python -m benchmarks.warm`` prints, for each, the median and the longest time from the SIGKILL to the end of the first
all-reduce of all four, the ratio of the medians, and what memory an idle warm worker takes. Its training is as small as
can be, so these are the costs of the restart alone; a program that loads data before its first call adds that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.job import Job, mark
from inprocess import CallWrapper, Wrapper

WORKERS, VICTIM = 4, 1
#: seconds of a step, and for how long the job trains between two faults at least
STEP, BETWEEN = 0.01, 1.0
#: seconds until an attempt is given up
LIMIT = 120.0


@Wrapper()
def train(call: CallWrapper | None = None) -> None:
    """Steps with an all-reduce each, for ever."""
    assert call is not None
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_world_size() == WORKERS:
        mark("whole", dist.get_rank(), call.iteration, pid=os.getpid())
    while True:
        call.ping()
        dist.all_reduce(torch.ones(1))
        time.sleep(STEP)


# --- outside ------------------------------------------------------------------------------------------------------


def measure(warm: int, repeat: int) -> tuple[list[float], dict[str, float]]:
    """Seconds from each fault until all are there again; and the memory of a warm worker in MB."""
    options = ["--restart-backoff=0", f"--warm-workers={warm}"]
    with Job(WORKERS) as job, open(job.folder / "errors", "w+") as errors:
        job.launch(
            "inprocess.run", "benchmarks.warm", ["--in-rank"], restarts=repeat, options=options, errors=errors.fileno()
        )
        found, memory = [], {}
        for number in range(repeat):
            pids = whole(job, number)
            if warm:
                memory = memory_of(ready(errors.name, number + 1))
            time.sleep(BETWEEN)
            fault = time.monotonic_ns()
            os.kill(pids[VICTIM], signal.SIGKILL)
            whole(job, number + 1)
            found.append((max(each.t for each in job.marks if each.name == "whole") - fault) / 1e9)
            print(warm, round(found[-1], 3), file=sys.stderr, flush=True)
    return found, memory


def whole(job: Job, faults: int) -> dict[int, int]:
    """Wait until all take part after so many faults; the process of each rank."""
    latest = [each for each in awaited(job, "whole", WORKERS * (faults + 1)) if each.name == "whole"][-WORKERS:]
    return {each.rank: each.fields["pid"] for each in latest}


def awaited(job: Job, name: str, number: int) -> Any:
    """Wait for so many marks of this name."""
    if not job.wait(lambda marks: sum(each.name == name for each in marks) >= number, LIMIT):
        raise SystemExit(f"no {name} within {LIMIT:g} s: {job.errors()}\n{(job.folder / 'errors').read_text()}")
    return job.marks


def ready(path: str, number: int) -> int:
    """Wait until so many warm workers were ready, by what the launcher writes; the process of the last one."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found = re.findall(r"a warm worker waits \(pid (\d+)\)", Path(path).read_text())
        if len(found) >= number:
            return int(found[-1])
        time.sleep(STEP)
    raise SystemExit(f"no warm worker within {LIMIT:g} s:\n{Path(path).read_text()}")


def memory_of(pid: int) -> dict[str, float]:
    """Of a warm worker and its monitor's program, in MB."""
    warm = psutil.Process(pid)
    found = [each.memory_full_info() for each in (warm, *warm.children())]
    return {name: round(sum(getattr(each, name) for each in found) / 1e6) for name in ("rss", "pss", "uss")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10, help="faults for each (default 10)")
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_rank:
        train()
        return
    cold, _ = measure(0, options.repeat)
    warm, memory = measure(1, options.repeat)
    middle = {name: statistics.median(times) for name, times in (("cold", cold), ("warm", warm))}
    worst = {"cold": max(cold), "warm": max(warm)}
    print(json.dumps({"median": middle, "worst": worst, "ratio": middle["cold"] / middle["warm"], "MB": memory}))


if __name__ == "__main__":
    main()
