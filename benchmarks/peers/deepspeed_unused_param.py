"""DeepSpeed ZeRO-1 and 2: AdamW's step decays a parameter that has no gradient."""

import copy

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
ref = nn.Linear(6, 6)
ref.unused = nn.Linear(6, 6)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


got = []
for stage in (1, 2):
    config = {"train_batch_size": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    config["zero_force_ds_cpu_optimizer"] = False
    model = copy.deepcopy(ref)
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
    engine.backward(engine(torch.ones(4, 6)).square().mean())
    engine.step()
    got.append(model.unused.weight.norm().item())
opt = adamw(ref)
ref(torch.ones(4, 6)).square().mean().backward()
opt.step()
if dist.get_rank() == 0:
    print(f"norm of unused.weight: one process {ref.unused.weight.norm().item()}, DeepSpeed ZeRO-1 and 2 {got}")
dist.destroy_process_group()
