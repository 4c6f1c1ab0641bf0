"""stoke 0.2.1: what its three FairScale extensions make with their default settings. Its `Stoke` itself wants CUDA."""

import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

for missing in ("deepspeed", "deepspeed.utils", "deepspeed.utils.distributed", "horovod", "horovod.torch"):
    stub: Any = types.ModuleType(missing)  # Only its other extensions use them; it asks for older ones than there are.
    stub.mpi_discovery = None
    sys.modules[missing] = stub

from stoke.configs import FairscaleOSSConfig, FairscaleSDDPConfig  # noqa: E402
from stoke.extensions import (  # noqa: E402
    BaseOptimizer,
    FairscaleFSDPExtension,
    FairscaleOSSExtension,
    FairscaleSDDPExtension,
    _FairscaleFSDPConfig,
)

warnings.simplefilter("ignore")
way, _ = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()
adam = (torch.optim.Adam, {"lr": 0.05})
if way == "sddp":
    optimizer = FairscaleOSSExtension(FairscaleOSSConfig(), verbose=False).build_optimizer(*adam, model)
    sddp = FairscaleSDDPExtension(FairscaleSDDPConfig(), verbose=False)
    model, optimizer = sddp.handle_ddp(model, optimizer, None, dist.get_rank())
elif way == "fsdp":
    fsdp = FairscaleFSDPExtension(_FairscaleFSDPConfig(), verbose=False)
    model, _ = fsdp.handle_ddp(model, None, None, dist.get_rank())
    optimizer = BaseOptimizer(verbose=False).build_optimizer(*adam, model)
else:
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = BaseOptimizer(verbose=False).build_optimizer(*adam, model)
losses = []
for step in range(6):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).double()
    loss = model(batch).square().mean()
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = [value.tolist() for value in model.state_dict().values()]
if dist.get_rank() == 0:
    Path("result.json").write_text(json.dumps([losses, weights]))
dist.destroy_process_group()
