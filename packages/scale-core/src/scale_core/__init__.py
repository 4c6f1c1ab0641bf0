"""Collectives and flat parameters for sharded training: what the techniques of the house stand on.

The files in reading order; each stands only on those above it:

- `compat`: what differs between torch versions;
- `streams`: streams and events, with stand-ins on CPU;
- `nested`: tensors inside whatever a module takes or returns;
- `group`: who I compute with;
- `pending`: a transfer under way, which owns its buffers;
- `host_transport`: what moves tensors on the host, for groups that do not;
- `messages`: tagged messages from rank to rank;
- `collectives`: operations on 1-D tensors;
- `buffer_pool`: memory of large buffers on the host, in huge pages, kept and used again;
- `exchange`: what ranks tell each other in a few integers or words;
- `subgroup`: some of them as a group of their own;
- `events`: what ranks compare;
- `last_words`: what ranks did last, told through the store;
- `history`: what the passes of a model were like, so that the next one can be foretold;
- `disagreement`: what is said of ranks that are not alike;
- `contract`: the promise that all ranks do the same, and the error that says who did not;
- `giving_up`: what ranks say when one has failed, and all give the pass up;
- `numbering`: numbers that all ranks give to the same thing;
- `packing`: the placement of atoms in even shards; integers only;
- `layout`: where parameters stand in a flat buffer; pure arithmetic;
- `shard`: what a local shard is a piece of;
- `optimizer_kinds`: what an update of torch.optim depends on;
- `backward`: when things happen in a backward pass;
- `each_part`: hooks that the parts of a module take along where it is cut;
- `samples`: whose gradient is whose, where a backward pass is not one sample of it;
- `joining`: ranks that run out of data before the others;
- `flat_gradient`: a rank's own gradients of one flat buffer;
- `reduction`: what they become;
- `lone_scaler`: a scaler that asks one rank alone is refused on shards;
- `stepping`: what must hold when an optimizer steps;
- `flat_reduced`: from a rank's own gradients to those of its shard;
- `sending`: a shard on its way from the host to the device;
- `flat`: a flat buffer's storage, its views, and gather and release;
- `holdings`: which named parameters stand in each tensor that an optimizer steps on;
- `optimizer_view`: what torch's functions for state see of an optimizer on shards;
- `norms`: the norm of gradients that no rank holds alone;
- `torch_patches`: what torch's own functions do with shards;
- `scaler`: one verdict on inf and NaN for the whole group.

The others load more of torch, and are imported by their own names. State, and what is kept on disk:

- `boxes`: the elements that a rank holds, as boxes of a tensor;
- `whole_state`: whole tensors out of the shards that an optimizer's state is made of;
- `state_match`: whether a saved state is that of this model;
- `optimizer_groups`: options of parameter groups, saved by the names that a rank has;
- `optimizer_state`: an optimizer's state by the names of parameters;
- `state`: the state of a model and its optimizer, in pieces that outlive the number of ranks;
- `dcp`: torch's own checkpoint format;
- `tensorfile`: tensors in a safetensors file;
- `manifest`: what a snapshot holds, as one JSON file;
- `pieces`: which boxes each rank writes and reads;
- `together`: act on every rank, and fail on every rank;
- `snapshot`: checkpoints that are whole or not there.

Starting ranks, and doing without them:

- `main_script`: the program as new processes find it;
- `rendezvous`: ranks that find each other;
- `launch`: ranks on this machine, started by the program itself;
- `testing_rank`: what runs inside a rank of a test;
- `testing`: a function run on N ranks, and what each returned;
- `stand_in`: an accelerator that is not there;
- `simulated_memory`: the books of a simulation;
- `simulated_traffic`: what a collective sends;
- `simulate`: one process that plays one rank of a large world.
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
