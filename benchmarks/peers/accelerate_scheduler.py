"""Accelerate: a prepared scheduler makes one step for each rank."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
acc = Accelerator(cpu=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 6), torch.randn(16, 6))


def train(prepare, backward, batch):
    torch.manual_seed(1)
    model = nn.Linear(6, 6)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    net, opt, loader, sched = prepare(model, opt, DataLoader(data, batch_size=batch), sched)
    for x, y in loader:
        backward(F.mse_loss(net(x), y))
        opt.step()
        sched.step()
        opt.zero_grad()
    return opt.param_groups[0]["lr"], model.weight.norm().item()


want = train(lambda *a: a, lambda loss: loss.backward(), 4)
got = train(acc.prepare, acc.backward, 2)
if acc.is_main_process:
    print(f"(learning rate, weight norm) after 4 steps: one process {want}, Accelerate {got}")
acc.end_training()
