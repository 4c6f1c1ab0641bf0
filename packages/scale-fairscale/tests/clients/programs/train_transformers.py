"""transformers 4.26.1: a small GPT-2 in its Trainer, under each of FairScale's options."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

warnings.simplefilter("ignore")
way, stage = sys.argv[1:]
set_seed(1)
rows = torch.randint(50, (64, 12), generator=torch.Generator().manual_seed(5))
samples = [{"input_ids": row, "labels": row} for row in rows]
sizes = {"vocab_size": 50, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()
arguments = TrainingArguments(
    ".",
    max_steps=6,
    save_steps=3,
    logging_steps=1,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    no_cuda=True,
    xpu_backend="gloo",
    local_rank=int(os.environ["RANK"]),
    sharded_ddp="" if way == "ddp" else way,
    report_to=[],
    disable_tqdm=True,
)


class Losses(TrainerCallback):
    """What is logged in this run; the state has those of the run before, too."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


logged = Losses()
trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[logged])
trainer.train(resume_from_checkpoint="checkpoint-3" if stage == "resume" else None)
trained = trainer.model if way.startswith("zero") else model
weights = [value.tolist() for value in trained.state_dict().values() if value.is_floating_point()]  # On all ranks.
if arguments.local_rank == 0:
    Path("result.json").write_text(json.dumps([logged.losses, weights]))
