"""Training with a fault every few seconds: how much of the time goes into steps that count.

Data parallel training of a small network on 4 ranks. Every few seconds one rank raises or is killed, by a schedule that
a seed decides and that is the same for all libraries. Each iteration begins at the last checkpoint; rank 0 writes one
every ``SAVE`` steps. Counted is the time of the steps that are in the last checkpoint: neither steps that were lost and
repeated, nor what lies between two iterations. (Counting steps would reward losing ranks: on few cores the remaining
ones are faster.)

``python -m benchmarks.goodput --library inprocess --seed 1`` prints one line of JSON; ``--library plain`` is the run
without any library, ``--seed 0`` without faults.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import libraries
from benchmarks.job import Job, free_port, mark, output

RANKS = 4
#: steps between two checkpoints
SAVE = 10
BATCH = 32
KINDS = ("raise", "raise", "raise", "kill")
#: ranks that are killed at most: without replacements a library goes on with fewer
KILLS = 2


def parser() -> argparse.ArgumentParser:
    parser = libraries.parser(__doc__, "inprocess", "nvrx", "torchrun", "plain")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the schedule of faults; 0: none")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults")
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def schedule(seed: int, seconds: float, every: float) -> list[tuple[float, str, int]]:
    """When, what and on which initial rank."""
    if not seed:
        return []
    generator = random.Random(seed)
    alive, faults = list(range(RANKS)), []
    for number in range(1, int(seconds / every)):
        kind = generator.choice(KINDS if len(alive) > RANKS - KILLS else KINDS[:-1])
        victim = generator.choice(alive)
        if kind == "kill":
            alive.remove(victim)
        faults.append((number * every, kind, victim))
    return faults


# --- inside a rank ------------------------------------------------------------------------------------------------


class Training:
    """One iteration's training, on one rank."""

    def __init__(self, options: argparse.Namespace, initial_rank: int) -> None:
        self._folder = Path(os.environ["BENCHMARK_FOLDER"])
        self._faults = schedule(options.seed, options.seconds, options.every)
        self._initial_rank, self._seconds = initial_rank, options.seconds
        self._rank = dist.get_rank()
        torch.manual_seed(0)
        self._net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self._model = DistributedDataParallel(self._net)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01, momentum=0.9)
        #: seconds in steps that count, and in those since the last checkpoint
        self._useful = self._since = 0.0

    def run(self) -> None:
        self._load()
        begin = self._begin()
        step, over, last = 0, torch.zeros(1), time.monotonic()
        while not over:
            self._fail_if_due(time.monotonic() - begin)
            self._step()
            step += 1
            over.fill_(time.monotonic() - begin > self._seconds)
            dist.all_reduce(over)
            self._since += time.monotonic() - last
            last = time.monotonic()
            if step % SAVE == 0 and self._rank == 0:
                self._save()
        del self._model  # before its group

    def _step(self) -> None:
        data, target = torch.rand(BATCH, 64), torch.randint(10, (BATCH,))
        self._optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self._model(data), target).backward()
        self._optimizer.step()

    def _begin(self) -> float:
        """The moment at which the job's first iteration began to train, for everybody."""
        dist.barrier()
        file = self._folder / "begin"
        if self._rank == 0 and not file.exists():
            (self._folder / "begin.new").write_text(repr(time.monotonic()))
            (self._folder / "begin.new").rename(file)
        dist.barrier()
        return float(file.read_text())

    def _fail_if_due(self, now: float) -> None:
        for number, (when, kind, victim) in enumerate(self._faults):
            if victim == self._initial_rank and now > when:
                fired = self._folder / f"fired-{number}"
                if fired.exists():
                    continue
                fired.touch()
                mark("fault", self._initial_rank, 0, kind=kind)
                if kind == "raise":
                    raise RuntimeError("injected by the benchmark")
                os.kill(os.getpid(), signal.SIGKILL)

    def _save(self) -> None:
        self._useful, self._since = self._useful + self._since, 0.0
        state = {"net": self._net.state_dict(), "optimizer": self._optimizer.state_dict(), "useful": self._useful}
        torch.save(state, self._folder / "checkpoint.new")
        (self._folder / "checkpoint.new").rename(self._folder / "checkpoint")

    def _load(self) -> None:
        if (self._folder / "checkpoint").exists():
            state = torch.load(self._folder / "checkpoint")
            self._net.load_state_dict(state["net"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._useful = state["useful"]


def body(options: argparse.Namespace, initial_rank: int, iteration: int) -> None:
    torch.set_num_threads(1)
    libraries.init_process_group(options.library, iteration)
    Training(options, initial_rank).run()
    mark("done", initial_rank, iteration)
    dist.destroy_process_group()


def main(options: argparse.Namespace, rank: int) -> None:
    if options.library == "plain":
        body(options, rank, 0)
        return
    fn = libraries.wrap(
        options.library, options.setting, rank, lambda call: body(options, call.rank, call.iteration), {}
    )
    fn()


# --- outside ------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with Job(RANKS) as job:
        os.environ["BENCHMARK_FOLDER"] = str(job.folder)
        if options.library == "torchrun":
            job.torchrun("benchmarks.goodput", restarts=100)
        else:
            job.start(lambda rank: main(options, rank), free_port(), peer_store=options.library == "nvrx")

        done = job.wait(lambda marks: any(found.name == "done" for found in marks), options.seconds + 30)
        job.let_end()
        checkpoint = job.folder / "checkpoint"
        useful = torch.load(checkpoint)["useful"] if checkpoint.exists() else 0.0
        faults = [found.fields["kind"] for found in job.marks if found.name == "fault"]
    note = "" if done else f"does not end; stuck after {len(faults)} faults"
    values = {"percent": round(useful / options.seconds * 100, 2), "faults": len(faults)}
    return {
        "library": options.library,
        "setting": options.setting,
        "seed": options.seed,
        "values": values,
        "note": note,
    }


if __name__ == "__main__":
    arguments = parser().parse_args()
    if arguments.in_rank:
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        body(arguments, rank, attempt)
    else:
        output(**measure(arguments))
