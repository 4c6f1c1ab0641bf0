"""Lightning: val_loss counts the samples that fill the last batch."""

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.randn(7, 6), torch.randn(7, 6))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(6, 6)

    def training_step(self, batch, i):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, i):
        self.log("val_loss", self.training_step(batch, i), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


quiet = {"logger": False, "enable_checkpointing": False}
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
trainer.fit(Net(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
if dist.get_rank() == 0:
    want = Net().training_step(data.tensors, 0).item()
    print(f"val_loss: one process {want}, Lightning {trainer.callback_metrics['val_loss'].item()}")
