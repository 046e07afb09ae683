"""One of two replica groups disappears: how long the other one waits, told by a collective's timeout, or at once.

    python examples/proactive_recovery.py

Four ranks, two groups of two. Weights and optimizer are sharded in a group, and the same in both groups (`fully_shard`
over a mesh of two dimensions). In the middle of the training one group stops, as when its host hangs: it answers
nothing and closes no connection, so the other one waits in its next collective. It goes on as soon as it learns what
has happened, alone; meanwhile the launcher replaces the lost processes, which get their shards from the group that is
left.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import re
import sys
import time

import fault_schedule
import torch
import torch._dynamo  # the first optimizer would import it: seconds, which look like a hang
import torch.distributed as dist
from live_recovery import digest, faults, shown
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import inprocess
from inprocess.rank_assignment import ActiveWorldSizeDivisibleBy, ShiftRanks

GROUP, STRIKE = 2, 60
#: seconds: of a collective (10 to 30 minutes is usual), and without a ping
TIMEOUT, SOFT = 10.0, 2.5
STOP, KILL = (f"{kind}:rank=2,step={STRIKE} {kind}:rank=3,step={STRIKE}" for kind in ("stop", "kill"))
#: what happens to the group, and who tells the other one
WAYS = {
    "collective": (STOP, f"the collective's timeout of {TIMEOUT:g} s"),
    "ping": (STOP, f"no ping() for soft_timeout={SOFT:g} s"),
    "killed": (KILL, "monitors, which see a process end"),
}


def train(
    live: inprocess.LiveState, faults: fault_schedule.Faults, call: inprocess.CallWrapper = None
) -> tuple[int, str]:
    """Until the lost group has been back for as many steps as there were before; rank, and a digest of the weights."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // GROUP, GROUP), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    fully_shard(network, mesh=mesh)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)

    step = live.recover(call, network=network, optimizer=optimizer)
    if rank == 0:
        print(f"{time.monotonic():.3f} {size // GROUP} groups go on at step {step}", flush=True)
    together, begun = 0, time.monotonic()
    try:
        while together < STRIKE or step < 2 * STRIKE:
            call.ping()
            begun = time.monotonic()
            faults.strike(step)
            images = torch.randn(16, 32)
            loss = (network(images) - images.square()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            with live.commit(step + 1):
                optimizer.step()
            step += 1
            together += size == 2 * GROUP
    except BaseException as error:  # the interruption of a restart is no Exception
        if rank == 0:
            waited = time.monotonic() - begun
            print(f"{begun:.3f} told after {waited:.3f} s, by {type(error).__name__}", flush=True)
        raise

    result = rank, digest(network, optimizer)
    dist.destroy_process_group()
    return result


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    logging.basicConfig(format="%(message)s")
    # who has no group yet waits beside
    groups = inprocess.Compose(ActiveWorldSizeDivisibleBy(GROUP), ShiftRanks())
    # the group that stopped may wake up again: the others go on when it has been killed
    soft, hard = (TIMEOUT + 1, TIMEOUT + 2) if args.way == "collective" else (SOFT, 2 * SOFT)
    wrapper = inprocess.Wrapper(rank_assignment=groups, join="now", soft_timeout=soft, hard_timeout=hard)
    found = wrapper(train)(inprocess.LiveState(copy_every=10), faults(args))
    if found is not None:
        # one write: all ranks have the same pipe, and an unbuffered print() writes text and newline apart
        print(f"rank {found[0]}: the weights' digest is {found[1]}\n", end="", flush=True)


def launch(args: argparse.Namespace) -> int:
    rows = []
    for way in args.ways:
        schedule, by = WAYS[way]
        print(f"--- {way}: {schedule}", flush=True)
        command = [sys.executable, "-m", "inprocess.run", "--nproc-per-node", str(2 * GROUP), __file__]
        code, said = shown([*command, "--way", way, "--faults", schedule])
        if code:
            return code
        rows.append((by, *times(said)))
    print(f"{'seconds after the fault; told by':<36} {'told':>6} {'goes on':>8} {'both again':>11}")
    for by, told, on, both in rows:
        print(f"{by:<36} {told:6.2f} {on:8.2f} {both:11.2f}")
    return 0


def times(output: str) -> tuple[float, float, float]:
    """When the group that is left was told, trained on, and had the other one back; in seconds after the fault."""
    went = [(float(when), int(groups)) for when, groups in re.findall(r"([\d.]+) (\d) groups go on", output)]
    alone = next(when for when, groups in went if groups == 1)
    found = [(float(when), float(waited)) for when, waited in re.findall(r"([\d.]+) told after ([\d.]+)", output)]
    fault, told = max(each for each in found if each[0] < alone)
    both = next(when for when, groups in went if when > alone and groups == 2)
    digests = re.findall(r"digest is (\w+)", output)
    assert len(digests) == 2 * GROUP, "not all ranks came to the end"
    assert len(set(digests)) == 1, "the groups differ"
    return told, alone - fault, both - fault


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which of them (default all)")
    parser.add_argument("--way", choices=WAYS, help="of being told; for the ranks")
    parser.add_argument("--faults", type=fault_schedule.option, default=[], metavar="KIND:rank=R,step=S")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    sys.exit(work(given) if "RANK" in os.environ else launch(given))
