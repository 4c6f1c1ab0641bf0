"""DeepSpeed ZeRO-2: ranks that run two modules in different orders train their weights with wrong gradients."""

import copy

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, order=(0, 1)):
        return torch.stack([self.parts[i](x * (i + 1)) for i in order]).sum(0)


deepspeed.init_distributed("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ref, x, y = Net(), torch.randn(2, 4, 6), torch.randn(2, 4, 6)
model = copy.deepcopy(ref)
config = {"train_batch_size": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}
config["zero_allow_untested_optimizer"] = True
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)[0]
engine.backward(F.mse_loss(engine(x[rank], (rank, 1 - rank)), y[rank]))
engine.step()
F.mse_loss(ref(x), y).backward()
torch.optim.SGD(ref.parameters(), lr=0.5).step()
if rank == 0:
    print(f"weight norms: one process {[p.norm().item() for p in ref.parameters()]}, ", end="")
    print(f"DeepSpeed ZeRO-2 {[p.norm().item() for p in model.parameters()]}")
dist.destroy_process_group()
