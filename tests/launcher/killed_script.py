"""A wrapped function whose ranks are all killed at the same moment in the first attempt, and that finishes then.

Its argument is a folder in which rank 0 notes that. It kills the others first. If each killed itself, the first
death would interrupt the others before they do, and they would continue alone.
"""

import os
import signal
import sys

import torch.distributed as dist

import inprocess


@inprocess.Wrapper()
def run(call: inprocess.CallWrapper = None) -> None:
    dist.init_process_group("gloo")
    mark = os.path.join(sys.argv[1], "killed")
    first = not os.path.exists(mark)
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    while first:
        if dist.get_rank() == 0:
            with call.atomic():
                os.mkdir(mark)
                for pid in reversed(pids):
                    os.kill(pid, signal.SIGKILL)
        signal.pause()
    print("<finished>", flush=True)


if __name__ == "__main__":
    run()
