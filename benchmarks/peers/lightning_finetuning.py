"""Lightning: under ddp, BaseFinetuning's backbone is never reduced after it has been unfrozen."""

import lightning as L
import torch
import torch.nn.functional as F
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


class Unfreeze(L.pytorch.callbacks.BaseFinetuning):
    def freeze_before_training(self, net):
        self.freeze(net.backbone)

    def finetune_function(self, net, epoch, opt):
        self.unfreeze_and_add_param_group(net.backbone, opt, lr=0.5)


net, got = Net(), [None, None]
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[Unfreeze()], barebones=True)
trainer.fit(net, DataLoader(data, batch_size=4))
torch.distributed.all_gather_object(got, net.backbone.weight.norm().item())
one = Net()
one.training_step(data.tensors, 0).backward()
torch.optim.SGD(one.parameters(), lr=0.5).step()
if torch.distributed.get_rank() == 0:
    print(f"backbone weight norm: one process {one.backbone.weight.norm().item()}, Lightning ddp {got}")
