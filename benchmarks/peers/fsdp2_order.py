"""FSDP2: two modules of equal shape, run in another order on each rank, exchange their weights."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
ref = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
model = copy.deepcopy(ref)
for m in model.values():
    fully_shard(m, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
x = torch.randn(2, 3, 4)


def loss_of(m, r):
    order = ("a", "b") if r == 0 else ("b", "a")
    out = {k: m[k](x[r]) for k in order}
    return out["a"].pow(2).sum() + 3 * out["b"].sum()


with torch.no_grad():
    want = [loss_of(ref, r).item() for r in range(2)]
got = [None, None]
dist.all_gather_object(got, loss_of(model, rank).item())
if rank == 0:
    print(f"loss per rank: one process {want}, FSDP2 {got}")
dist.destroy_process_group()
