"""The functions that rank processes run. Module level, so that a rank can import them by name.

A target gets the harness's Context; a body is what is wrapped and gets (context, call).
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import faults
from tests.harness.child import Context

#: far longer than a test's deadline: whoever waits for this timeout has failed
LONG = datetime.timedelta(seconds=60)


def place_in_world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def check_sum(size: int) -> None:
    """One all-reduce; its sum is right only if exactly the ranks of this iteration take part."""
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size + 1) // 2, f"sum {tensor.item()} with {size} ranks"


def train(context: Context, call: Any) -> list[int]:
    """The ordinary body: a new group, some steps with an all-reduce each. Returns [iteration, rank, world size]."""
    rank, size = place_in_world()
    dist.init_process_group("gloo", timeout=LONG)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    for step in range(context.args.get("steps", 3)):
        context.point(step)
        call.ping()
        check_sum(size)
    dist.destroy_process_group()
    context.point("end")
    return [call.iteration, rank, size]


def alone(context: Context, call: Any) -> list[int]:
    """A body without any collective: ranks return whenever they like."""
    rank, size = place_in_world()
    for step in range(context.args.get("steps", 3)):
        context.point(step)
    return [call.iteration, rank, size]


def blocked(context: Context, call: Any) -> list[int]:
    """In iteration 0 all ranks but the victim block at `place`; the victim faults once they do."""
    place, victims = context.args["place"], context.args["victims"]
    if call.iteration > 0:
        return train(context, call)
    if place in ("all_reduce", "barrier", "recv_tensor", "new_group"):
        dist.init_process_group("gloo", timeout=LONG)
        check_sum(context.args["world_size"])
    if context.rank in victims:
        context.point("fault")
        raise AssertionError("the fault did not fire")
    context.emit("blocked", place=place)
    _block(place, victims[0], call)
    raise AssertionError(f"came out of {place}")


def _block(place: str, victim: int, call: Any) -> None:
    if place == "loop":
        faults.spin()
    elif place == "all_reduce":
        dist.all_reduce(torch.ones(1))
    elif place == "barrier":
        dist.barrier()
    elif place == "recv_tensor":
        dist.recv(torch.ones(1), src=victim)
    elif place == "new_group":
        dist.new_group(timeout=LONG)
    elif place == "init":
        dist.init_process_group("gloo", timeout=LONG)
    elif place == "store_wait":
        call.store.wait(["never set"], LONG)
    elif place == "store_get":
        call.store.get("never set")
    else:
        faults.wait_forever(place)


def run_train(context: Context) -> Any:
    return context.wrap(train)()


def run_alone(context: Context) -> Any:
    return context.wrap(alone)()


def run_blocked(context: Context) -> Any:
    return context.wrap(blocked)()


# --- for the tests of the harness itself: no library involved


def unwrapped(context: Context) -> Any:
    with context.entered(0):
        for step in range(3):
            context.point(step)
    return {"rank": context.rank, "environment": place_in_world()}


def preloaded(context: Context) -> Any:
    import sys

    return {
        "modules": [name for name in ("torch", "tests.ranks.targets", "pytest") if name in sys.modules],
        "variables": sorted(os.environ),
    }


def group_only(context: Context) -> Any:
    """Plain torch, as the library's rendezvous would have it: everybody joins the store at MASTER_PORT."""
    import sys

    rank, size = place_in_world()
    hook = sys.excepthook  # torch replaces it in every init_process_group and never puts it back
    dist.init_process_group("gloo", timeout=LONG)
    check_sum(size)
    dist.destroy_process_group()
    sys.excepthook = hook
    return rank


def leave_things(context: Context) -> Any:
    import signal
    import socket
    import subprocess
    import threading

    kept: Any = context.__dict__.setdefault("kept", [])
    kept.append(socket.socket())
    os.environ["LEFT"] = "1"
    signal.signal(signal.SIGUSR2, lambda *_: None)
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
    kept.append(subprocess.Popen(["sleep", "0.2"]))


def leave_daemon(context: Context) -> Any:
    """A daemon with two forks: gone from this process's children, not from the test's sight."""
    if os.fork() == 0:
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", context.args["seconds"]])
        os._exit(0)
    os.wait()
