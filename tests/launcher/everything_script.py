"""A training that opens all it can: live state over HTTP, checkpoints, log and pid files, standbys, flight records.

Arguments: a folder for all of this, and the number of steps. Rank 1 dies once. The process in its place waits, while it
is about to get the state from rank 0, until there is a file ``go`` in the folder.
"""

import datetime
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import inprocess
from inprocess.abort import AbortTorchDistributed
from inprocess.live.http import HttpWire

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
IS_NEW = "INPROCESS_RESTART" in os.environ
receive = HttpWire.receive_header


def held(wire: HttpWire, source: int) -> bytes:
    where = wire._store.get(f"inprocess-live/{source}/{wire.rank}").decode()  # it is served by now
    print(f"<standing {where}>\n", end="", flush=True)
    while not (FOLDER / "go").exists():
        threading.Event().wait(0.05)
    return receive(wire, source)


HttpWire.receive_header = held


@inprocess.Wrapper(
    monitor_process_logfile=str(FOLDER / "logs" / "{rank}.log"),
    monitor_process_pidfile=str(FOLDER / "logs" / "{rank}.pid"),
    abort=AbortTorchDistributed(flight_records=FOLDER / "flight"),
    standby_stores=1,
)
def train(live: inprocess.LiveState, model: torch.nn.Module, call: inprocess.CallWrapper = None) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    step = live.recover(call)
    while step < STEPS:
        call.ping()
        while os.environ["WORLD_SIZE"] == "1":  # until the process is there that takes the place
            threading.Event().wait(0.05)
        dist.all_reduce(torch.ones(1))
        if not IS_NEW and step == 3 and os.environ["RANK"] == "1":
            live.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        with live.commit(step + 1):
            model.weight.data.add_(1.0)
        step += 1
        live.wait()


def main() -> None:
    (FOLDER / "logs").mkdir(mode=0o700, exist_ok=True)
    model = torch.nn.Linear(4, 4)
    live = inprocess.LiveState(model=model, transport="http", folder=FOLDER / "checkpoints", save_every=1, keep=2)
    train(live, model)
    print("<done>\n", end="", flush=True)


if __name__ == "__main__":
    main()
