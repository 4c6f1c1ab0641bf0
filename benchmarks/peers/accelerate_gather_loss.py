"""Accelerate: a mean of losses by gather_for_metrics counts the samples that fill the last batch."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
acc = Accelerator(cpu=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(10, 6), torch.randn(10, 6))


def evaluate(prepare, gather, batch):
    torch.manual_seed(1)
    net, loader = prepare(nn.Linear(6, 6), DataLoader(data, batch_size=batch))
    with torch.no_grad():
        losses = [gather(F.mse_loss(net(x), y)).reshape(-1) for x, y in loader]
    return torch.cat(losses).mean().item()


want = evaluate(lambda *a: a, lambda loss: loss, 2)
got = evaluate(acc.prepare, acc.gather_for_metrics, 2)
if acc.is_main_process:
    print(f"mean loss over 10 samples: one process {want}, Accelerate {got}")
acc.end_training()
