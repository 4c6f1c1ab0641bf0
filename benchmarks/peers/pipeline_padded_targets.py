"""torch.distributed.pipelining: with padded targets the loss is a mean of the micro-batches' means."""

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
x, y = torch.randn(8, 6), torch.tensor([-100, -100, -100, 1, 2, 3, 4, 0])
schedule = ScheduleGPipe(PipelineStage(model[rank], rank, 2, torch.device("cpu")), 2, loss_fn=F.cross_entropy)
F.cross_entropy(ref(x), y).backward()
schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
want = [next(s.parameters()).grad.norm().item() for s in ref]

got = [None, None]
dist.all_gather_object(got, next(model[rank].parameters()).grad.norm().item())
if rank == 0:
    print(f"gradient norm per stage: one process {want}, pipelining {got}")
dist.destroy_process_group()
