"""DTensor: cross_entropy with ignored targets is a mean of the ranks' means."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,))
ref = nn.Linear(6, 6)
model = copy.deepcopy(ref)
distribute_module(model, mesh)
x, y = torch.randn(8, 6), torch.tensor([-100, -100, -100, 1, 2, 3, 4, 0])
want = F.cross_entropy(ref(x), y).item()
got = F.cross_entropy(model(distribute_tensor(x, mesh, [Shard(0)])), distribute_tensor(y, mesh, [Shard(0)]))
got = got.full_tensor().item()
if rank == 0:
    print(f"loss: one process {want}, DTensor {got}")
dist.destroy_process_group()
