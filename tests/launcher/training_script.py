"""A wrapped function that says who takes part, and trains for ever."""

import os
import threading

import torch
import torch.distributed as dist

import inprocess


@inprocess.Wrapper()
def run(call: inprocess.CallWrapper = None) -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    # one write each: lines of two processes must not mix
    os.write(1, f"<rank {dist.get_rank()} of {dist.get_world_size()}, pid {os.getpid()}>\n".encode())
    never = threading.Event()
    while not never.wait(0.05):
        call.ping()
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    run()
