"""Not wrapped: an all-reduce, and in the first attempt rank 1 kills itself after it."""

import os
import signal

import torch
import torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if attempt == 0 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
print(f"<{dist.get_rank()} of {dist.get_world_size()}, attempt {attempt}: {total.item():.0f}>", flush=True)
dist.destroy_process_group()
