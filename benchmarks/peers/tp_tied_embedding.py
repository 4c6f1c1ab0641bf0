"""Tensor parallel: parallelize_module unties an embedding and a head."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def train(m):
    opt, i = torch.optim.SGD(m.parameters(), 0.5), torch.arange(8)
    F.cross_entropy(m(i), i + 1).backward()
    opt.step()
    return F.cross_entropy(m(i), i + 1).item(), len(list(m.parameters()))


ref = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10, bias=False))
ref[1].weight = ref[0].weight
model = copy.deepcopy(ref)
plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())}
model, want = parallelize_module(model, init_device_mesh("cpu", (2,)), plan), train(ref)

got = [None, None]
dist.all_gather_object(got, train(model))
if rank == 0:
    print(f"(loss, number of parameters) after a step: one process {want}, TP {got}")
dist.destroy_process_group()
