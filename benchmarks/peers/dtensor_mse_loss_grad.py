"""DTensor: the gradient of mse_loss on a sharded batch is as many times too large as there are ranks."""

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
x, y = torch.randn(8, 6), torch.randn(8, 6)
want = F.mse_loss(ref(x), y)
want.backward()
got = F.mse_loss(model(distribute_tensor(x, mesh, [Shard(0)])), distribute_tensor(y, mesh, [Shard(0)]))
got.backward()
loss, grad = got.full_tensor().item(), model.weight.grad.full_tensor().norm().item()
if rank == 0:
    print(f"loss and gradient norm: one process {want.item(), ref.weight.grad.norm().item()}, DTensor {loss, grad}")
dist.destroy_process_group()
