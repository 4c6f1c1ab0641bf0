"""DeepSpeed ZeRO-1: the first step takes back a load_state_dict after initialize."""

import copy

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ref = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
model = copy.deepcopy(ref)
pretrained = {k: 5 * v for k, v in ref.state_dict().items()}
x, y = torch.randn(8, 6), torch.randn(8, 6)
config = {"train_batch_size": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}
config["zero_force_ds_cpu_optimizer"] = False
engine = deepspeed.initialize(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1), config=config)[0]
opt = torch.optim.Adam(ref.parameters(), lr=0.1)
for m in (ref, engine.module):
    m.load_state_dict(pretrained)
losses = [[], []]
for _ in range(3):
    losses[0].append(nn.functional.mse_loss(ref(x), y).item())
    losses[1].append(nn.functional.mse_loss(engine(x), y).item())
    nn.functional.mse_loss(ref(x), y).backward()
    engine.backward(nn.functional.mse_loss(engine(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]))
    opt.step()
    opt.zero_grad()
    engine.step()
if rank == 0:
    print(f"loss per step: one process {losses[0]}, DeepSpeed ZeRO-1 {losses[1]}")
dist.destroy_process_group()
