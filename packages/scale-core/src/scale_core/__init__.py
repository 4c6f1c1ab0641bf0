"""Collectives, flat parameters and sharded state: the base of the techniques of scale.

On top stand errors and functions for training loops. Import everything else from its module.
Each line imports only from those above it; every folder's `__init__` says where to begin.

- `errors`, `fault_points`, `compat`, `tree`: one tree of errors, where tests put faults, torch versions, tensors in
  containers;
- `device/`, `comm/`: streams and host memory, groups of ranks and the collectives between them;
- `consistency/`: checks that all ranks run the same and hold the same bits, and one error on all of them where not;
- `hooks/`, `uneven_inputs`: hooks of the backward pass, and ranks that run out of data;
- `flat/`, `shard`: parameters in one flat buffer, and the shard that a local tensor is;
- `optim/`, `torch_patches`: gradient norms, gradient scaling, and torch's own functions on shards;
- `state/`, `sharded_module`: sharded state dicts, and modules with parts of parameters;
- `launch/`, `testing/`: starting ranks, and tests on ranks.
"""

import logging

from scale_core import torch_patches as _torch_patches  # noqa: F401  # It patches torch at the first shard.
from scale_core.comm.group import Group, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.consistency.divergence import check_replicas
from scale_core.consistency.late_ranks import LateRanks
from scale_core.errors import ContractError, DivergenceError, ScaleDistributedError, StepError, TransferError
from scale_core.optim.clip_grad import clip_grad_norm_, grad_norm
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.state.param_ownership import num_parameters
from scale_core.uneven_inputs import join

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "ContractError",
    "DivergenceError",
    "Group",
    "LateRanks",
    "ParallelDims",
    "ScaleDistributedError",
    "ShardedGradScaler",
    "StepError",
    "TransferError",
    "check_replicas",
    "clip_grad_norm_",
    "grad_norm",
    "group_of",
    "join",
    "num_parameters",
]

for _name in __all__:  # Tracebacks and documentation show the path that people write.
    globals()[_name].__module__ = __name__
del _name
