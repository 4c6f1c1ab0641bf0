"""FSDP2: a norm of gradients by hand, with item(), is each rank's own."""

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
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
x, y = torch.randn(2, 4, 6), torch.randn(2, 4, 6)


def step(model, x, y, limit=0.1):
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    F.mse_loss(model(x), y).backward()
    norm = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_(min(1.0, limit / norm))
    opt.step()
    return norm


want = step(ref, x.flatten(0, 1), y.flatten(0, 1))
got = [None, None]
dist.all_gather_object(got, step(model, x[rank], y[rank]))
w = model[0].weight.full_tensor().norm().item()
if rank == 0:
    print(f"gradient norm, then weight norm: one process {want, ref[0].weight.norm().item()}, FSDP2 {got, w}")
dist.destroy_process_group()
