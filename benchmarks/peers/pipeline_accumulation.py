"""torch.distributed.pipelining: over two schedule.step(), gradients of the first are divided twice."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ref = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 6))
model = copy.deepcopy(ref)
x, y = torch.randn(8, 6), torch.randn(8, 6)
schedule = ScheduleGPipe(PipelineStage(model[rank], rank, 2, torch.device("cpu")), 4, loss_fn=F.mse_loss)
for _ in range(2):
    (F.mse_loss(ref(x), y) / 2).backward()
    schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
for p in model[rank].parameters():
    p.grad /= 2
want = [next(s.parameters()).grad.norm().item() for s in ref]

got = [None, None]
dist.all_gather_object(got, next(model[rank].parameters()).grad.norm().item())
if rank == 0:
    print(f"gradient norm per stage: one process {want}, pipelining {got}")
dist.destroy_process_group()
