"""A training loop of accelerate that goes on after a fault, with its state in memory. On CPUs, with random data.

inprocess run --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator

import inprocess

STEPS, BATCH = 100, 16
#: lives as long as its process, so the state outlives a restart
live = inprocess.LiveState()


def data():
    inputs = torch.randn(2 * BATCH * 25, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper = None) -> float:
    accelerator = Accelerator(cpu=True)  # reads ranks and world size anew: what it kept of them was reset
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = live.recover(call, model=accelerator.unwrap_model(model), optimizer=optimizer.optimizer)
    while step < STEPS:
        for inputs, targets in accelerator.skip_first_batches(loader, step % len(loader)):
            call.ping()
            if step == 60 and call.iteration == 0 and accelerator.process_index == 1:
                raise RuntimeError("a fault, once")
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            with live.commit(step + 1):  # no restart cuts this in half
                optimizer.step()
            step += 1
    accelerator.print(f"trained {STEPS} steps with {accelerator.num_processes} processes")
    accelerator.end_training()
    return (accelerator.unwrap_model(model).weight - 1).abs().max().item()


if __name__ == "__main__":
    error = train()
    if error is not None:  # None: this process joined when the others had finished
        print(f"the weights are right to {error:.4f}", flush=True)
