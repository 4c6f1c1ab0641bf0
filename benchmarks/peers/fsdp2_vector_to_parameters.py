"""FSDP2: vector_to_parameters and param.data = ... change nothing."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ref = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
model = copy.deepcopy(ref)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
x, y = torch.randn(8, 6), torch.randn(8, 6)
before = F.mse_loss(ref(x), y).item()
losses = []
for m in (ref, model):
    vector_to_parameters(2 * parameters_to_vector(m.parameters()), m.parameters())
    losses.append(F.mse_loss(m(x), y).item())
if rank == 0:
    print(f"loss after doubling the weights: one process {losses[0]}, FSDP2 {losses[1]} (before doubling {before})")
dist.destroy_process_group()
