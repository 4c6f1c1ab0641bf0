"""FSDP2: a mesh that lists the ranks in another order; a DCP checkpoint has the parts of each weight exchanged."""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
ref = nn.Linear(4, 4)
model, loaded = fully_shard(copy.deepcopy(ref), mesh=DeviceMesh("cpu", [1, 0])), copy.deepcopy(ref)
x, target = torch.randn(3, 4), torch.randn(3, 4)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
dcp.save(model.state_dict(), checkpoint_id=folder[0])
state = loaded.state_dict()
dcp.load(state, checkpoint_id=folder[0])
loaded.load_state_dict(state)
want, got = [(m(x) - target).pow(2).mean().item() for m in (ref, loaded)]
if dist.get_rank() == 0:
    print(f"loss: one process {want}, FSDP2 loaded from its checkpoint {got}")
dist.destroy_process_group()
