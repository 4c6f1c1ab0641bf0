"""Live resharding: another number of ranks, or another strategy, for a model in memory, without a checkpoint.

Flat buffer by flat buffer, the old ranks gather their shards, and each new rank keeps its shard of it: the parameters
first, then each kind of attached state. So one of these at a time is unsharded, and every number stays the same.
Ranks that join come with a model on the meta device, and receive the gathered buffers of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import all_gather, broadcast
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.consistency.all_ranks import CollectiveCall
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag, unit_title
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DevicePolicy, flat_alignment
from scale_core.flat.layout import FlatLayout
from scale_core.shard import on_local_tensors
from scale_fsdp.ema import ShardedEMA
from scale_fsdp.mesh_info import MeshInfo, resolve_mesh_info
from scale_fsdp.reshard.attached_state import AttachedState, AttachedStateSpec
from scale_fsdp.reshard.convert import rebind_params
from scale_fsdp.runtime.checks import check_not_in_use, check_not_replaced
from scale_fsdp.runtime.param_registry import managed_modules, register_owner
from scale_fsdp.runtime.unit import Unit, units_in
from scale_fsdp.state_dict.naming import module_names
from scale_fsdp.state_dict.optimizer import pack_shard
from scale_fsdp.transports.policy import float8_weights

NewGroup: TypeAlias = GroupLike | Literal["same"]


@dataclass(frozen=True)
class ReshardRequest:
    """The state and the request of one rank; the ranks exchange it before anything changes."""

    has_values: bool  # of a shard; on a rank that joins they are on meta
    keeps_group: bool  # process_group="same"
    old: tuple[int, ...]  # global ranks
    ranks: tuple[int, ...]  # the new ones; () if this rank leaves
    num_replicas: int  # of the model on the new ranks; 0 if this rank leaves
    strategy: bool | int | None  # the argument reshard_after_forward
    model: list[str]  # names, shapes and dtypes
    layouts: list[FlatLayout]  # of each flat buffer, as it is
    attached: AttachedStateSpec
    unit_numbers: list[int]


def new_ranks(unit: Unit, process_group: NewGroup) -> MeshInfo | None:
    """The ranks that are to share the unit; None if this is none of them."""
    if isinstance(process_group, str):
        if process_group != "same":
            raise ValueError(f"process_group: expected a group, a mesh, None or 'same', got {process_group!r}")
        return unit.options.mesh_info
    if process_group is cast(object, dist.GroupMember.NON_GROUP_MEMBER):  # new_group returned it
        return None
    if isinstance(process_group, DeviceMesh) and process_group.get_coordinate() is None:
        return None
    return resolve_mesh_info(process_group)


def check_idle(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raises ValueError or RuntimeError where this rank's model is not sharded, or is in a step."""
    if not units:
        raise ValueError(f"no module in this {type(model).__name__} is sharded: call fully_shard(model) first")
    check_not_in_use(units, "reshard_to")
    check_not_replaced(units)
    for unit in units:
        unreduced = any(buffer.has_gradient for buffer in unit.buffers)
        if unreduced or unit.backward_unobserved or (unit.root is not None and not unit.root.synchronizes):
            raise ValueError(
                f"{unit_title(unit.name)} is between a forward and its backward, or inside no_sync(), or has gradients "
                "that wait for their reduction: run the last backward() of the step outside of no_sync() first"
            )
    if len({any(buffer.is_meta for buffer in unit.buffers) for unit in units if unit.buffers}) > 1:
        raise ValueError(
            "some units are on the meta device and others are not: give all of them values, or none, before you reshard"
        )


def _model_signature(unit: Unit, path: str) -> list[str]:
    """All facts of a unit that must be equal on all ranks, a line each."""
    title = path or "root"
    lines = [f"{title}: flatten={unit.options.flatten_parameters}, {unit.precision}, {unit.options.communication}"]
    for buffer in unit.buffers:
        lines += [
            f"{title}: {name} {entry.shape} {buffer.dtype} trains={buffer.sharded_param(index).requires_grad}"
            for index, (name, entry) in enumerate(zip(buffer.names, buffer.layout.entries, strict=True))
        ]
    for name, module in (
        named_module for root_module in unit.modules for named_module in managed_modules(root_module, path)
    ):
        lines += [f"{name}.{key} {tuple(b.shape)} {b.dtype}" for key, b in module._buffers.items() if b is not None]
    return lines


def check_requests(requests: Sequence[ReshardRequest], union: Group) -> None:
    """Raises ValueError, on all ranks, if the ranks differ in model, state or new ranks."""
    first = next((request for request in requests if request.has_values), None)
    if first is None:
        raise ValueError("no rank has values: every one of them came with a model on the meta device")
    new = next((request for request in requests if request.ranks), None)
    if new is None:
        raise ValueError(
            "no rank passed a process group that it is a member of: pass one on each new rank of the model"
        )
    joined = [union.ranks[rank] for rank, request in enumerate(requests) if request.ranks]
    new_ranks = {union.ranks[rank] for rank, request in enumerate(requests) if request.has_values}
    for rank, request in enumerate(requests):
        spec, first_spec = request.attached, first.attached
        for line, expected in zip_longest(request.model, first.model, fillvalue="nothing more"):
            if line != expected:
                raise ValueError(f"rank {rank} has another model than the others: {line!r}, expected {expected!r}")
        same_group = (request.ranks, request.num_replicas) == (new.ranks, new.num_replicas)
        if request.ranks and not (same_group and set(request.ranks) == set(joined)):
            raise ValueError(
                f"rank {rank} passed a group of the ranks {list(request.ranks)} in {request.num_replicas} replicas, "
                f"but ranks {joined} passed one: pass the same group on all of its ranks"
            )
        if request.has_values and not set(request.old) <= new_ranks:
            raise ValueError(
                f"rank {rank} shares the model with ranks {list(request.old)}, but only {sorted(new_ranks)} called "
                "with values: call it on all old and all new ranks, and pass union_process_group= with all of them"
            )
        if request.strategy != first.strategy:
            raise ValueError(
                f"rank {rank} has reshard_after_forward={request.strategy!r}, others {first.strategy!r}: pass the same "
                "one on all ranks"
            )
        if spec.names != first_spec.names:
            raise ValueError(
                f"the optimizers of rank {rank} have different parameters or groups than the others: build them in the "
                "same way on all ranks"
            )
        if (spec.has_ema, spec.buffer_averages) != (first_spec.has_ema, first_spec.buffer_averages):
            raise ValueError(
                f"rank {rank} and others differ in whether there is an average, or of which dtype: pass ema= on all "
                "ranks or on none"
            )
        if request.has_values and spec != first_spec:
            raise ValueError(
                f"rank {rank} has other gradients, optimizer state or averages than the others: take the same steps on "
                "all ranks"
            )


@checked_arguments
@on_local_tensors
def reshard_to(
    model: nn.Module,
    process_group: NewGroup = "same",
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    ema: ShardedEMA | None = None,
    reshard_after_forward: bool | int | None = None,
    union_process_group: GroupLike = None,
    limit_seconds: float | None = None,
) -> None:
    """Reshards a model in place, over different ranks, or in a different way over the same ranks.

        >>> import torch
        >>> from scale_fsdp import fully_shard, reshard_to
        >>> model = fully_shard(torch.nn.Linear(4, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> reshard_to(model, optimizer=optimizer, reshard_after_forward=False)

    All old and all new ranks of the model call it together, between two steps. Parameters and optimizer stay the same
    objects, with other elements; gradients are resharded too. Training then goes on as if nothing had changed, but for
    the order in which gradients are summed over the ranks.

    A rank that joins builds the model under `torch.device("meta")`, shards it in the same units by
    `fully_shard(..., mesh, options=ShardOptions(init=False))`, and builds the optimizer. It gets all state and the
    options of parameter groups; its scheduler it sets itself. A rank that leaves passes the value that
    `torch.distributed.new_group` has returned to it; its model is left on the meta device, and may join again.

    Args:
        model: The sharded model.
        process_group: The new ranks: as for `fully_shard`, or "same".
        optimizer: The model's optimizer, or several.
        ema: The model's average.
        reshard_after_forward: As for `fully_shard`; None as before.
        union_process_group: A group that holds all old and all new ranks; None is the default group.
        limit_seconds: The longest wait for a rank; None is that group's own limit.

    Raises:
        RuntimeError: On all ranks, before anything is changed: the model is in use on one, or has state that can't be
            resharded.
        ValueError: On all ranks, before anything is changed: their models, optimizers or new ranks differ.
        ScaleDistributedError: A rank was lost meanwhile. The model is then resharded in part: load a checkpoint.

    See also: [the guide to resharding](../guides/scale-further.md#several-nodes-hybrid-sharding-hsdp).
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    union, units = group_of(union_process_group), units_in(model)
    attached = AttachedState(model, optimizers, ema)
    requests = CollectiveCall(union, "reshard_to", RuntimeError).all_ranks(
        lambda: _make_request(model, units, attached, process_group, reshard_after_forward)
    )
    check_requests(requests, union)
    run = _Reshard.of(requests, union, attached, limit_seconds)
    new = [new_ranks(unit, process_group) for unit in units]
    for unit, ranks, number in zip(units, new, requests[run.source].unit_numbers, strict=True):
        unit.serial = number
        if ranks is not None:
            strategy = _strategy_of(unit, reshard_after_forward)
            unit.options = replace(unit.options, mesh_info=ranks, reshard_after_forward=strategy)
            unit.reshard_after_forward = ranks.reshards_after_forward(strategy)
        run.move_unit(unit, ranks)
    if run.any_joins and ema is not None:
        run.send_averages(ema, units[0])
    rebind_params(units)
    if run.joins:
        attached.load_spec([buffer for unit in units for buffer in unit.buffers], requests[run.source].attached)


def _strategy_of(unit: Unit, reshard_after_forward: bool | int | None) -> bool | int | None:
    return unit.options.reshard_after_forward if reshard_after_forward is None else reshard_after_forward


def _make_request(
    model: nn.Module,
    units: Sequence[Unit],
    attached: AttachedState,
    process_group: NewGroup,
    reshard_after_forward: bool | int | None,
) -> ReshardRequest:
    """The request of this rank, checked as far as one rank can."""
    check_idle(model, units)
    for unit in units:
        if (ranks := new_ranks(unit, process_group)) is not None:
            ranks.check_reshard_after_forward(_strategy_of(unit, reshard_after_forward))
            if unit.options.communication is not None:
                unit.options.communication.check(ranks)
    new, paths = new_ranks(units[0], process_group), module_names(model)
    buffers = [buffer for unit in units for buffer in unit.buffers]
    return ReshardRequest(
        has_values=not any(buffer.is_meta for buffer in buffers),
        keeps_group=process_group == "same",
        old=units[0].options.mesh_info.whole.ranks,
        ranks=() if new is None else new.whole.ranks,
        num_replicas=0 if new is None else new.replicas.size,
        strategy=reshard_after_forward,
        model=[line for unit in units for line in _model_signature(unit, paths[id(unit.module)])],
        layouts=[buffer.layout for buffer in buffers],
        attached=attached.spec(buffers),
        unit_numbers=[unit.serial for unit in units],
    )


@dataclass
class _Reshard:
    """One resharding: the senders and receivers of each buffer."""

    union: Group
    source: int  # the rank in `union` that broadcasts the buffers that its old ranks have gathered
    keeps_shards: bool  # only the groups or when it is released change
    any_joins: bool  # some rank has no values yet
    joins: bool  # this one
    broadcasts: bool  # to ranks that join, or that did not share one model so far
    layouts: list[FlatLayout]  # the old ones
    spec: AttachedStateSpec
    attached: AttachedState
    contract: Contract
    num_moved: int = 0  # flat buffers so far

    @classmethod
    def of(
        cls, requests: Sequence[ReshardRequest], union: Group, attached: AttachedState, limit_seconds: float | None
    ) -> _Reshard:
        source = next(rank for rank, request in enumerate(requests) if request.has_values)
        first, local_request = requests[source], requests[union.rank]
        any_joins = any(request.ranks and not request.has_values for request in requests)
        return cls(
            union=union,
            source=source,
            keeps_shards=all(request.keeps_group and request.has_values for request in requests),
            any_joins=any_joins,
            joins=bool(local_request.ranks) and not local_request.has_values,
            broadcasts=any_joins or sum(request.has_values for request in requests) != len(first.old),
            layouts=first.layouts,
            spec=first.attached,
            attached=attached,
            contract=Contract(union, limit_seconds),
        )

    def move_unit(self, unit: Unit, ranks: MeshInfo | None) -> None:
        """Reshards a unit, whose options are the new ones; without new ranks it goes to meta."""
        with self.contract.waiting(Event("resharding", unit.name)):
            for buffer in unit.buffers:
                if not self.keeps_shards:
                    self.move_buffer(unit, buffer, ranks)
                elif not buffer.is_meta and ranks is not None:
                    buffer.release()
                    buffer.set_groups(unit.options.buffer_groups())
            if self.any_joins:
                self.send_module_buffers(unit)
        if ranks is None:
            for _, module in (
                named_module for root_module in unit.modules for named_module in managed_modules(root_module)
            ):
                module._buffers.update({n: b.to("meta") for n, b in module._buffers.items() if b is not None})
        unit.on_buffers_moved()

    def move_buffer(self, unit: Unit, buffer: FlatBuffer, ranks: MeshInfo | None) -> None:
        """Reshards the next flat buffer and its attached state; without new ranks it goes to meta."""
        old, kinds = self.layouts[self.num_moved], self.spec.tensors[self.num_moved]
        self.num_moved += 1
        tag = message_tag(Event("resharding", f"{unit.name}#{self.num_moved}"))
        group, spans, had_values, devices = buffer.group, buffer.spans, not buffer.is_meta, buffer.devices
        if not had_values:
            devices = unit.options.placement.devices_for(unit.options.device_for(buffer.shard.device))
        tensors = {kind: self.attached.tensors_of(buffer, kind) for kind in kinds} if had_values else {}
        params, layout = list(buffer.sharded_params), old
        if ranks is not None:
            names, shapes = [entry.name for entry in old.entries], [entry.shape for entry in old.entries]
            gathered_bytes = 1 if float8_weights(buffer) else None
            alignment = flat_alignment(buffer.dtype, gathered_bytes=gathered_bytes)
            layout = FlatLayout.plan(names, shapes, ranks.shard.size, unit.options.atom, alignment=alignment)

        def gather(dtype: torch.dtype, tensors: Mapping[int, Tensor] | None = None) -> Tensor:
            """[W * S] of the old layout: all ranks' shards, or attached tensors of one kind."""
            full = torch.empty(old.full_numel, dtype=dtype, device=devices.compute)
            if had_values and full.numel():
                part = full.narrow(0, group.rank * old.shard_numel, old.shard_numel)
                if tensors is None:
                    part.copy_(buffer.shard)
                else:
                    pack_shard(part.zero_(), tensors, spans, buffer.flatten)
                all_gather(full, part, group, tag=tag).wait(self.contract.limit_seconds)
            if self.broadcasts:
                self._broadcast(full)
            return full

        # The buffer moves before the rest is gathered, so that only one of its two shards exists then.
        full = gather(buffer.dtype)
        if ranks is not None:
            shard = _cut_shard(full, old, layout, ranks, devices)
            groups = unit.options.buffer_groups()
            buffer.set_storage(shard, layout=layout, groups=groups, devices=devices)
        elif had_values:
            buffer.set_storage(torch.empty_like(buffer.shard, device="meta"))
        del full
        register_owner(unit)
        self.attached.rebind_params(params, buffer)
        for kind in kinds:
            full = gather(kind.dtype, tensors.pop(kind, {}))
            if ranks is not None:
                self.attached.set_tensors(buffer, kind, _cut_shard(full, old, layout, ranks, devices))
            del full

    def send_module_buffers(self, unit: Unit) -> None:
        """Sends the module's own buffers to ranks that join; the others keep theirs."""
        for _, module in (
            named_module for root_module in unit.modules for named_module in managed_modules(root_module)
        ):
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    received = self.receive(tensor, unit)
                    if self.joins:
                        module._buffers[name] = received

    def send_averages(self, ema: ShardedEMA, unit: Unit) -> None:
        """Sends the averages of the modules' own buffers to ranks that join."""
        with self.contract.waiting(Event("resharding", unit.name)):
            for name, average in ema.buffer_averages.items():
                received = self.receive(average, unit)
                if self.joins:
                    ema.buffer_averages[name] = received.to(ema.device)

    def receive(self, tensor: Tensor, unit: Unit) -> Tensor:
        """The source's tensor, of this rank's shape and dtype, where the unit computes."""
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=unit.options.device_for(torch.device("meta")))
        if self.union.rank == self.source:
            received.copy_(tensor)
        self._broadcast(received.reshape(-1))
        return received

    def _broadcast(self, tensor: Tensor) -> None:
        """Broadcasts the source's [N] in place."""
        if tensor.numel():
            broadcast(tensor.view(torch.uint8), self.union, source=self.source).wait(self.contract.limit_seconds)


def _cut_shard(full: Tensor, old: FlatLayout, new: FlatLayout, ranks: MeshInfo, devices: DevicePolicy) -> Tensor:
    """[S] of the new layout: this rank's shard of a full buffer of the old one."""
    shard = torch.zeros(new.shard_numel, dtype=full.dtype, device=devices.shard)
    for entry, span in zip(old.entries, new.spans(ranks.shard.rank), strict=True):
        local = full.narrow(0, entry.offset + span.start, span.numel)
        shard.narrow(0, span.shard_offset, span.numel).copy_(local)
    return shard
