"""The Trainer of transformers that goes on after a fault, from its own checkpoints. On CPUs, with a small random model.

inprocess run --nproc-per-node 2 examples/transformers_trainer.py FOLDER
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import inprocess
from inprocess.integrations.transformers import RestartCallback, last_complete_checkpoint

STEPS = 40


class FaultOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == 25 and inprocess.current_call().iteration == 0 and args.process_index == 1:
            raise RuntimeError("a fault, once")


def data(count=256, length=16, words=32):
    starts = torch.arange(count) % words
    texts = (starts[:, None] + torch.arange(length)) % words  # each word is followed by the next one
    return [{"input_ids": text, "labels": text} for text in texts]


@inprocess.Wrapper()
def train(folder: str) -> float:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    arguments = TrainingArguments(  # here, not outside: it notes the rank and the world size
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data(), callbacks=[RestartCallback(), FaultOnce()])
    return trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder)).training_loss


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("give a folder for checkpoints that all ranks share")
    loss = train(sys.argv[1])
    if loss is not None:  # None: this process joined when the others had finished
        print(f"loss {loss:.3f}", flush=True)
