"""What a LiveState costs, and how fast a state comes back. `python -m benchmarks.live`

Two ranks on loopback, one state. Prints a table with medians; what is compared takes turns, so that all see the same
machine. Only torchft's transfers, in an environment of their own (``--peers ""`` leaves them out), follow.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would import it
import torch.distributed as dist
from torch.distributed import checkpoint

from benchmarks import peers
from benchmarks.job import free_port, here
from inprocess import LiveState
from inprocess.live.copies import Buffer
from inprocess.live.plan import Point
from inprocess.live.tree import take

#: parameters of one layer: 16 MiB
SIDE = 2048
PLAIN = "a plain send of the same bytes"
LOAD, SAVE = "torch.distributed.checkpoint, load by one rank", "torch.distributed.checkpoint, save"
#: seconds; a step of the training that commits are compared with
STEP = 0.05


class Layers(torch.nn.Module):
    """As many parameters as are asked for."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.rand(SIDE, SIDE)) for _ in range(count))


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        port = str(free_port())
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "BENCHMARK_FOLDER": folder}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.live", *sys.argv[1:]],
                env=os.environ | job | {"RANK": str(rank)},
                stdout=subprocess.PIPE if rank else None,
            )
            for rank in (0, 1)
        ]
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank failed")
        assert ranks[1].stdout is not None
        found = json.loads(ranks[1].stdout.read())
    if options.peers:
        found |= {f"torchft, {name}": seconds for name, seconds in torchft(options).items()}
    show(found, options)


def torchft(options: argparse.Namespace) -> dict[str, float]:
    command = [str(peers.python(Path(options.peers), "torchft")), "-W", "ignore", "-m", "benchmarks.torchft_transfer"]
    command += ["--gigabytes", str(options.gigabytes), "--rounds", str(options.rounds)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def work(options: argparse.Namespace) -> None:
    """One rank; rank 1 prints what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), max(1, round(options.gigabytes * 1e9 / (4 * SIDE * SIDE)))
    model, folder = Layers(count), os.environ["BENCHMARK_FOLDER"]
    if rank == 0:
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    times: dict[str, list[float]] = {}
    for number in range(options.rounds):
        note(times, PLAIN, lambda: plain(model, rank))
        note(times, "recover(), from the other rank", lambda: recover(model, rank))
        note(times, LOAD, lambda: load(model, rank, folder))
        theirs, ours = f"{folder}/theirs/{number}", f"{folder}/ours/{number}"
        note(times, SAVE, lambda theirs=theirs: save(model, theirs))  # type: ignore[misc]
        live = LiveState(model=model, folder=ours, save_every=1)
        live.recover()
        for step, which in ((1, "the first of a call"), (2, "a later one")):
            name = f"commit() that begins a checkpoint, {which}: the copy"
            note(times, name, lambda live=live, step=step: commit(live, step))  # type: ignore[misc]
            note(times, "the checkpoint, until it is written", live.wait)
        note(times, "recover(), from that checkpoint", lambda ours=ours: reload(model, ours))  # type: ignore[misc]
        if rank == 0:
            shutil.rmtree(ours)
            shutil.rmtree(theirs)
    if rank == 1:
        times |= alone(model, options.rounds)
        print(json.dumps({name: statistics.median(found) for name, found in times.items()}))
    dist.destroy_process_group()


def note(times: dict[str, list[float]], name: str, action: Callable[[], object]) -> None:
    dist.barrier()
    begin = time.perf_counter()
    action()
    times.setdefault(name, []).append(time.perf_counter() - begin)


def plain(model: Layers, rank: int) -> None:
    for parameter in model.layers:
        if rank:
            dist.recv(parameter.data, 0)
        else:
            dist.send(parameter.data, 1)


def recover(model: Layers, rank: int) -> None:
    """Rank 0 has the state, rank 1 is new."""
    live = LiveState(model=model)
    if rank == 0:
        live._now_at(Point(1, 1), live._present)
    assert live.recover() == 1
    assert live.source == ("rank 0" if rank else "own memory")


def save(model: Layers, folder: str) -> None:
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)


def commit(live: LiveState, step: int) -> None:
    with live.commit(step):
        pass


def reload(model: Layers, folder: str) -> None:
    live = LiveState(model=model, folder=folder)
    assert live.recover() == 2
    assert live.source.startswith("the checkpoint")


def load(model: Layers, rank: int, folder: str) -> None:
    if rank:
        state = {"model": model.state_dict()}
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)


def alone(model: Layers, rounds: int) -> dict[str, list[float]]:
    """On one rank: what is paid while nothing happens."""
    times: dict[str, list[float]] = {}
    record, room = take(model.state_dict()), [torch.empty_like(tensor) for tensor in model.layers]
    buffer = Buffer()
    for _ in range(rounds + 1):  # the first one makes room
        begin = time.perf_counter()
        for target, source in zip(buffer.lay_out(record.tree, record.header()).tensors, record.tensors, strict=True):
            target.copy_(source)
        between = time.perf_counter()
        for target, parameter in zip(room, model.layers, strict=True):
            target.copy_(parameter.data)
        times.setdefault("a copy in host memory", []).append(between - begin)
        times.setdefault("memcpy of the same bytes", []).append(time.perf_counter() - between)
    small = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(50))
    )
    optim = torch.optim.AdamW(small.parameters())
    live = LiveState(model=small, optim=optim, schedule=torch.optim.lr_scheduler.ConstantLR(optim))
    live._now_at(Point(1, 0), live._present)
    for step in range(1, 1001):
        begin = time.perf_counter()
        with live.commit(step):
            pass
        times.setdefault("commit()", []).append(time.perf_counter() - begin)
    return {name: found[1:] for name, found in times.items()}


def show(found: dict[str, float], options: argparse.Namespace) -> None:
    gigabytes = max(1, round(options.gigabytes * 1e9 / (4 * SIDE * SIDE))) * 4 * SIDE * SIDE / 1e9
    beside = {
        "recover(), from the other rank": PLAIN,
        "torchft, over a process group": PLAIN,
        "torchft, over HTTP": PLAIN,
        "recover(), from that checkpoint": LOAD,
        "the checkpoint, until it is written": SAVE,
        "a copy in host memory": "memcpy of the same bytes",
    }
    print(f"| {gigabytes:.2f} GB | s | GB/s | |\n| --- | --- | --- | --- |")
    for name, seconds in found.items():
        if name == "commit()":
            continue
        share = f"{found[beside[name]] / seconds:.0%} of {beside[name]}" if name in beside else ""
        print(f"| {name} | {seconds:.3f} | {gigabytes / seconds:.2f} | {share} |")
    print(f"\ncommit(), 200 parameters and 150 buffers: {found['commit()'] * 1e6:.0f} us, ", end="")
    print(f"{found['commit()'] / STEP:.2%} of a step of {STEP * 1e3:.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", default=str(here() / ".nox" / "peers"), help="folder of torchft's environment")
    given = parser.parse_args()
    work(given) if "RANK" in os.environ else main(given)
