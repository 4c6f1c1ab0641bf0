"""Lightning: under ddp, BaseFinetuning's backbone is never reduced after it has been unfrozen."""

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.linspace(-2, 2, 48).sin().view(8, 6), torch.linspace(0, 9, 48).cos().view(8, 6))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.backbone, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)

    def training_step(self, batch, i):
        return F.mse_loss(self.head(self.backbone(batch[0]).tanh()), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.5)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, net):
        self.freeze(net.backbone)

    def finetune_function(self, net, epoch, opt):
        if epoch == 1:
            self.unfreeze_and_add_param_group(net.backbone, opt, lr=0.5)


net, got = Net(), [None, None]
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=6, callbacks=[Unfreeze()], **quiet).fit(
    net, DataLoader(data, batch_size=4)
)
dist.all_gather_object(got, net.backbone.weight.norm().item())
one = Net()
for epoch in range(6):
    opt = torch.optim.SGD((one if epoch else one.head).parameters(), lr=0.5)
    one.zero_grad()
    one.training_step(data.tensors, 0).backward()
    opt.step()
if dist.get_rank() == 0:
    print(f"backbone weight norm: one process {one.backbone.weight.norm().item()}, Lightning ddp {got}")
