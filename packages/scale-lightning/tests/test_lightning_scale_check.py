"""`scale-check run` on a script of Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_servers import script_folder  # noqa: F401

from scale_check.cli import main

SCRIPT = """
import os
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(1)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Module(), DataLoader(data, batch_size=4))
"""


@pytest.mark.usefixtures("script_folder")
def test_a_right_script_is_found_right(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    assert main(["run", "--steps", "2", "train.py"]) == 0, capsys.readouterr()
