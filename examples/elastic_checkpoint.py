"""A job loses all its processes, and the last checkpoint is damaged; nodes join and leave; no sample is lost.

    python examples/elastic_checkpoint.py

One node of two ranks trains; a second node joins; all training processes are killed at once, and a byte of the newest
checkpoint is changed; the launchers start them again, and they go on from the checkpoint before, in the middle of an
epoch, and move the damaged one aside; the second node leaves, and the first one goes on in its processes. Each rank
counts which samples it has used: at the end every epoch has had each of them once.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import torch
import torch._dynamo  # the first backward and optimizer would import it: seconds, which look like a hang
import torch.distributed as dist
from digits_ddp import reserved_port
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from two_nodes import Node

import inprocess

SIZE, BATCH, SAVE_EVERY, KEEP = 1000, 2, 50, 3


class Tally:
    """How often each sample was used; a part of the state like the others."""

    def __init__(self) -> None:
        self.counts = torch.zeros(SIZE, dtype=torch.int64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.counts = state["counts"]


def train(
    args: argparse.Namespace, live: inprocess.LiveState, parts: Parts, call: inprocess.CallWrapper = None
) -> str | None:
    """To the end of the epoch in which it is told to stop; what the tally says then, on rank 0."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    step = live.recover(call)
    sampler, tally = parts.sampler, parts.tally
    if rank == 0:
        where = f"sample {sampler.position % SIZE} of epoch {sampler.epoch}"
        print(f"{size} ranks go on at step {step}, {where}, with the state from {live.source}", flush=True)
    model = DistributedDataParallel(parts.network)
    loader = iter(DataLoader(parts.data, batch_sampler=sampler, generator=torch.Generator()))

    end = math.inf
    while sampler.epoch < end:
        call.ping()
        inputs, numbers = next(loader)
        loss = (model(inputs) - inputs.square()).square().mean()
        parts.optimizer.zero_grad()
        loss.backward()
        used = torch.bincount(numbers, minlength=SIZE + 1)  # and one more number: whether it ends
        used[SIZE] = rank == 0 and os.path.exists(f"{args.folder}/stop")
        dist.all_reduce(used)
        if used[SIZE]:
            end = min(end, sampler.epoch + 1)
        with live.commit(step + 1):
            parts.optimizer.step()
            sampler.advance()
            tally.counts += used[:SIZE]
        step += 1
        if rank == 0 and step % SAVE_EVERY == 0:
            print(f"step {step}, epoch {sampler.epoch}, {size} ranks", flush=True)

    live.wait()  # the last checkpoint is on its way
    dist.destroy_process_group()
    return verdict(sampler, tally) if rank == 0 else None


def verdict(sampler: inprocess.ElasticSampler, tally: Tally) -> str:
    """The last step may be in the next epoch already."""
    epochs, more = divmod(sampler.position, SIZE)
    right = [int((tally.counts == epochs + extra).sum()) for extra in (0, 1)] == [SIZE - more, more]
    return f"{epochs} epochs of {SIZE} samples: {'each sample once in every epoch' if right else 'WRONG'}"


class Parts:
    """What is trained, and on what."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.data = TensorDataset(torch.randn(SIZE, 32), torch.arange(SIZE))
        self.network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-3)
        self.sampler = inprocess.ElasticSampler(SIZE, BATCH)
        self.tally = Tally()


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    logging.basicConfig(format="%(message)s")
    parts = Parts()
    live = inprocess.LiveState(
        model=parts.network,
        optim=parts.optimizer,
        sampler=parts.sampler,
        tally=parts.tally,
        folder=args.folder,
        save_every=SAVE_EVERY,
        keep=KEEP,
    )
    found = inprocess.Wrapper(join="now", soft_timeout=10, hard_timeout=20)(train)(args, live, parts)
    if found is not None:
        print(found, flush=True)


# --- two nodes on this machine, and what happens to them --------------------------------------------------------------


def launch() -> int:
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder, reserved_port() as port:
        launcher = [sys.executable, "-m", "inprocess.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
        meeting += ["--rdzv-conf", "last_call_timeout=1"]  # not 30 s for a second node
        command = [*launcher, *meeting, "--max-restarts", "3", __file__, "--folder", folder]
        nodes: list[Node] = []
        try:
            nodes.append(Node(0, command, folder))
            nodes[0].wait_for("step 100, .* 2 ranks")
            say("a node joins")
            nodes.append(Node(1, command, folder))
            nodes[0].wait_for("4 ranks go on")
            nodes[0].wait_for(r"step \d+, .* 4 ranks")
            kill_everybody(nodes)
            damage(Path(folder))
            nodes[0].wait_for("4 ranks go on .* from the checkpoint")
            # not before the first step: in DistributedDataParallel's constructor the state is torn on all ranks
            nodes[0].wait_for(r"step \d+, .* 4 ranks", since=len(nodes[0].lines))
            say("a node leaves")
            before = len(nodes[0].lines)
            nodes[1].launcher.send_signal(signal.SIGTERM)
            nodes[0].wait_for(r"2 ranks go on .* from (own memory|rank \d)", since=before)
            (Path(folder) / "stop").touch()
            code = nodes[0].wait()
            aside = [path.name for path in Path(folder).glob("damaged_*")]
            say(f"moved aside: {', '.join(aside)}")
        finally:
            for node in nodes:
                if node.launcher.poll() is None:
                    node.lose()
    return code if re.search("each sample once", "".join(nodes[0].lines)) and len(aside) == 1 else 1


def say(what: str) -> None:
    print(f"--- {what}", flush=True)


def kill_everybody(nodes: list[Node]) -> None:
    say("all training processes are killed")
    for node in nodes:
        for process in psutil.Process(node.launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if __file__ in process.cmdline():  # the monitors are left, and say at once what has happened
                    process.kill()


def damage(folder: Path) -> None:
    """Change a byte of the newest finished checkpoint."""
    newest = max(path.parent for path in folder.glob("*/.metadata"))
    victim = newest / "__0_0.distcp"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    say(f"{newest.name} is damaged")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="of checkpoints; for the ranks")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    sys.exit(work(given) if "RANK" in os.environ else launch())
