"""Lightning's Trainer that goes on after a fault, from its own checkpoints. On CPUs, with random data.

inprocess run --nproc-per-node 2 examples/lightning_fit.py FOLDER
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import inprocess
from inprocess.integrations.lightning import RestartCallback, RestartDDPStrategy

EPOCHS = 8


class Linear(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        if self.current_epoch == 5 and index == 3 and self.global_rank == 1 and inprocess.current_call().iteration == 0:
            raise RuntimeError("a fault, once")
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def data():
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16)


@inprocess.Wrapper()
def train(folder: str) -> float:
    torch.manual_seed(0)
    model = Linear()
    trainer = lightning.Trainer(  # here, not outside: it notes the rank and the world size
        accelerator="cpu",
        devices=1,  # of this process; how many processes there are, the strategy sees in the environment
        strategy=RestartDDPStrategy(process_group_backend="gloo"),
        callbacks=[ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True), RestartCallback()],
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = os.path.join(folder, "last.ckpt")
    trainer.fit(model, data(), ckpt_path=last if os.path.exists(last) else None)
    return (model.layer.weight - 1).abs().max().item()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("give a folder for checkpoints that all ranks share")
    error = train(sys.argv[1])
    if error is not None:  # None: this process joined when the others had finished
        print(f"the weights are right to {error:.4f}", flush=True)
