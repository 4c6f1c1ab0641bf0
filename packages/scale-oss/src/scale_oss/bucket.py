"""Bucket: replicated parameters in one flat buffer, of which each rank updates its own shard.

The user's parameters have their memory in the buffer. So after a step one all-gather brings the updated parts straight
into the parameters of all ranks, and a reduced gradient is the shard with which the optimizer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from scale_core import uneven_inputs
from scale_core.comm.collectives import CollectiveWork, all_gather
from scale_core.comm.group import Group
from scale_core.compat import NO_RANGE, profiler_runs
from scale_core.consistency.execution_order import Event
from scale_core.device.streams import Stream
from scale_core.flat.reduction import FlatGradient, Reduction
from scale_core.hooks.autograd import call_local_grad_hooks, local_grad_hooks
from scale_core.shard import Axis, Placement, Shard, set_shard, shard_of
from scale_oss.partition import BucketPartition
from scale_oss.state_placement import Range, ShardedParam, StatePlacement


class Bucket:
    """Parameters of one dtype and device, replicated; each rank of the group updates its shard of them."""

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
        self._addresses = [_address(self.view(index)) for index in range(len(self.params))]
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
            within = shard_of(param)  # Its layer may have sharded it between other ranks.
            if within is None:
                set_shard(piece, Shard(entry.name, entry.shape, span.start, span.stop, axes))
            else:
                set_shard(piece, within.cut(entry.name, span.start, span.stop, axes))
        self.placements = [self._placement(index) for index in range(len(self.params))]
        entries, numel = partition.entries, partition.full_numel
        self.gradient = FlatGradient(self.params, entries, numel, self.dtype, self.dtype)  # this rank's own
        self.gradient.holds = False
        self.gradient.names = self.names
        sizes = None if partition.is_even else partition.sizes
        self._sizes = sizes
        self.reduction = Reduction(group, Group(), self.dtype, self.device, Stream(), sizes)
        self.needs_gather = False  # A step may change the parameters on some rank.
        self.averaged: set[int] = set()  # indices whose gradients were reduced into the pieces, alike on all ranks
        self._consumed: set[int] = set()  # indices used by steps since gradients were last cleared
        self._consumed_grads: dict[int, Tensor | None] = {}  # of the last step, until a pass begins
        self._restored: set[int] = set()  # indices among them that were restored
        self._updating: list[nn.Parameter] = []  # parameters that the all-gather under way changes
        self.is_gathering = False  # The all-gather of updated parameters is under way.
        self._gather: list[CollectiveWork] = []  # the all-gather, if one is under way
        # A program that ends after its last step never waits for it; it would write into memory that is gone.
        weakref.finalize(self, _cancel, self._gather)
        self._wire_buffer: Tensor | None = None

    # The parameters.

    def flatten(self, indices: Sequence[int] | range) -> None:
        """Copies the values of these parameters into the buffer, and moves their storage there unless unflattened."""
        with torch.no_grad():
            for index in indices:
                if self.params[index].numel():
                    view = self.view(index)
                    view.copy_(self.params[index].detach())
                    if index not in self.unflattened:
                        self.params[index].data = _with_own_storage(view)

    def moved_indices(self) -> list[int]:
        """The parameters whose data is outside of the buffer: replaced, as by `model.to(...)`, or unflattened."""
        homes = enumerate(zip(self.params, self._addresses, strict=True))
        return [index for index, (param, home) in homes if param.numel() and _address(param.data) != home]

    def resync_storage(self) -> None:
        """Moves parameters back into the buffer whose data was replaced, as by `param.data = ...`."""
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
        return [placement.optimizer_param for placement in self.placements if placement.optimizer_param is not None]

    # Gradients.

    def shard_full_grads(self) -> None:
        """Gives each piece its part of the parameter's gradient, which was averaged elsewhere."""
        self.needs_gather = any(param.requires_grad or param.grad is not None for param in self.params)
        for param, piece, span, placement in zip(self.params, self.pieces, self.spans, self.placements, strict=True):
            piece.grad = None
            if param.grad is not None and placement.optimizer_param is not None:
                grad = param.grad if param.grad.layout is torch.strided else param.grad.to_dense()
                piece.grad = grad.reshape(-1)[span.start : span.stop].view(span.shape).to(piece.dtype)

    def reduce(self, tag: int, wire_dtype: torch.dtype | None = None) -> None:
        """Starts to average the packed gradients, sent in `wire_dtype`; parameters without one count as zeros."""
        share = uneven_inputs.active_share
        if share is not None and not share.weight:
            self.gradient.drop()
        given = self.gradient.has_grad()
        flat = self.gradient.take(self.device)
        if given and local_grad_hooks:
            call_local_grad_hooks([self.params[i] for i in given], [self.view(i, flat) for i in given])
        if share is not None and share.weight not in (0, 1):
            flat.mul_(share.weight)
        with record_function(f"scale_oss::reduce_scatter ({self.title})") if profiler_runs() else NO_RANGE:
            self.reduction.start(flat.to(wire_dtype or self.dtype), tag, None if share is None else share.divisor)

    def commit(self, frozen: Container[int] = ()) -> None:
        """Adds the reduced gradients, which have arrived, to those of the pieces that train or are among `frozen`."""
        for reduced in self.reduction.results():
            self.needs_gather = True  # Even if it is frozen before the step: the plain optimizer would not ask either.
            given = [index for index, param in enumerate(self.params) if param.requires_grad or index in frozen]
            self.averaged.update(given)
            views = self._pieces_of(reduced)
            for index in given:
                piece = self.pieces[index]
                if self.placements[index].optimizer_param is not None:
                    piece.grad = views[index] if piece.grad is None else piece.grad.add_(views[index])

    def restore_unused(self, index: int) -> None:
        """Takes the gradient of zeros away from a parameter that no rank has used."""
        self.averaged.discard(index)
        self.pieces[index].grad = None

    def consume_grads(self) -> None:
        """After a step: no pass adds to these gradients; another step without a pass uses them again."""
        self._consumed |= self.averaged
        self._restored = set()
        self._consumed_grads = {index: self.pieces[index].grad for index in self.averaged}
        self.averaged = set()
        for piece in self.pieces:
            piece.grad = None

    def restore_consumed_grads(self) -> None:
        """Before a step: restores the gradients of the last one, if no pass has begun since."""
        for index, grad in self._consumed_grads.items():
            self.pieces[index].grad = grad
        self.averaged |= self._consumed_grads.keys()
        self.needs_gather = self.needs_gather or bool(self._consumed_grads)
        self._restored |= self._consumed_grads.keys()
        self._consumed_grads = {}

    def drop_consumed_grads(self) -> None:
        """At the beginning of a pass: drops the gradients of the last step."""
        for index in self._restored:
            self.pieces[index].grad = None
        self.averaged -= self._restored
        self._restored, self._consumed_grads = set(), {}

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clears the gradients of the pieces, or sets them to zeros, with which the next step updates."""
        self.consume_grads()
        self.drop_consumed_grads()
        cleared, self._consumed = self._consumed, set()
        if set_to_none or not cleared:
            return
        self.averaged, self.needs_gather = cleared, True
        for index in cleared:
            if self.placements[index].optimizer_param is not None:
                self.pieces[index].grad = torch.zeros_like(self.pieces[index])

    def drop_packed_grads(self) -> None:
        """Drops the gradients that were packed and not reduced; `param.grad` stays."""
        grads = [param.grad for param in self.params]
        self.gradient.drop()
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad

    # Updated parameters.

    def all_gather(self, tag: int, wire_dtype: torch.dtype | None = None) -> None:
        """Starts to send the part that this rank has updated to all ranks, in `wire_dtype`.

        With another dtype than the parameters' every rank computes with rounded ones, this one too, and keeps its own
        part unrounded as `master`.
        """
        self.wait()
        self.needs_gather = False
        self._wire_dtype = wire_dtype or self.dtype
        rounds = self._wire_dtype != self.dtype or self.master is not None  # Or rounds no longer: all of them change.
        stepped = (p for index, p in enumerate(self.params) if index in self.averaged or p.grad is not None)
        self._updating = list(self.params if rounds else stepped)
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
        if self.group.size == 1:
            self.wait()  # Nothing is sent.

    def sync_master(self) -> None:
        """Copies to `master` what was written to the rounded parameters since they were sent."""
        if self.master is not None:
            untouched = self.master.to(self._wire_dtype) == self._own_part  # This compares in the wider dtype.
            self.master.copy_(torch.where(untouched, self.master, self._own_part))

    def load_master(self, piece: nn.Parameter, unrounded: Tensor, sent_in: torch.dtype) -> None:
        """Loads an unrounded piece from a state dict; what was written to the parameters since then counts."""
        self._init_master()
        if self._wire_dtype == self.dtype:
            self._wire_dtype = sent_in
        piece.data.copy_(unrounded)

    def wait(self, limit_seconds: float | None = None) -> None:
        self.is_gathering = False
        if not self._gather:
            return
        with record_function(f"scale_oss::wait_all_gather ({self.title})") if profiler_runs() else NO_RANGE:
            self._gather.pop().wait(limit_seconds)
        if self._wire_buffer is not None:
            self.full.copy_(self._wire_buffer)
            self._wire_buffer = None
        for index in self.unflattened:
            self.params[index].data.copy_(self.view(index))
        increment_version(self._updating)  # What autograd has saved of them is no longer what was computed with.

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


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory under a storage of its own; savers take tensors that share a storage for tied."""
    storage = view.untyped_storage()
    if storage.device.type == "meta":  # As that of fake tensors: there is no memory of which it could be a part.
        return view
    start = view.storage_offset() * view.itemsize
    return view.new_empty(0).set_(storage[start : start + view.nbytes], 0, view.shape, view.stride())


def _address(tensor: Tensor) -> int:
    """The address of a tensor; of a fake tensor, that of its storage."""
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else tensor.data_ptr()


def _cancel(pending: list[CollectiveWork]) -> None:
    for work in pending:
        work.cancel()


class InPlaceBucket:
    """Shards that are updated where they are: of element-wise optimizers, or tensors that one rank holds whole."""

    def __init__(self, shards: Sequence[ShardedParam], elementwise: bool) -> None:
        self.params = [shard.param for shard in shards]
        self.placements = [
            StatePlacement(
                shard.param,
                shard.name,
                shard.shape,
                shard.ranges,
                None if elementwise else shard.holder,
                shard.group,
                shard.param,
            )
            for shard in shards
        ]

    @property
    def optimizer_params(self) -> list[nn.Parameter]:
        return [placement.optimizer_param for placement in self.placements if placement.optimizer_param is not None]

    def mark_updated(self) -> None:
        """Increments the versions of the updated parameters, by which gathered copies are known to be stale."""
        # On all ranks alike: one without elements of a parameter must gather it again with the others.
        increment_version([param for param in self.params if param.grad is not None])
