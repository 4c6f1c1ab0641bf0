"""Collectives, flat parameters and sharded state: the base of the techniques of scale.

Each line imports only from those above it; every folder's `__init__` says where to begin.

- `errors`, `fault_points`, `compat`, `tree`: one tree of errors, where tests put faults, torch versions, tensors in
  containers;
- `device/`, `comm/`: streams and host memory, groups of ranks and the collectives between them;
- `consistency/`: checks that all ranks run the same and hold the same bits, and one error on all of them where not;
- `hooks/`, `uneven_inputs`: hooks of the backward pass, and ranks that run out of data;
- `quantization/`: values in 8 or 4 bits, and collectives that send these;
- `flat/`, `shard`: parameters in one flat buffer, and the shard that a local tensor is;
- `optim/`, `torch_patches`: gradient norms, gradient scaling, and torch's own functions on shards;
- `state/`, `sharded_module`: sharded state dicts, and modules with parts of parameters;
- `launch/`, `testing/`: starting ranks, and tests on ranks.
"""

import logging

from scale_core import torch_patches as _torch_patches  # noqa: F401  # It patches torch at the first shard.
from scale_core.arguments import checked_arguments as _checked
from scale_core.comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.comm.work import CollectiveWork
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import check_replicas
from scale_core.consistency.execution_order import Event
from scale_core.consistency.late_ranks import LateRanks
from scale_core.errors import ContractError, DivergenceError, ScaleDistributedError, StepError, TransferError
from scale_core.flat.buffer import DtypePolicy, FlatBuffer
from scale_core.flat.layout import BlockAtom, FlatLayout
from scale_core.hooks.autograd import register_grad_published_hook, register_local_grad_hook, register_reduced_grad_hook
from scale_core.optim.clip_grad import clip_grad_norm_, grad_norm
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import Axis, Placement, Shard, full_numel, full_shape, shard_of
from scale_core.sharded_tensor.tensor import set_shard
from scale_core.state.param_ownership import num_parameters
from scale_core.uneven_inputs import join

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "Axis",
    "BlockAtom",
    "CollectiveWork",
    "Contract",
    "ContractError",
    "DivergenceError",
    "DtypePolicy",
    "Event",
    "FlatBuffer",
    "FlatLayout",
    "Group",
    "GroupLike",
    "LateRanks",
    "Placement",
    "ScaleDistributedError",
    "Shard",
    "ShardedGradScaler",
    "StepError",
    "TransferError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "check_replicas",
    "clip_grad_norm_",
    "full_numel",
    "full_shape",
    "grad_norm",
    "group_of",
    "join",
    "num_parameters",
    "reduce_scatter",
    "register_grad_published_hook",
    "register_local_grad_hook",
    "register_reduced_grad_hook",
    "set_shard",
    "shard_of",
]

for _name in (
    *("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"),
    *("full_numel", "full_shape", "shard_of"),
):  # The packages call them where they are, in every step.
    globals()[_name] = _checked(globals()[_name])
for _name in __all__:
    if hasattr(globals()[_name], "__qualname__"):  # Tracebacks and documentation show the path that people write.
        globals()[_name].__module__ = __name__
del _name
