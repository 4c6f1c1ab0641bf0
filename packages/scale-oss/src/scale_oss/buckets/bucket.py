"""Bucket: replicated parameters in one flat buffer; each rank updates its own shard of it.

The user's parameters have their memory in the buffer. So after a step one all-gather brings the updated parts straight
into the parameters of all ranks, and a reduced gradient is the shard with which the optimizer steps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Container, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from scale_core import uneven_inputs
from scale_core.comm.collectives import all_gather
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork
from scale_core.compat import NO_RANGE, profiler_runs, storage_use_count
from scale_core.consistency.execution_order import Event
from scale_core.device.streams import Stream
from scale_core.flat.config import ShardGroups
from scale_core.flat.gradient import FlatGradient, PlainReduceScatter, Reduction
from scale_core.flat.layout import ShardSpan
from scale_core.hooks.gradients import call_local_grad_hooks, gradient_hooks
from scale_core.parameters import MemoryRange, copy_attributes
from scale_core.shard import Axis, Placement, Shard, as_local, on_local_tensors, record_shard, shard_of
from scale_core.sharded_tensor.replicated_parameter import (
    ReducedGradient,
    can_be_awaited,
    set_reduced_gradient,
    set_unreduced_grad,
    unreduced_grad,
)
from scale_oss.buckets.partition import BucketPartition
from scale_oss.buckets.state_placement import Range, StatePlacement

# References to the storage of a parameter that nobody has an alias of: the parameter's, and the one in `_storages`.
_STORAGE_USES = 2


class Bucket:
    """Parameters of one dtype and device, replicated; each rank of the group updates its shard of them."""

    @on_local_tensors
    def __init__(
        self,
        params: Sequence[nn.Parameter],
        partition: BucketPartition,
        group: Group,
        title: str = "bucket 0",
        unflattened: Collection[int] = (),
    ) -> None:
        self.params, self.partition, self.group = list(params), partition, group
        self.title = title  # its name in messages, the same on all ranks and unique
        self.unflattened = set(unflattened)  # indices that keep their own memory and strides, and are copied
        self.gather_event, self.reduce_event = Event("parameters", title), Event("reduction", title)
        self.names = [entry.name for entry in partition.entries]
        self.dtype, self.device = params[0].dtype, params[0].device
        self.full = torch.zeros(partition.full_numel, dtype=self.dtype, device=self.device)  # all parameters
        # Where the parameters were, to find others over that memory when the model is wrapped.
        self.original_memory = [
            memory
            for index, (name, param) in enumerate(zip(self.names, self.params, strict=True))
            if index not in self.unflattened
            for memory in MemoryRange.of(name, param)
        ]
        self._addresses = [_address(self.view(index)) for index in range(len(self.params))]
        self._storages = [param.untyped_storage() for param in self.params]  # one of each parameter
        self.flatten(range(len(self.params)))
        self.spans = partition.spans_by_rank[group.rank]
        self._own_part = self.full.narrow(0, partition.start(group.rank), partition.sizes[group.rank])
        self.master: Tensor | None = None  # this rank's shard unrounded, where parameters are sent in another dtype
        self._wire_dtype = self.dtype
        axes = (Axis(group, Placement.SHARD),)
        trains = self.dtype.is_floating_point or self.dtype.is_complex  # torch allows no other dtypes.
        # Per parameter the part that this rank updates: a parameter in its local shape, a view of `full`.
        self.pieces = [nn.Parameter(view, requires_grad=trains) for view in self._pieces_of(self._own_part)]
        for param, piece, span, entry in zip(self.params, self.pieces, self.spans, partition.entries, strict=True):
            copy_attributes(param, piece)
            within = shard_of(param)  # Its layer may have sharded it between other ranks.
            if within is None:
                record_shard(piece, Shard(entry.name, entry.shape, span.start, span.stop, axes))
            else:
                record_shard(piece, within.cut(entry.name, span.start, span.stop, axes))
        self.trained = [param.requires_grad for param in self.params]  # as the reducer has last seen
        self.placements = [self._placement(index) for index in range(len(self.params))]
        entries, numel = partition.entries, partition.full_numel
        self.gradient = FlatGradient(self.params, entries, numel, self.dtype, self.dtype)  # this rank's own
        self.gradient.holds = False
        self.gradient.names = self.names
        sizes = None if partition.is_even else partition.sizes
        self._sizes = sizes
        self.reduction = Reduction(PlainReduceScatter(ShardGroups(group), sizes), self.dtype, self.device, Stream())
        self.reduction.keeps_memory = False  # Buckets differ in size, so that no other one could take it.
        self.needs_gather = False  # A step may change the parameters on some rank.
        # indices of gradients that a step has used, and to which the next pass doesn't add
        self._consumed: set[int] = set()
        self.can_be_awaited = False  # The classes of the parameters say whether an all-gather writes to them.
        self.is_gathering = False  # The all-gather of updated parameters is under way.
        self._gather: list[CollectiveWork] = []  # the all-gather, if one is under way
        self._waits = threading.Lock()  # Several threads may read parameters.
        # A program that ends after its last step never waits for it; it would write into memory that is gone.
        weakref.finalize(self, _cancel, self._gather)
        self._wire_buffer: Tensor | None = None

    # The parameters.

    def flatten(self, indices: Sequence[int] | range) -> None:
        """Copies the values of these parameters into the buffer, and moves their storage there unless unflattened."""
        with as_local(), torch.no_grad():
            for index in indices:
                if self.params[index].numel():
                    view = self.view(index)
                    view.copy_(self.params[index].detach())
                    if index not in self.unflattened:
                        self.params[index].data = _with_own_storage(view)
                        self._storages[index] = self.params[index].untyped_storage()

    def is_read_past_parameters(self) -> bool:
        """Whether somebody could read or write a parameter by another tensor, an alias of its memory.

        An alias, for example a `param.data` that was kept, can't wait for an all-gather, as the parameter itself does.
        """
        if not self.can_be_awaited:
            return all(storage.device.type != "meta" for storage in self._storages)  # Fake tensors have no values.
        return any(storage_use_count(storage._cdata) > _STORAGE_USES for storage in self._storages)

    def moved_indices(self) -> list[int]:
        """The parameters whose data is outside of the buffer: replaced, as by `model.to(...)`, or unflattened."""
        with as_local():
            homes = enumerate(zip(self.params, self._addresses, strict=True))
            return [index for index, (param, home) in homes if param.numel() and _address(param.data) != home]

    def resync_storage(self) -> None:
        """Moves parameters back into the buffer whose data was replaced, as by `param.data = ...`."""
        with as_local():
            moved_indices = self.moved_indices()
            for index in moved_indices:
                param = self.params[index]
                if param.dtype != self.dtype or param.device != self.device:
                    raise RuntimeError(
                        f"'{self.names[index]}' was {self.dtype} on {self.device} when OSS was built, and is "
                        f"{param.dtype} on {param.device} now. Convert or move the model first, then build "
                        "OSS(model.parameters(), ...)"
                    )
            self.flatten(moved_indices)

    def view(self, index: int, flat: Tensor | None = None) -> Tensor:
        """One parameter's view of the buffer, or of another flat tensor like it, in its full shape."""
        entry = self.partition.entries[index]
        buffer = self.full if flat is None else flat
        return buffer.narrow(0, entry.offset, entry.numel).view(entry.shape)

    @property
    def optimizer_params(self) -> list[nn.Parameter]:
        """The pieces that this rank's optimizer sees, one for each parameter that it has a part of."""
        return [placement.optimizer_param for placement in self.placements if placement.optimizer_param is not None]

    # Gradients. The averaged one of a parameter is the `grad` of its piece, which is empty where other ranks have all.

    def has_grad(self, index: int) -> bool:
        """Whether there is an averaged gradient of a parameter; equal on all ranks."""
        return self.pieces[index].grad is not None

    def drop_grad(self, index: int) -> None:
        """Takes the averaged gradient of a parameter away."""
        self.set_grad(index, None)

    def shard_full_grads(self) -> None:
        """Gives each piece its part of the parameter's gradient, which was averaged elsewhere."""
        with as_local():
            grads = [unreduced_grad(param) for param in self.params]
            self.needs_gather = any(
                p.requires_grad or grad is not None for p, grad in zip(self.params, grads, strict=True)
            )
            for grad, piece, span in zip(grads, self.pieces, self.spans, strict=True):
                piece.grad = None if grad is None else part_of_gradient(grad, piece, span)

    def reduce(self, tag: int, wire_dtype: torch.dtype | None = None) -> None:
        """Starts the reduce-scatter of the packed gradients, in `wire_dtype`; parameters without one count as zeros."""
        with as_local():
            share = uneven_inputs.active_share
            if share is not None and not share.weight:
                self.gradient.drop()
            has_grad = self.gradient.has_grad()
            flat = self.gradient.take(self.device)
            if has_grad and gradient_hooks.local:
                call_local_grad_hooks([self.params[i] for i in has_grad], [self.view(i, flat) for i in has_grad])
            if share is not None and share.weight not in (0, 1):
                flat.mul_(share.weight)
            with record_function(f"scale_oss::reduce_scatter ({self.title})") if profiler_runs() else NO_RANGE:
                self.reduction.start(flat.to(wire_dtype or self.dtype), tag, None if share is None else share.divisor)

    def commit(self, frozen: Container[int] = ()) -> None:
        """Adds the reduced gradients, which have arrived, to the `grad` of pieces that train or are among `frozen`."""
        with as_local():
            for reduced in self.reduction.results():
                # Even if it is frozen before the step: the plain optimizer would not ask either.
                self.needs_gather = True
                views = self._pieces_of(reduced)
                for index, (param, piece) in enumerate(zip(self.params, self.pieces, strict=True)):
                    if param.requires_grad or index in frozen:
                        piece.grad = views[index] if piece.grad is None else piece.grad.add_(views[index])

    def show_grads(self, records: Sequence[ReducedGradient]) -> None:
        """From now on the parameters show their averaged gradients as `grad`."""
        for param, record in zip(self.params, records, strict=True):
            set_reduced_gradient(param, record)
        self.can_be_awaited = all(map(can_be_awaited, self.params))

    def set_grad(self, index: int, grad: Tensor | None) -> None:
        """Replaces an averaged gradient: this rank's part of it, or None."""
        self._consumed.discard(index)
        self.pieces[index].grad = grad
        self.needs_gather = self.needs_gather or grad is not None

    def consume_grads(self) -> None:
        """After a step: the next pass does not add to these gradients; a step before it uses them again."""
        self._consumed = {index for index, piece in enumerate(self.pieces) if piece.grad is not None}

    def prepare_step(self) -> None:
        """Before a step: it changes the parameters that have a gradient, even without a pass since the last one."""
        self.needs_gather = self.needs_gather or any(piece.grad is not None for piece in self.pieces)

    def drop_consumed_grads(self) -> None:
        """At the beginning of a pass: drops the gradients of the last step."""
        for index in self._consumed:
            self.pieces[index].grad = None
        self._consumed.clear()

    def drop_grads(self) -> None:
        """Drops the parts of gradients that were averaged elsewhere."""
        for piece in self.pieces:
            piece.grad = None

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clears all gradients, or sets them to zeros, with which the next step updates."""
        with as_local():
            self._consumed.clear()
            for param in self.params:
                if (grad := unreduced_grad(param)) is not None:
                    set_unreduced_grad(param, None if set_to_none else grad.detach().zero_())
            for piece in self.pieces:
                if piece.grad is not None:
                    if set_to_none:
                        piece.grad = None
                    else:
                        piece.grad.zero_()
                        self.needs_gather = True

    def drop_packed_grads(self) -> None:
        """Drops the gradients that were packed and not reduced; those that were accumulated before stay."""
        grads = [unreduced_grad(param) for param in self.params]
        self.gradient.drop()
        for param, grad in zip(self.params, grads, strict=True):
            set_unreduced_grad(param, grad)

    # Updated parameters.

    def all_gather(self, tag: int, wire_dtype: torch.dtype | None = None, *, updates_all: bool = False) -> None:
        """Starts to send the part that this rank has updated to all ranks, in `wire_dtype`.

        With another dtype than the parameters' every rank computes with rounded ones, this one too, and keeps its own
        part unrounded as `master`. Without `updates_all` parameters have changed that have a gradient.
        """
        with as_local():
            self.needs_gather = False
            self._wire_dtype = wire_dtype or self.dtype
            # Or rounds no longer: all of them change.
            rounds = self._wire_dtype != self.dtype or self.master is not None
            updates_all = updates_all or rounds
            stepped = [param for param, piece in zip(self.params, self.pieces, strict=True) if piece.grad is not None]
            if self._wire_dtype == self.dtype:
                if self.master is not None:
                    self._own_part.copy_(self.master)
                target, sent = self.full, self._own_part
            else:
                self._wire_buffer = target = self.full.new_empty(self.full.shape, dtype=self._wire_dtype)
                sent = self._init_master().to(self._wire_dtype)
            with record_function(f"scale_oss::all_gather ({self.title})") if profiler_runs() else NO_RANGE:
                self._gather.append(all_gather(target, sent, self.group, sizes=self._sizes, tag=tag))
            self.is_gathering = True
            # Autograd has saved values of the forward, which are overwritten.
            increment_version(self.params if updates_all else stepped)
            if self.can_be_awaited:
                self._switch_awaited()
            if self.group.size == 1:
                self.wait()  # Nothing is sent.

    def sync_master(self) -> None:
        """Copies to `master` writes to the rounded parameters since they were sent."""
        if self.master is not None:
            untouched = self.master.to(self._wire_dtype) == self._own_part  # This compares in the wider dtype.
            self.master.copy_(torch.where(untouched, self.master, self._own_part))

    def load_master(self, piece: nn.Parameter, unrounded: Tensor, sent_in: torch.dtype) -> None:
        """Loads an unrounded piece from a state dict; later writes to the parameters count."""
        self._init_master()
        if self._wire_dtype == self.dtype:
            self._wire_dtype = sent_in
        piece.data.copy_(unrounded)

    def wait(self, limit_seconds: float | None = None) -> None:
        """Returns when the parameters are up to date; where another rank has failed, raises each time."""
        with as_local(), self._waits:
            if not self._gather:
                return
            with record_function(f"scale_oss::wait_all_gather ({self.title})") if profiler_runs() else NO_RANGE:
                self._gather[0].wait(limit_seconds)
            self._gather.clear()
            if self._wire_buffer is not None:
                self.full.copy_(self._wire_buffer)
                self._wire_buffer = None
            for index in self.unflattened:
                self.params[index].data.copy_(self.view(index))
            self.is_gathering = False
            if self.can_be_awaited:
                self._switch_awaited()

    def _switch_awaited(self) -> None:
        """Switches the parameters between their class and the class that waits for an all-gather."""
        for param in self.params:
            param.__class__ = cast(Any, param).counterpart

    def _placement(self, index: int) -> StatePlacement:
        entry, owners = self.partition.entries[index], self.partition.owners
        ranges = tuple(Range(spans[index].start, spans[index].stop) for spans in self.partition.spans_by_rank)
        owner = owners[index] if owners else None
        param, piece = self.params[index], self.pieces[index]
        return StatePlacement(param, entry.name, entry.shape, ranges, owner, self.group, piece)

    def _init_master(self) -> Tensor:
        if self.master is None:
            self.master = self._own_part.clone()
            for piece, view in zip(self.pieces, self._pieces_of(self.master), strict=True):
                piece.data = view
        return self.master

    def _pieces_of(self, part: Tensor) -> list[Tensor]:
        return [part.narrow(0, span.shard_offset, span.numel).view(span.shape) for span in self.spans]


def part_of_gradient(grad: Tensor, piece: Tensor, span: ShardSpan) -> Tensor:
    """This rank's part of a full gradient; sparse ones become dense."""
    dense = grad if grad.layout is torch.strided else grad.to_dense()
    return dense.reshape(-1)[span.start : span.stop].view(span.shape).to(piece.dtype)


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory under a storage of its own; savers take tensors that share a storage for tied."""
    storage = view.untyped_storage()
    if storage.device.type == "meta":  # For example of fake tensors: there is no memory that it could be a part of.
        return view
    start = view.storage_offset() * view.itemsize
    return view.new_empty(0).set_(storage[start : start + view.nbytes], 0, view.shape, view.stride())


def _address(tensor: Tensor) -> int:
    """The address of a tensor; of a fake tensor, the address of its storage."""
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else tensor.data_ptr()


def _cancel(pending: list[CollectiveWork]) -> None:
    for work in pending:
        work.cancel()
