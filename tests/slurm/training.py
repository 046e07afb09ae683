"""What the jobs of `jobs.py` train: integers, so that the end is the same to the last digit for any number of ranks.

    python training.py FOLDER [--steps N] [--at RANK:STEP:DEED ...]

A deed is done once in the life of the job, also if it is started again from its checkpoint: ``kill`` (this process),
``raise``, ``hang``, ``run COMMAND`` (a shell's, and go on), ``hold COMMAND`` (the same, and stay until a restart).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist

import inprocess
from inprocess.initialize import RetryController
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SAMPLES, MODULUS = 24, 1_000_003


def expected(steps: int) -> int:
    """The weight after so many steps: one that is lost, done twice or done without all samples changes it."""
    weight = 0
    for step in range(steps):
        weight = advance(weight, sum(value(step, sample) for sample in range(SAMPLES)))
    return weight


def value(step: int, sample: int) -> int:
    return (31 * step + 17 * sample) % 101


def advance(weight: int, total: int) -> int:
    return (3 * weight + total + 1) % MODULUS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--at", action="append", default=[], type=lambda text: text.split(":", 2))
    parser.add_argument("--active", type=int, help="so many ranks train, the others are spares")
    parser.add_argument("--min-ranks", type=int, default=1, help="with fewer, wait for replacements")
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--soft-timeout", type=float, default=200)
    parser.add_argument("--pidfile", action="store_true")
    return parser.parse_args()


def do(args: argparse.Namespace, rank: int, step: int, call: inprocess.CallWrapper) -> None:
    for number, (who, when, deed) in enumerate(args.at):
        if (int(who), int(when)) != (rank, step):
            continue
        try:
            os.close(os.open(args.folder / f"deed{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            continue
        kind, _, command = deed.partition(" ")
        print(f"rank {rank} at step {step}: {deed}", flush=True)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise RuntimeError("a fault, once")
        while kind == "hang":
            signal.pause()
        with call.disable_hang_protection():
            subprocess.run(["bash", "-c", command], check=True)
            while kind == "hold":
                signal.pause()


def train(args: argparse.Namespace, call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    checkpoint = args.folder / "checkpoint"
    step, weight = map(int, checkpoint.read_text().split()) if checkpoint.exists() else (0, 0)
    if rank == 0:
        where = " ".join(f"{name}={os.environ.get(name)}" for name in ("LOCAL_WORLD_SIZE", "SLURM_RESTART_COUNT"))
        print(f"begins at step {step} with {ranks} ranks, iteration {call.iteration}, {where}", flush=True)
    while step < args.steps:
        call.ping()
        do(args, rank, step, call)
        total = torch.tensor(sum(value(step, sample) for sample in range(rank, SAMPLES, ranks)))
        dist.all_reduce(total)
        step, weight = step + 1, advance(weight, int(total))
        if rank == 0 and step % 10 == 0:
            with call.atomic():
                checkpoint.with_suffix(".new").write_text(f"{step} {weight}")
                checkpoint.with_suffix(".new").replace(checkpoint)
    dist.destroy_process_group()
    return f"{step} steps, {ranks} ranks, weight {weight}"


def main() -> None:
    args = arguments()
    least = RetryController(min_world_size=args.min_ranks, wait_for_replacement=60)
    spares = MaxActiveWorldSize(args.active) if args.active else None
    wrap = inprocess.Wrapper(
        initialize=least,
        rank_assignment=inprocess.Compose(spares, ShiftRanks()) if spares else ShiftRanks(),
        soft_timeout=args.soft_timeout,  # while one rank holds, the others make no progress
        hard_timeout=args.soft_timeout + 10,
        heartbeat_timeout=10,
        barrier_timeout=args.soft_timeout + 60,
        monitor_process_pidfile=str(args.folder.resolve() / "monitor_{rank}.pid") if args.pidfile else None,
    )

    def function(args: argparse.Namespace, call: inprocess.CallWrapper) -> str:
        return train(args, call)

    for _ in range(args.calls):
        result = wrap(function)(args)
        left = [name for name in NAMES if name in os.environ]
        print(f"task {os.environ.get('SLURM_PROCID')}: {result}; left in the environment: {left}", flush=True)


if __name__ == "__main__":
    main()
