"""Ranks are killed and replaced, nothing is ever on disk, and the weights come out the same, bit for bit.

    python examples/live_recovery.py
    python examples/live_recovery.py --nproc 4 --faults "kill:rank=1,step=30 kill:rank=0,step=60 hang:rank=2,step=90"

It runs the training twice under `inprocess run`, without faults and with them, and compares. What a rank has in memory
survives a restart; a new process gets everything from one that has it: weights, the optimizer's state, the learning
rate. The random numbers, here those of the data and of Dropout, follow from step and rank.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import signal
import subprocess
import sys

import fault_schedule
import torch
import torch._dynamo  # the first backward and optimizer would import it: seconds, which look like a hang
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import inprocess
from inprocess.initialize import RetryController


def train(
    args: argparse.Namespace, live: inprocess.LiveState, parts: Parts, call: inprocess.CallWrapper = None
) -> tuple[int, str]:
    """From the newest step that any rank has to the end; returns the rank, and a digest of all that was trained."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    step = live.recover(call)
    # after recover: it gives all ranks what rank 0 has. Without the option it puts gradients into another order after
    # its first step, so those of that step would be summed in another order than without a restart
    model = DistributedDataParallel(parts.network, find_unused_parameters=True)

    while step < args.steps:
        call.ping()
        parts.faults.strike(step)
        images = torch.randn(args.batch, 32)
        loss = (model(images) - images.square()).square().mean()
        parts.optimizer.zero_grad()
        loss.backward()
        with live.commit(step + 1):  # no restart cuts this in half
            parts.optimizer.step()
            parts.schedule.step()
        step += 1

    dist.destroy_process_group()
    return rank, digest(parts.network, parts.optimizer)


class Parts:
    """What is trained; it lives as long as its process."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        wide = args.width
        self.network = torch.nn.Sequential(
            torch.nn.Linear(32, wide), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(wide, 32)
        )
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.steps)
        self.faults = faults(args)


def faults(args: argparse.Namespace) -> fault_schedule.Faults:
    """This process'; who replaces a rank that died has none of its own."""
    replaces = os.environ.get("INPROCESS_RESTART", "0") != "0"
    return fault_schedule.Faults([] if replaces else args.faults, int(os.environ["RANK"]))


def digest(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and all of the optimizer's state, whole."""
    found = hashlib.sha256()
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    for tensor in [*network.state_dict().values(), *moments]:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.numpy().tobytes())
    return found.hexdigest()[:16]


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    logging.basicConfig(format="%(message)s")
    parts = Parts(args)
    live = inprocess.LiveState(model=parts.network, optim=parts.optimizer, schedule=parts.schedule)
    show(wrapper()(train)(args, live, parts))


def wrapper() -> inprocess.Wrapper:
    """A restart waits until whoever died is replaced: the sums of three ranks are not those of four."""
    size = int(os.environ["WORLD_SIZE"])
    everybody = RetryController(min_world_size=size, wait_for_replacement=60)
    return inprocess.Wrapper(initialize=everybody, soft_timeout=5, hard_timeout=10)


def show(result: tuple[int, str] | None) -> None:
    if result is not None and result[0] == 0:
        print(f"the weights' digest: {result[1]}", flush=True)


def launch(args: argparse.Namespace, script: str) -> int:
    """Exit code 0: the digests are the same."""
    print("--- without faults", flush=True)
    calm = run(args, script, "none")
    if not args.faults:
        return 0 if calm else 1
    schedule = " ".join(map(str, args.faults))
    print(f"--- with faults: {schedule}", flush=True)
    struck = run(args, script, schedule)
    print(
        f"without faults {calm}, with {len(args.faults)} faults {struck}: {'equal' if calm == struck else 'DIFFERENT'}"
    )
    return 0 if calm and calm == struck else 1


def run(args: argparse.Namespace, script: str, faults: str) -> str:
    """The digest that the job printed."""
    values = {name: str(getattr(args, name)) for name in ("steps", "batch", "width", "seed")}
    options = [word for name, value in values.items() for word in (f"--{name}", value)] + ["--faults", faults]
    command = [sys.executable, "-m", "inprocess.run", "--nproc-per-node", str(args.nproc), script, *options]
    code, said = shown(command)
    found = re.search(r"digest: (\w+)", said)
    return found[1] if found and not code else ""


def shown(command: list[str]) -> tuple[int, str]:
    """Run it; its exit code, and what it printed, which is shown as it comes. Told to end, it ends that, too."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=os.environ | quiet, stdout=subprocess.PIPE, text=True) as job:
        signal.signal(signal.SIGTERM, lambda *_: job.terminate())
        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return job.returncode, "".join(lines)


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nproc", type=int, default=4, help="number of processes (default 4)")
    add(
        "--faults",
        type=fault_schedule.option,
        metavar="KIND:rank=R,step=S",
        help="separated by spaces, or none (default: ranks 1 and 0 are killed, the last one raises)",
    )
    add("--steps", type=int, default=120, help="training steps (default 120)")
    add("--batch", type=int, default=16, help="samples in a step and on each rank (default 16)")
    add("--width", type=int, default=64, help="of the hidden layer (default 64)")
    add("--seed", type=int, default=0, help="of the first weights (default 0)")
    args = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else args.nproc
    for name, value in {"nproc": ranks, "steps": args.steps}.items():
        if value < 1:
            parser.error(f"--{name}={value}: must be at least 1")
    if args.faults is None:
        args.faults = fault_schedule.usual(ranks, args.steps)
    fault_schedule.refuse_idle(parser, args.faults, ranks, args.steps)
    return args


if __name__ == "__main__":
    given = arguments(__doc__)
    sys.exit(work(given) if "RANK" in os.environ else launch(given, __file__))
