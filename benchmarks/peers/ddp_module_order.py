"""DDP: ranks register their modules in another order, as from a set; equal shapes are averaged by position."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, names):
        super().__init__()
        torch.manual_seed(1)
        made = {k: nn.Linear(6, 6) for k in ("a", "b")}
        self.parts = nn.ModuleDict({k: made[k] for k in names})

    def forward(self, x):
        return self.parts["b"](self.parts["a"](x).tanh())


def train(m, net, b):
    opt = torch.optim.SGD(m.parameters(), lr=0.5)
    F.mse_loss(net(x[b]), y[b]).backward()
    opt.step()
    return m.parts["a"].weight.norm().item()


x, y = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
ref, model = Net("ab"), Net("ab" if rank == 0 else "ba")
want = train(ref, ref, slice(None))

got = [None, None]
dist.all_gather_object(got, train(model, DistributedDataParallel(model), slice(rank, rank + 1)))
if rank == 0:
    print(f"norm of a.weight: one process {want}, DDP {got}")
dist.destroy_process_group()
