"""Tensor parallel: a fused projection that is cut by chunk() has other halves on each rank."""

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


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


ref = FeedForward()
model = copy.deepcopy(ref)
parallelize_module(model, init_device_mesh("cpu", (2,)), {"gate_up": ColwiseParallel(), "down": RowwiseParallel()})
x, y = torch.randn(8, 6), torch.randn(8, 6)
want = F.mse_loss(ref(x), y).item()

got = [None, None]
dist.all_gather_object(got, F.mse_loss(model(x), y).item())
if rank == 0:
    print(f"loss: one process {want}, TP {got}")
dist.destroy_process_group()
