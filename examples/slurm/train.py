"""The training of ../minimal.py, with what a batch job may want: hot spares, and files that name the monitors.

ACTIVE    so many ranks train, the others are spares (default: all train)
PIDFILES  a directory for the files, one for each rank (default: none are written)
CHECKPOINT  see ../minimal.py
DONE      a file that is made when the training is done (default: none)
"""

import os
import sys
from pathlib import Path

import inprocess
from inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import minimal  # it is beside this folder

active, pidfiles = os.environ.get("ACTIVE"), os.environ.get("PIDFILES")
wrap = inprocess.Wrapper(
    soft_timeout=30,
    hard_timeout=45,
    rank_assignment=inprocess.Compose(MaxActiveWorldSize(int(active)), ShiftRanks()) if active else ShiftRanks(),
    monitor_process_pidfile=f"{pidfiles}/monitor_{{rank}}.pid" if pidfiles else None,
)

if __name__ == "__main__":
    error = wrap(minimal.train.__wrapped__)(100)  # the function itself, with other options
    if done := os.environ.get("DONE"):  # the call has returned: so it has on all ranks that train
        Path(done).touch()
    task = os.environ.get("SLURM_PROCID", "?")
    print(f"task {task}: {'was a spare' if error is None else f'the weights are right to {error:.4f}'}", flush=True)
