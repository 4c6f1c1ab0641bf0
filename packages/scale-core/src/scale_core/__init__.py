"""Collectives and flat parameters for sharded training: what the techniques of scale stand on.

Each line stands on those above it; every folder's `__init__` says where to begin.

- `compat`, `streams`, `tree`: torch versions, streams and events, tensors in containers;
- `buffer_pool`, `comm/`: host memory, groups of ranks and the collectives between them;
- `consistency/`: whether all ranks do the same, and one error on all of them where they don't;
- `autograd_hooks`, `microbatch_grads`, `uneven_inputs`, `part_hooks`: when autograd calls whom, and for which samples;
- `flat/`, `shard`: parameters in one flat buffer, and what a local tensor is a shard of;
- `optim/`, `torch_patches`: gradient norms, gradient scaling, and torch's own functions on shards;
- `state/`, `snapshot/`: state dicts in pieces, and checkpoints that are whole or not there;
- `launch/`, `testing/`, `simulate/`: starting ranks, tests on ranks, and one process that plays a rank of many.
"""

from scale_core import torch_patches as _torch_patches  # noqa: F401  # Waits for the first shard.
from scale_core.autograd_hooks import (
    after_backward,
    after_gradient,
    before_backward,
    in_backward,
    local_grads_wanted,
    on_arriving_grads,
    on_local_grads,
    on_reduced_grads,
    once_after_backward,
    report_arriving_grads,
    report_local_grads,
    report_reduced_grads,
)
from scale_core.comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from scale_core.comm.control_plane import exchange, exchange_text
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.comm.work import Pending, TransferError
from scale_core.consistency.contract import Contract, ContractError, ScaleDistributedError, StepError
from scale_core.consistency.execution_order import Event, PassKind, message_tag
from scale_core.flat.buffer import Dtypes, FlatBuffer, State
from scale_core.flat.layout import Atom, Block, Entry, FlatLayout, Span
from scale_core.optim.clip_grad import clip_grad_norm, grad_norm
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import Axis, Held, Shard, full_numel, full_shape, mark, shard_of
from scale_core.state.param_ownership import num_parameters
from scale_core.streams import Stream, copy_to, stream_for
from scale_core.tree import map_tensors, tensors_in
from scale_core.uneven_inputs import Share, current_share, join

__version__ = "2026.11.0"
__all__ = [
    "Atom",
    "Axis",
    "Block",
    "Contract",
    "ContractError",
    "Dtypes",
    "Entry",
    "Event",
    "FlatBuffer",
    "FlatLayout",
    "Group",
    "GroupLike",
    "Held",
    "PassKind",
    "Pending",
    "ScaleDistributedError",
    "Shard",
    "ShardedGradScaler",
    "Share",
    "Span",
    "State",
    "StepError",
    "Stream",
    "TransferError",
    "after_backward",
    "after_gradient",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "before_backward",
    "broadcast",
    "clip_grad_norm",
    "copy_to",
    "current_share",
    "exchange",
    "exchange_text",
    "full_numel",
    "full_shape",
    "grad_norm",
    "group_of",
    "in_backward",
    "join",
    "local_grads_wanted",
    "map_tensors",
    "mark",
    "message_tag",
    "num_parameters",
    "on_arriving_grads",
    "on_local_grads",
    "on_reduced_grads",
    "once_after_backward",
    "reduce_scatter",
    "report_arriving_grads",
    "report_local_grads",
    "report_reduced_grads",
    "shard_of",
    "stream_for",
    "tensors_in",
]

for _name in __all__:
    if hasattr(globals()[_name], "__qualname__"):  # Tracebacks and documentation show the path that people write.
        globals()[_name].__module__ = __name__
del _name
