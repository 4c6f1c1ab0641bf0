"""DeepSpeed ZeRO-1: torch.nn.utils.clip_grad_norm_ on the engine's parameters does nothing."""

import copy

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

deepspeed.init_distributed("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ref = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
model = copy.deepcopy(ref)
x, y = torch.randn(8, 6), torch.randn(8, 6)
config = {"train_batch_size": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}
config["zero_allow_untested_optimizer"] = True
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
opt = torch.optim.SGD(ref.parameters(), lr=0.1)
for _ in range(4):
    F.mse_loss(ref(x), y).backward()
    engine.backward(F.mse_loss(engine(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]))
    nn.utils.clip_grad_norm_(ref.parameters(), 0.05)
    nn.utils.clip_grad_norm_(engine.parameters(), 0.05)
    opt.step()
    opt.zero_grad()
    engine.step()
got, want = F.mse_loss(engine(x), y).item(), F.mse_loss(ref(x), y).item()
if rank == 0:
    print(f"loss after 4 SGD steps: one process {want}, DeepSpeed ZeRO-1 {got}")
dist.destroy_process_group()
