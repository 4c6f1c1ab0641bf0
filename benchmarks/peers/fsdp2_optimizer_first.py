"""FSDP2: an optimizer that was built before fully_shard trains nothing."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ref = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
model = copy.deepcopy(ref)
opts = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (ref, model)]
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
x, y = torch.randn(8, 6), torch.randn(8, 6)
losses = [[], []]
for _ in range(4):
    for i, (m, b) in enumerate(((ref, slice(0, 8)), (model, slice(4 * rank, 4 * rank + 4)))):
        loss = F.mse_loss(m(x[b]), y[b])
        loss.backward()
        opts[i].step()
        opts[i].zero_grad()
        losses[i].append(F.mse_loss(m(x), y).item())
if rank == 0:
    print(f"loss per step: one process {losses[0]}, FSDP2 {losses[1]}")
dist.destroy_process_group()
