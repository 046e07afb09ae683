"""Trains a small network on scikit-learn's digits with DistributedDataParallel, and lives through scheduled faults.

    python examples/digits_ddp.py --nproc 4 --faults "kill:rank=2,step=60 raise:rank=1,step=120 kill:rank=0,step=200"

It starts its own processes, or runs as one of them where a launcher has set RANK and the other usual variables. Under
this one, which replaces a rank that died, the world comes back to its size:

    inprocess run --nproc-per-node 4 examples/digits_ddp.py --faults "kill:rank=0,step=50 kill:rank=2,step=100"

`train` is what the library restarts. All it needs is `ping`, `atomic`, and to begin with the last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fault_schedule
import torch
import torch._dynamo  # the first backward and optimizer would import it: seconds, which look like a hang
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import inprocess
from inprocess.initialize import RetryController
from inprocess.store import EtcdStore

GOAL = 0.95  # accuracy on images the network has not seen
QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns at length about each connection that a restart closes
    "RES_OPTIONS": "timeout:1 attempts:1",  # it looks up a name for each one it opens: a slow name server is no hang
}


def train(
    args: argparse.Namespace,
    digits: Digits,
    faults: fault_schedule.Faults,
    lost: Lost,
    call: inprocess.CallWrapper = None,
) -> tuple[int, float]:
    """Train from the last checkpoint to the end, with as many ranks as there are; returns rank and accuracy."""
    dist.init_process_group("nccl" if digits.device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(digits.device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint = Checkpoint(args.checkpoint_dir, network, optimizer)
    step = checkpoint.load()
    progress = Progress(args, ranks, step)

    while step < args.steps:
        call.ping()
        lost.begin(step, call.iteration)
        faults.strike(step)
        images, labels = digits.batch(step, args.batch, args.seed)
        predicted = model(images[rank::ranks])
        # DDP takes the mean over the ranks; this way it is the mean over the batch, however many ranks share it
        loss = cross_entropy(predicted, labels[rank::ranks], reduction="sum") * ranks / len(images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % args.checkpoint_every == 0:
            with call.atomic():  # no restart cuts this in half
                checkpoint.save(step)
        if rank == 0 and step % args.log_every == 0:
            progress.show(step, loss)

    dist.destroy_process_group()
    return rank, digits.accuracy(network)


class Digits:
    """1,797 handwritten digits of 8 x 8 pixels, a fifth of them held out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x = (torch.tensor(images, dtype=torch.float32) / 16)[order].to(device)
        y = torch.tensor(labels)[order].to(device)
        held_out = len(y) // 5
        self.test, self.train = (x[:held_out], y[:held_out]), (x[held_out:], y[held_out:])

    def batch(self, step: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of a step, the same on every rank: each epoch is shuffled by its own seed."""
        images, labels = self.train
        size = min(size, len(labels))
        epoch, index = divmod(step, len(labels) // size)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed * 10_000 + epoch))
        chosen = order[index * size : (index + 1) * size].to(self.device)
        return images[chosen], labels[chosen]

    def accuracy(self, network: torch.nn.Module) -> float:
        images, labels = self.test
        with torch.no_grad():
            return (network(images).argmax(dim=1) == labels).float().mean().item()


class Checkpoint:
    """One file. After a crash at any moment it is the old one or the new one, whole."""

    def __init__(self, directory: str, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.path = Path(directory, "digits.pt")
        self.parts = {"network": network, "optimizer": optimizer}

    def save(self, step: int) -> None:
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            torch.save({"step": step, **{name: part.state_dict() for name, part in self.parts.items()}}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def load(self) -> int:
        """Put back what was saved; returns the step to go on with."""
        if not self.path.exists():
            return 0
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])


class Progress:
    """Prints how far the training is, and how fast it was since the line before."""

    def __init__(self, args: argparse.Namespace, ranks: int, step: int) -> None:
        self.steps, self.ranks, self.last, self.time = args.steps, ranks, step, time.monotonic()

    def show(self, step: int, loss: torch.Tensor) -> None:
        now = time.monotonic()
        speed = (step - self.last) / (now - self.time)
        self.last, self.time = step, now
        text = f"step {step:4}/{self.steps}  loss {loss.item():.4f}  {self.ranks} ranks  {speed:4.0f} steps/s"
        print(text, flush=True)


class Lost:
    """What restarts cost this process, which outlives them: from the beginning of a step until it begins once more."""

    def __init__(self) -> None:
        self.first = self.time = time.monotonic()
        self.step, self.restarts, self.seconds = -1, 0, 0.0

    def begin(self, step: int, iteration: int) -> None:
        if step < self.step:  # done before the restart, and not saved
            return
        now = time.monotonic()
        if iteration != self.restarts:
            self.seconds += now - self.time
        self.step, self.time, self.restarts = step, now, iteration

    def __str__(self) -> str:
        return (
            f"restarts: {self.restarts}; time lost: {self.seconds:.1f} s of {time.monotonic() - self.first:.1f} s "
            "(noticing the fault, restarting, repeating the steps since the last checkpoint)"
        )


def work(args: argparse.Namespace) -> int:
    """One rank. Exit code 0: the goal was reached."""
    device = pick_device(args.share_gpu)
    torch.set_num_threads(1)  # the ranks share the machine's cores
    logging.basicConfig(format="%(message)s")
    wrap = inprocess.Wrapper(
        initialize=RetryController(min_world_size=args.min_ranks, wait_for_replacement=60),
        soft_timeout=args.soft_timeout,
        hard_timeout=args.hard_timeout,
        heartbeat_timeout=10,  # a lost machine is given up after that
        **store(args),
        monitor_process_logfile=str(Path(args.checkpoint_dir).resolve() / "monitor_{rank}.log"),
    )
    # who replaces a rank that died has no faults of its own
    faults = fault_schedule.Faults([] if replaces() else args.faults, int(os.environ["RANK"]))
    lost = Lost()
    result = wrap(train)(args, Digits(device), faults, lost)
    if result is None:  # this process was to replace another one, and the others finished before it was ready
        return 0
    rank, accuracy = result
    if rank == 0:
        print(f"accuracy on held-out images: {accuracy:.3f} (goal: {GOAL})", flush=True)
        if lost.restarts and not replaces():  # else it was not there all the time
            print(lost, flush=True)
        if args.temporary:
            shutil.rmtree(args.checkpoint_dir, ignore_errors=True)
    return 0 if accuracy >= GOAL else 1


def store(args: argparse.Namespace) -> dict[str, object]:
    """Through what the ranks agree: by default a store that ends with its host."""
    if args.etcd is None:
        return {}
    namespace = os.environ.get("TORCHELASTIC_RUN_ID", "digits")
    return {"store_factory": EtcdStore, "store_kwargs": {"endpoints": [args.etcd], "namespace": namespace}}


def replaces() -> bool:
    """Whether the launcher started this process in place of one that died."""
    return os.environ.get("INPROCESS_RESTART", "0") != "0"


def pick_device(share: bool) -> torch.device:
    """A GPU of its own for each rank of this machine, or the CPU for all of them; or a GPU that they share."""
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    if gpus == 0 or (gpus < ranks and not share):
        return torch.device("cpu")
    if gpus < ranks:  # NCCL wants one rank of a host on a GPU: so each rank is a host, and they talk over sockets
        os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    torch.cuda.set_device(device)
    return device


def launch(args: argparse.Namespace) -> int:
    """Start this script once per rank. Exit code 0: all that have no deadly fault in the schedule exited with 0."""
    size = str(args.nproc)
    with contextlib.ExitStack() as stack:
        directory = args.checkpoint_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="digits-"))
        port = stack.enter_context(reserved_port())
        command = [sys.executable, __file__, *sys.argv[1:], "--checkpoint-dir", directory]
        job = {
            **QUIET,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        codes = run_all([(command, {**job, "RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(args.nproc)])
    doomed = {fault.rank for fault in args.faults if fault.deadly}
    failed = [rank for rank, code in enumerate(codes) if code != 0 and rank not in doomed]
    said = ", ".join(map(str, codes))
    meant = "; ".join(f"{code}: {fault_schedule.in_words(code)}" for code in sorted({*codes}, reverse=True))
    print(f"{codes.count(0)} of {size} processes finished; exit codes by rank: {said} ({meant})")
    if failed or 0 not in codes:
        print(f"FAILED: {'no fault was to end ranks ' + ', '.join(map(str, failed)) if failed else 'nobody finished'}")
        return 1
    if args.faults:
        print(f"faults survived: {len(args.faults)}; no process ended that was not to")
    return 0


def run_all(processes: list[tuple[list[str], dict[str, str]]]) -> list[int]:
    print(f"starting {len(processes)} processes; each imports torch first, which takes some seconds", flush=True)
    children = [subprocess.Popen(command, env={**os.environ, **variables}) for command, variables in processes]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    try:
        return [child.wait() for child in children]
    finally:  # on Ctrl-C or SIGTERM some still run; nothing is lost, the checkpoint is on disk
        for child in children:
            child.kill()
            child.wait()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that stays free for us: bound, but not listening; the server that takes it sets SO_REUSEADDR as well."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def shared_directory(parser: argparse.ArgumentParser) -> str:
    """For the ranks of one machine: they have the same parent, also those that it starts later."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        parser.error("--checkpoint-dir is missing: with several machines, name a directory that all ranks see")
    path = Path(tempfile.gettempdir(), f"digits-{os.getuid()}-{os.getppid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    return str(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nproc", type=int, default=2, help="number of processes to start (default 2)")
    add("--faults", type=fault_schedule.option, default=[], metavar="KIND:rank=R,step=S", help="separated by spaces")
    add("--steps", type=int, default=300, help="training steps (default 300)")
    add("--batch", type=int, default=64, help="images in a step, over all ranks (default 64)")
    add("--seed", type=int, default=0, help="of the first weights and of the order of the images (default 0)")
    add("--checkpoint-dir", help="where to save, and to resume from (default: a temporary directory)")
    add("--checkpoint-every", type=int, default=20, metavar="STEPS", help="(default 20)")
    add("--min-ranks", type=int, help="with fewer, wait a minute for others (default: all under inprocess run, else 1)")
    add("--etcd", metavar="URL", help="agree through this etcd: then any machine may be lost (default: no etcd)")
    add("--share-gpu", action="store_true", help="with fewer GPUs than ranks, share them (default: use the CPU)")
    add("--log-every", type=int, default=20, metavar="STEPS", help="(default 20)")
    add(
        "--soft-timeout", type=float, default=3, metavar="S", help="without progress for S seconds: restart (default 3)"
    )
    add("--hard-timeout", type=float, default=6, metavar="S", help="a rank that does not restart: kill it (default 6)")
    args = parser.parse_args()
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else args.nproc
    if args.min_ranks is None:
        args.min_ranks = ranks if "INPROCESS_LAUNCHER" in os.environ else 1
    for name in ("nproc", "min_ranks", "steps", "batch", "checkpoint_every", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(args, name)}: must be at least 1")
    fault_schedule.refuse_idle(parser, args.faults, ranks, args.steps)
    args.temporary = "RANK" in os.environ and not args.checkpoint_dir
    if args.temporary:
        args.checkpoint_dir = shared_directory(parser)


if __name__ == "__main__":
    given = arguments()
    sys.exit(work(given) if "RANK" in os.environ else launch(given))
