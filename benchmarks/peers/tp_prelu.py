"""Tensor parallel: a PReLU between two divided layers trains apart on each rank."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ref = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 6))
model = copy.deepcopy(ref)
parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
x, y = torch.randn(8, 6), torch.randn(8, 6)


def train(m):
    opt = torch.optim.SGD(m.parameters(), lr=0.5, foreach=False)
    for _ in range(3):
        opt.zero_grad()
        F.mse_loss(m(x), y).backward()
        opt.step()
    return m[1].weight.item()


want = train(ref)

got = [None, None]
dist.all_gather_object(got, train(model))
if rank == 0:
    print(f"PReLU weight: one process {want}, TP {got}")
dist.destroy_process_group()
