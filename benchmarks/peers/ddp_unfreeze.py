"""DDP: what was frozen when DDP was made is never reduced after it has been unfrozen."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ref = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
model = copy.deepcopy(ref)
x, y = torch.randn(2, 4, 6), torch.randn(2, 4, 6)


def train(m, wrap, b):
    m[0].requires_grad_(False)
    net = wrap(m)
    opt = torch.optim.SGD(m.parameters(), lr=0.5)
    for step in range(6):
        m[0].requires_grad_(step >= 2)
        opt.zero_grad()
        F.mse_loss(net(x[b]), y[b]).backward()
        opt.step()
    return m[0].weight.norm().item()


want = train(ref, lambda m: m, slice(None))

got = [None, None]
dist.all_gather_object(got, train(model, DistributedDataParallel, slice(rank, rank + 1)))
if rank == 0:
    print(f"norm of the unfrozen weight: one process {want}, DDP {got}")
dist.destroy_process_group()
