"""FSDP1: torch.nn.utils.clip_grad_norm_ clips by each rank's own norm."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ref = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
model = copy.deepcopy(ref)
x, y = torch.randn(2, 4, 6), torch.randn(2, 4, 6)


def train(m, net, b):
    opt = torch.optim.SGD(m.parameters(), lr=0.3)
    for _ in range(4):
        opt.zero_grad()
        loss = F.mse_loss(net(x[b]), y[b])
        loss.backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.05)
        opt.step()


train(ref, ref, slice(None))
net = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
train(model, net, slice(rank, rank + 1))
with FullyShardedDataParallel.summon_full_params(net):
    got = model[0].weight.norm().item()
if rank == 0:
    print(f"weight norm after 4 steps: one process {ref[0].weight.norm().item()}, FSDP1 {got}")
dist.destroy_process_group()
