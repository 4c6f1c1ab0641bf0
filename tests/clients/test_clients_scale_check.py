"""`scale-check run` on scripts of Accelerate and of transformers' Trainer, as their users write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_servers import forked_servers, script_folder  # noqa: F401

from scale_check.cli import main

pytestmark = pytest.mark.usefixtures("forked_servers")

ACCELERATE = """
import sys, torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
loader = DataLoader(data, batch_size=4, shuffle=True)
wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(wrapped):
        # The bug: the model itself is called, and not what reduces its gradients.
        loss = nn.functional.cross_entropy((model if "bug" in sys.argv else wrapped)(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
drawn = torch.Generator().manual_seed(3)
texts = [torch.randint(0, 64, (16,), generator=drawn) for _ in range(64)]
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, max_steps=5, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=[{"input_ids": text, "labels": text} for text in texts]).train()
"""


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path) -> None:
    Path(tmp_path, "accelerated.py").write_text(ACCELERATE)
    Path(tmp_path, "trainer.py").write_text(TRAINER)


@pytest.mark.parametrize("script", ["accelerated.py", "trainer.py"])
def test_right_scripts_are_found_right(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--steps", "2", script]) == 0, capsys.readouterr()


def test_a_model_that_is_called_past_its_wrapper_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--steps", "1", "accelerated.py", "bug"]) == 1
    assert capsys.readouterr().out.startswith("step 1: gradient of ")
