"""ZeroRedundancyOptimizer: with bucket views, ranks come apart after param.data = ...."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ref = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
model = copy.deepcopy(ref)
x, y = torch.randn(2, 4, 6), torch.randn(2, 4, 6)


def train(m, net, opt, b):
    for _ in range(4):
        opt.zero_grad()
        F.mse_loss(net(x[b]), y[b]).backward()
        opt.step()
        for p in m.parameters():
            p.data = p.data.clamp(-0.2, 0.2)
    return [p.norm().item() for p in m.parameters()][:3:2]


want = train(ref, ref, torch.optim.Adam(ref.parameters(), lr=0.1), slice(None))
net = DistributedDataParallel(model)
opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1, parameters_as_bucket_view=True)

got = [None, None]
dist.all_gather_object(got, train(model, net, opt, slice(rank, rank + 1)))
if rank == 0:
    print(f"weight norms after 4 steps: one process {want}, ZeRO {got}")
dist.destroy_process_group()
