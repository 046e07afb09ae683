"""A wrapped function that is killed on each rank the first time it runs there, and finishes the second time.

Its argument is a folder in which it notes that.
"""

import os
import signal
import sys

import torch.distributed as dist

import inprocess


@inprocess.Wrapper()
def run(call: inprocess.CallWrapper = None) -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    mark = os.path.join(sys.argv[1], os.environ["RANK"])
    if not os.path.exists(mark):
        os.mkdir(mark)
        os.kill(os.getpid(), signal.SIGKILL)
    print("<finished>", flush=True)


if __name__ == "__main__":
    run()
