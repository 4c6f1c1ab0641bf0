"""DCP: a tensor of one name that differs between ranks, such as a random state, is saved once."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder, 0)
gen = torch.Generator().manual_seed(100 + rank)
dcp.save({"rng": gen.get_state(), "seen": torch.tensor(10.0 + rank)}, checkpoint_id=folder[0])
drawn = torch.randn(1, generator=gen).item()
state = {"rng": torch.Generator().get_state(), "seen": torch.tensor(0.0)}
dcp.load(state, checkpoint_id=folder[0])
gen.set_state(state["rng"])
got, want = [None, None], [None, None]
dist.all_gather_object(want, (10.0 + rank, drawn))
dist.all_gather_object(got, (state["seen"].item(), torch.randn(1, generator=gen).item()))
if rank == 0:
    print(f"(seen, next random number) per rank: without a restart {want}, after dcp.load {got}")
dist.destroy_process_group()
