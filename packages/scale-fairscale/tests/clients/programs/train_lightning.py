"""Lightning 1.9.5: a module that trains under each strategy, with clipping and accumulated gradients."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPFullyShardedStrategy, DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fairscale.nn import auto_wrap, wrap

warnings.simplefilter("ignore")
way, stage = sys.argv[1:]
gathers_state = way == "fsdp with its state"
strategy = "fsdp" if gathers_state else way
DDPFullyShardedStrategy.setup_distributed = DDPStrategy.setup_distributed  # Its own asks for CUDA, then calls this one.
pl.seed_everything(1)


class Net(pl.LightningModule):
    states = ()

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()
        self.losses: list[float] = []

    def configure_sharded_model(self) -> None:
        if strategy == "fsdp":
            self.net = wrap(nn.Sequential(*(wrap(auto_wrap(layer)) for layer in self.net)))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        params = self.trainer.model.parameters() if strategy == "fsdp" else self.parameters()
        optimizer = torch.optim.AdamW(params, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if gathers_state:  # Lightning saves rank 0's part alone.
            checkpoint["optimizer_states"] = [self.net.gather_full_optim_state_dict(self.optimizers().optimizer)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if gathers_state:  # The model is wrapped only after this.
            self.states, checkpoint["optimizer_states"] = checkpoint["optimizer_states"], []

    def on_train_start(self) -> None:
        if self.states:
            self.optimizers().optimizer.load_state_dict(self.net.get_shard_from_optim_state_dict(self.states[0]))

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(48, 8, generator=torch.Generator().manual_seed(3)).double(), batch_size=4)


net = Net()
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_steps=6,
    gradient_clip_val=0.1,
    accumulate_grad_batches=2,
    logger=False,
    callbacks=[ModelCheckpoint(".", filename="{step}", every_n_train_steps=3, save_top_k=-1)],
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, ckpt_path="step=3.ckpt" if stage == "resume" else None)
weights = list(trainer.strategy.lightning_module_state_dict().values())  # On all ranks.
if trainer.global_rank == 0:
    Path("result.json").write_text(json.dumps([net.losses, [weight.tolist() for weight in weights]]))
