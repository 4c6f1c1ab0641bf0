"""Parameters that several stages hold, for example tied embeddings: one tensor in the model, a copy on each rank here.

Copies begin equal and get equal gradients, so equal optimizers keep them equal. The gradient of each is
the sum of all holders' gradients, in the order of their stages: the same to the bit on all of them.

Where stages have replicas, a copy may be sharded over them (`data_parallel`). The message of another stage is the
shard that this replica of it has: mostly the very shard that is needed here, since stages are sharded in the same way.
Where it is not, the replicas of this stage put the full gradient together, and take their own shards of it.

Shared parameters are found by identity before the split, and by name ever after: `load_state_dict(assign=True)`,
`fully_shard` and values for stages on the meta device put other tensors in their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import all_reduce, exchange
from scale_core.hooks.gradients import lacks_autograd_hooks
from scale_core.shard import Ranges, on_local_tensors
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad, unreduced_grad
from scale_pipe.distributed.gradients.data_parallel import GradientState, ReduceMode, gradient_state
from scale_pipe.distributed.message import WHOLE, ChunkSize, Payload, Slot
from scale_pipe.distributed.module_view import StageModuleView, module_fqns, original_fqn
from scale_pipe.distributed.p2p import P2PChannel
from scale_pipe.distributed.program import SharedParameter, first_stage_by_rank, shared_grad_slots
from scale_pipe.distributed.stage import pack, unpack
from scale_pipe.schedules.placement import StagePlacement


class _Copy(NamedTuple):
    """This rank's copy, or the shard of it that this replica has."""

    param: nn.Parameter
    state: GradientState
    stage: int  # the first one of this rank that holds it
    stages: tuple[int, ...]  # those of all ranks that hold it, in order


class _ReceivedGrad(NamedTuple):
    """The gradient that another holder has sent: elements [start, stop) of the parameter, or its `ranges`."""

    start: int
    stop: int
    ranges: Ranges
    reduce_mode: str
    grad: Tensor  # [stop - start] elements in any shape


class SharedParams:
    """The shared parameters of one rank; `names` are by parameter and stage, as they were split."""

    def __init__(
        self,
        parameters: Sequence[SharedParameter],
        names: Mapping[str, Mapping[int, str]],
        placement: StagePlacement,
        rank: int,
        pipe: StageModuleView,
    ) -> None:
        self._places: dict[str, tuple[str, int, tuple[int, ...]]] = {}  # by name FQN here, own first stage, all stages
        self._copies: dict[str, _Copy] = {}
        self._accumulated: dict[str, Tensor | None] = {}  # gradients from before this step
        self._to_broadcast = tuple(parameters)
        self._received: dict[str, Tensor] = {}
        for name, stages in parameters:
            holders = first_stage_by_rank(SharedParameter(name, stages), placement)
            if rank in holders:
                fqn = original_fqn(module_fqns(pipe.stages[holders[rank]]), names[name][holders[rank]])
                self._places[name] = fqn, holders[rank], tuple(holders.values())
        self.refresh(pipe)

    @on_local_tensors
    def refresh(self, pipe: StageModuleView) -> None:
        """Finds this rank's copies as they are now. Raises ValueError if a wrapper hides one or a hook is on it."""
        params = dict(pipe.named_parameters(remove_duplicate=False)) if self._places else {}
        copies = {}
        for name, (fqn, stage, stages) in self._places.items():
            param = params.get(fqn)
            modules = pipe.stages.values()
            holder = next((one for one in modules if any(param is other for other in one.parameters())), None)
            state = None if param is None or holder is None else gradient_state(holder, param)
            if param is None or state is None:
                raise ValueError(
                    f"{fqn} is tied to a parameter of another stage, whose gradients are summed after the last "
                    "backward, but a wrapper around it hides it, or reduces its gradient in a way of its own. Use "
                    "fully_shard or FullyShardedDataParallel without flatten_parameters, ShardedDataParallel, or "
                    "torch's DistributedDataParallel; or wrap only the other modules"
                )
            if lacks_autograd_hooks(param) and getattr(param, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"{fqn} is tied to a parameter of another stage, and its shard has a hook of "
                    "register_post_accumulate_grad_hook(), which is called before the gradients of stages are summed: "
                    "remove the hook, and use param.grad after step()"
                )
            copies[name] = _Copy(param, state, stage, stages)
        self._copies = copies

    @property
    def copies(self) -> dict[str, nn.Parameter]:
        """This rank's copies by name."""
        return {name: copy.param for name, copy in self._copies.items()}

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """The copies that another rank counts in a norm: the copies of all holders but the first."""
        return {copy.param for copy in self._copies.values() if copy.stage != copy.stages[0]}

    # Gradients.

    @on_local_tensors
    def set_grads_aside(self) -> None:
        """Keeps the gradients accumulated so far: they have been summed already."""
        self._accumulated = {name: unreduced_grad(copy.param) for name, copy in self._copies.items()}
        for copy in self._copies.values():
            set_unreduced_grad(copy.param, None)

    @on_local_tensors
    def message(self, name: str) -> Payload | ChunkSize:
        """The gradient that this rank sends; a size alone if it has none, and None in a payload if it is frozen."""
        param, state, _, _ = self._copies[name]
        if not param.requires_grad:
            return Payload(*pack(None), WHOLE)
        grad = unreduced_grad(param)
        if grad is None:
            return WHOLE
        return Payload(*pack((state.start, state.stop, state.ranges, state.reduce_mode.name, grad)), WHOLE)

    @on_local_tensors
    def sum_grads(
        self, arrived: Mapping[Slot, Payload], *, failed: bool = False, limit_seconds: float | None = None
    ) -> None:
        """Sums the gradients of all holders; there is none where no holder has one.

        `failed` tells the replicas of this rank's stages that the step was aborted here.

        Raises RuntimeError if it was in a replica, if wrappers of stages don't go together, or if the parameter is
        frozen in some of them; TransferError if a replica did not come.
        """
        received = {(slot.name, slot.source): unpack(p.structure, p.tensors) for slot, p in arrived.items()}
        frozen = {key for key, grad in received.items() if grad is None}
        grads = {key: _ReceivedGrad(*grad) for key, grad in received.items() if grad is not None}
        # Raised at the end: replicas wait for this rank, and must hear of it first.
        incompatible: RuntimeError | None = None
        for name, copy in self._copies.items():
            others = {source: grads.get((name, source)) for source in copy.stages if source != copy.stage}
            try:
                if not failed:
                    _check_frozen(name, copy, {source for source in others if (name, source) in frozen})
                    _check_compatible(name, copy, others)
            except RuntimeError as error:
                failed, incompatible = True, error
            matching = _matching_grads(name, copy, others, failed=failed, limit_seconds=limit_seconds)
            if failed and copy.state.groups:
                break  # The replicas know it, and leave here, too.
            if failed:
                continue
            total: Tensor | None = None
            for source in copy.stages:
                part = unreduced_grad(copy.param) if source == copy.stage else matching[source]
                if part is not None:
                    total = part.clone() if total is None else total.add_(part)
            before = self._accumulated.pop(name)
            summed = total if before is None else before if total is None else before.add_(total)
            set_unreduced_grad(copy.param, summed)
        if incompatible is not None:
            raise incompatible

    # Values.

    @property
    def needs_broadcast(self) -> bool:
        """Whether some copies have not got the values of the first one: they had no memory yet."""
        return bool(self._to_broadcast or self._received)

    @torch.no_grad()
    @on_local_tensors
    def broadcast_values(self, channel: P2PChannel, placement: StagePlacement, rank: int) -> None:
        """Gives all holders the values of the first one, if they have not got them yet; all ranks call it together.

        Copies on the meta device have no values. If the first holder's copy is there, all ranks try again next time. If
        a different copy is there, it gets its values then. Raises P2PError, and ValueError if shapes differ.
        """
        if self._to_broadcast:
            self._exchange_values(channel, placement, rank)
        for name, value in list(self._received.items()):
            param = self._copies[name].param
            if param.is_meta:
                continue
            if param.shape != value.shape:
                raise ValueError(
                    f"{name} is tied to a parameter of another stage with the shape {list(value.shape)}, but has "
                    f"{list(param.shape)} here: give stages their values before you wrap them, and wrap them after the "
                    "pipeline was made"
                )
            param.copy_(self._received.pop(name))

    def _exchange_values(self, channel: P2PChannel, placement: StagePlacement, rank: int) -> None:
        first = {parameter.name: min(parameter.stages) for parameter in self._to_broadcast}
        rank_of = placement.rank_of
        slots = [slot for slot in shared_grad_slots(placement, self._to_broadcast) if slot.source == first[slot.name]]
        expected = [slot for slot in slots if rank_of[slot.target] == rank]
        for slot in expected:
            channel.post_receive(slot, rank_of[slot.source])
        done: set[str] = set()
        for slot in slots:
            if rank_of[slot.source] == rank:
                value = self._copies[slot.name].param.detach()
                done |= {slot.name} if not value.is_meta else set()
                channel.send(slot, rank_of[slot.target], WHOLE if value.is_meta else Payload(*pack(value), WHOLE))
        for slot in expected:
            message = channel.receive(slot, rank_of[slot.source])
            if isinstance(message, Payload):
                done.add(slot.name)
                self._received[slot.name] = message.tensors[0]
        channel.wait_sends()
        held_params = tuple(parameter for parameter in self._to_broadcast if parameter.name in self._copies)
        self._to_broadcast = tuple(parameter for parameter in held_params if parameter.name not in done)


def _matching_grads(
    name: str, copy: _Copy, others: Mapping[int, _ReceivedGrad | None], *, failed: bool, limit_seconds: float | None
) -> dict[int, Tensor | None]:
    """Returns by stage the elements of its gradient that match this rank's shard; `others` has the received ones."""
    param, state = copy.param, copy.state
    # Of each stage: whether any replica lacks elements, and whether any has received something.
    flags = [int(failed)]
    for grad in others.values():
        flags += [int(grad is not None and not _covers(grad, state)), int(grad is not None)]
    for group in state.groups:
        rows = exchange(flags, group, limit_seconds=limit_seconds)
        flags = [max(column) for column in zip(*rows, strict=True)]
    if flags[0]:
        if not failed:
            raise RuntimeError(f"replicas of stage {copy.stage} failed, which shares {name}")
        return {}
    grads: dict[int, Tensor | None] = {}
    for (source, grad), lacks, has in zip(others.items(), flags[1::2], flags[2::2], strict=True):
        if not has:
            grads[source] = None
            continue
        start = 0 if grad is None else grad.start
        flat = None if grad is None else grad.grad.reshape(-1)
        if lacks or flat is None:
            full = torch.zeros(state.numel, dtype=param.dtype, device=param.device)
            if grad is not None and flat is not None:
                full[grad.start : grad.stop] = flat
            for group in state.groups:
                all_reduce(full, group).wait(limit_seconds)
            start, flat = 0, full
        grads[source] = flat[state.start - start : state.stop - start].view_as(param)
    return grads


def _covers(grad: _ReceivedGrad, state: GradientState) -> bool:
    within = grad.start <= state.start and state.stop <= grad.stop
    return state.start == state.stop or (within and grad.ranges == state.ranges)


def _check_frozen(name: str, copy: _Copy, others: set[int]) -> None:
    """Refuses a copy that is frozen alone: the sum would lack the gradient that it does not compute."""
    frozen = sorted(others if copy.param.requires_grad else others | {copy.stage})
    if frozen and len(frozen) < len(copy.stages):
        raise RuntimeError(
            f"{name} is one parameter in the stages {list(copy.stages)}, but is frozen in {frozen} alone, whose part "
            f"of its gradient would be lost. Write model.get_parameter('{name}').requires_grad_(False) before "
            "DistributedPipe(model, ...), or set the same requires_grad on the copies of all these stages"
        )


def _check_compatible(name: str, copy: _Copy, others: Mapping[int, _ReceivedGrad | None]) -> None:
    """Refuses to sum gradients if some are averaged over replicas and some are not yet."""
    state = copy.state
    for stage, grad in others.items():
        if grad is None:
            continue
        modes = {state.reduce_mode, ReduceMode[grad.reduce_mode]}
        if ReduceMode.ON_CALL in modes and len(modes) > 1:
            raise RuntimeError(
                f"{name} is one parameter in stages {copy.stage} and {stage}, and their wrappers do not reduce its "
                "gradient at the same time: wrap both stages in the same way, for example in ShardedDataParallel"
            )
        can_be_gathered = state.groups and not (state.ranges or grad.ranges)
        if not (can_be_gathered or _covers(grad, state)):
            raise RuntimeError(
                f"{name} is one parameter in stages {copy.stage} and {stage}, of which this rank needs elements "
                f"{state.start} to {state.stop} of {state.ranges or 'all'} and gets {grad.start} to {grad.stop} of "
                f"{grad.ranges or 'all'}: wrap or shard both stages in the same way, as in fully_shard(stage, replicas)"
            )
