"""Storage and views over a layout: the one mechanism behind every kind of sharding here.

Parameters of one dtype stand in one flat buffer. Each rank keeps its shard of it; the whole buffer exists only
between a gather and a release, and the parameters that a module computes with are *views* of it. A collective
therefore reads and writes the very memory that the module uses: nothing is split, concatenated or copied per
parameter on the way in. Three verbs move it through its life: gather, release, reduce. ZeRO-1, -2 and -3 differ only
in when they call them.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.backward import local_grads_wanted, report_local_grads
from scale_core.collectives import Pending, all_gather
from scale_core.flat_gradient import FlatGradient
from scale_core.group import Group
from scale_core.joining import current_share
from scale_core.layout import FlatLayout
from scale_core.reduction import Reduction
from scale_core.shard import Axis, Held, Shard, mark
from scale_core.stepping import look_again, mark_copies, refuse_steps, watch_optimizers
from scale_core.streams import HostStream, Stream, stream_for


class State(enum.Enum):
    """Which memory a flat buffer takes, beside the shard of S elements that is always there."""

    SHARDED = "nothing else: the full buffer has no memory (but for a part of it, after `release(keep_part=True)`)"
    GATHERING = "the full buffer, W * S elements, being filled: nobody may read it yet"
    GATHERED = "the full buffer, W * S elements, readable"


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one flat buffer; None is that of the parameters themselves.

    Attributes:
        compute: Of the gathered parameters and of their gradients.
        reduce: Of the gradients on their way from rank to rank.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


@dataclass(frozen=True)
class Devices:
    """Where a flat buffer lives; None is the device of the parameters themselves.

    Attributes:
        shard: The shard, and so the gradients and the state that an optimizer sees.
        compute: The gathered parameters, and gradients until they are reduced.
        reduced: Reduced gradients until the backward pass is over; None is that of the shard.
    """

    shard: torch.device | None = None
    compute: torch.device | None = None
    reduced: torch.device | None = None


@dataclass(frozen=True)
class Groups:
    """Who shares a flat buffer.

    Attributes:
        shard: The W ranks between which it is cut.
        replicas: The ranks that hold the same shard, one for each copy of the model: hybrid sharding.
        part: Some of the ranks of `shard`, neighbours in it, between which `release(keep_part=True)` leaves the full
            buffer, so that the next gather stays among them. Its size divides W.
    """

    shard: Group = field(default_factory=Group)
    replicas: Group = field(default_factory=Group)
    part: Group | None = None


_KEPT = ("names", "layout", "dtypes", "devices", "flatten", "shard", "exposed", "_unit", "_flat_name")

_live: weakref.WeakSet[FlatBuffer] = weakref.WeakSet()

_copy_stream = functools.cache(stream_for)


def live_buffers() -> Iterator[tuple[str, Tensor]]:
    """Yields every flat tensor that exists now: "shard" [S], "gathered" [W * S], "gradient" [W * S]."""
    for buffer in _live:
        yield "shard", buffer.shard
        if buffer.state is not State.SHARDED and not buffer.is_aliased:
            yield "gathered", buffer.full
        if buffer.part is not None:
            yield "gathered", buffer.part
        if buffer.gradient.flat is not None:
            yield "gradient", buffer.gradient.flat


class FlatBuffer:
    """Parameters of one dtype, sharded over a group.

    Args:
        names: The parameters' names, for errors and for `shard_of`.
        params: The whole parameters, equal on all ranks, of one dtype and device. They are copied, not kept.
        layout: Where each of them stands; planned for the group's size.
        groups: The ranks that share them; a `Group` is that of the ranks between which they are cut.
        dtypes: In which dtypes they are computed with and reduced.
        flatten: Expose one flat parameter [S] in place of one local shard per parameter.
        devices: Where shard, full buffer and reduced gradients live.

    Attributes:
        group: The W ranks between which it is cut.
        shard: [S] in the parameters' own dtype: this rank's elements of all of them.
        pieces: Per parameter, the view of `shard` that belongs to it, in its local shape.
        exposed: What an optimizer gets: the pieces as parameters, or the one flat parameter.
        wholes: What the module computes with: per parameter, a view of the full buffer in the full shape.
        state: Whether the wholes can be read.
        part: [W * S / size of the part's group], what `release(keep_part=True)` has left of the full buffer, or None.
        gradient: This rank's own gradients of the wholes, before they are reduced.
        reduction: What they have become, until `commit`.
    """

    state: State
    part: Tensor | None
    _gathering: Pending | None

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        layout: FlatLayout,
        groups: Group | Groups,
        dtypes: Dtypes = Dtypes(),
        flatten: bool = False,
        devices: Devices = Devices(),
    ) -> None:
        self.dtypes, self.flatten = dtypes, flatten
        self.names, self._unit, self._flat_name = list(names), "", "flat_param"
        self._past = 0  # What makes `version` grow over all the shards that there were.
        device = params[0].device
        self._plan(layout, groups if isinstance(groups, Groups) else Groups(groups), _resolved(devices, device))
        self._house(self._new_shard(params[0].dtype))
        for index, param in enumerate(params):
            self.load(index, param)
        trainable = [param.requires_grad for param in params]
        self.exposed = self._expose(trainable)
        self._written: list[Tensor] = [self.shard]
        self._furnish(trainable)

    # What it is.

    def rename(self, names: Sequence[str], unit: str = "", flat_name: str = "flat_param") -> None:
        """Records what each exposed parameter is a piece of, under these qualified names.

        Args:
            names: Of each parameter.
            unit: Of the unit that gathers them.
            flat_name: Of the one flat parameter, where they are exposed as that.
        """
        self.names = self.gradient.names = list(names)
        self._unit, self._flat_name = unit, flat_name
        axes: tuple[Axis, ...] = (Axis(self.group, Held.SHARD),)
        if self.groups.replicas.size > 1:
            axes += (Axis(self.groups.replicas, Held.REPLICATE),)
        if self.flatten:
            start = self.group.rank * self.layout.shard_numel
            stop = start + self.layout.shard_numel
            mark(self.exposed[0], Shard(flat_name, (self.layout.full_numel,), start, stop, axes, unit))
            return
        for name, entry, span, param in zip(names, self.layout.entries, self.spans, self.exposed, strict=True):
            mark(param, Shard(name, entry.shape, span.start, span.stop, axes, unit))

    def follow_trainable(self) -> None:
        """Takes over what the user has frozen or unfrozen since the last step."""
        for index, whole in enumerate(self.wholes):
            wanted = self.exposed_of(index).requires_grad
            if whole.requires_grad != wanted:
                whole.requires_grad_(wanted)
        if self.gradient and not self.trains:
            self.gradient.drop()  # Of what is frozen now; it must not come back when it is unfrozen.

    def exposed_of(self, index: int) -> nn.Parameter:
        """What an optimizer has of a parameter: its own piece, or the one flat parameter that holds it."""
        return self.exposed[0 if self.flatten else index]

    @property
    def trains(self) -> bool:
        """Whether any of the parameters wants a gradient."""
        return any(param.requires_grad for param in self.exposed)

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return bool(self.gradient)

    @property
    def is_meta(self) -> bool:
        """Whether the shard has no values yet, as that of a model that is built on the meta device."""
        return self.shard.is_meta

    @property
    def version(self) -> int:
        """Grows whenever the shard is written to, directly or through an exposed parameter, and when it is replaced."""
        return self._past + sum(tensor._version for tensor in self._written)

    # Gather and release.

    def gather(self, tag: int = 0) -> None:
        """Starts to fill the full buffer with every rank's shard; does nothing where it is filled or on its way."""
        if self.state is not State.SHARDED:
            return
        if self.is_stale():
            self.part = None
        if self.part is None:
            self._gathered_version = self.version
        if self.is_aliased:
            self.state = State.GATHERED
            return
        self.state = State.GATHERING
        if not self.layout.full_numel:
            return
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        if self.part is not None and self.groups.part is not None:
            self._gathering = all_gather(self.full, self.part, self.groups.part, tag=tag)
            return
        with self._stream.run():  # The collective starts there, when the shard has arrived.
            self._gathering = all_gather(self.full, self._sent_shard(self.full), self.group, tag=tag)

    def wait_gathered(self, limit_seconds: float | None = None) -> None:
        """Returns when the wholes can be read.

        Raises:
            TransferError: See `Pending.wait`.
        """
        assert self.state is not State.SHARDED, "waited for a gather that nobody started"
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            pending.wait(limit_seconds)
            self._stream.join()
        self.part = None
        self.state = State.GATHERED

    def release(self, limit_seconds: float | None = None, *, keep_part: bool = False) -> None:
        """Frees the full buffer; the wholes keep their places in it and can't be read until the next gather.

        Args:
            limit_seconds: As in `Pending.wait`.
            keep_part: Keep this rank's part of it, for a gather among the ranks of `Groups.part`.

        Raises:
            TransferError: It was still being filled, and that has failed; see `Pending.wait`.
        """
        if self._gathering is not None:
            self.wait_gathered(limit_seconds)
        few = self.groups.part
        if keep_part and few is not None and self.state is State.GATHERED and not self.is_aliased:
            self.part = self._part(self.full, few).clone()
        elif not keep_part:
            self.part = None
        if not self.is_aliased:
            self.full.untyped_storage().resize_(0)
        self.state = State.SHARDED

    def is_stale(self) -> bool:
        """Whether the shard was written to, as by an optimizer, since what there is of the full buffer was gathered."""
        gathered = self.state is not State.SHARDED or self.part is not None
        return gathered and self.version != self._gathered_version

    # Reduce.

    def reduce(self, tag: int = 0) -> None:
        """Starts to average the own gradients over the ranks, in `reduce_dtype`; what has none counts as zeros.

        So does all of it on a rank that has run out of data (see `join`).
        """
        share = current_share()
        if share is not None and not share.weight:
            self.gradient.drop()
        given = self.gradient.given()
        gradient = self.gradient.take(self.compute_device)
        if local_grads_wanted() and self.flatten:
            report_local_grads(self.exposed, [gradient])
        elif local_grads_wanted():
            report_local_grads([self.exposed[i] for i in given], [self._view(gradient, i) for i in given])
        if share is not None and share.weight not in (0, 1):
            gradient.mul_(share.weight)
        self.reduction.start(gradient.to(self.reduce_dtype), tag, None if share is None else share.divisor)

    def wait_reduced(self, limit_seconds: float | None = None) -> None:
        """Waits for the reduction, if there is one; its result waits for `commit`.

        Raises:
            TransferError: See `Pending.wait`.
        """
        self.reduction.wait(limit_seconds)

    def commit(self, limit_seconds: float | None = None) -> None:
        """Adds all that was reduced since the last commit to the gradients of the exposed parameters.

        Raises:
            TransferError: See `Pending.wait`.
        """
        for reduced in self.reduction.results(limit_seconds):
            self._add_to_grads(reduced.to(self.shard.device))

    def discard(self) -> None:
        """After an error: gives up every transfer, what was gathered and what was not committed.

        Gradients that were not reduced yet stay.
        """
        if self._gathering is not None:
            self._gathering.abandon()
            self._gathering = None
            self._stream.join()
        self.reduction.abandon()
        self.release()

    # Whole tensors, for checkpoints and for people.

    def load(self, index: int, whole: Tensor) -> None:
        """Takes this rank's piece out of a whole tensor of the parameter's full shape; of one on meta, nothing."""
        if whole.is_meta:
            return
        span, piece = self.spans[index], self.pieces[index]
        with torch.no_grad():
            piece.copy_(whole.detach().reshape(-1)[span.start : span.stop].view(span.shape))

    def gather_whole(self, tag: int = 0, limit_seconds: float | None = None) -> list[Tensor]:
        """Returns every parameter whole, in its own dtype; they share one new buffer of W * S elements."""
        buffer = self._new_full(self.dtype)
        if buffer.numel() and not self.is_meta:
            with self._stream.run():
                pending = all_gather(buffer, self._sent_shard(buffer), self.group, tag=tag)
            pending.wait(limit_seconds)
            self._stream.join()
        return self._views(buffer)

    # Another shard in the place of this one.

    def rehouse(
        self,
        shard: Tensor,
        *,
        layout: FlatLayout | None = None,
        groups: Groups | None = None,
        devices: Devices | None = None,
    ) -> None:
        """Moves into another shard: of another dtype, on another device, or another part of the parameters.

        What was gathered is freed, and gradients are forgotten. The exposed parameters stay the same objects where
        torch can give them other memory, as between two devices that both have some; otherwise they are new ones.

        Args:
            shard: [S] of the new layout; belongs to the buffer from now on.
            layout: Where each parameter stands; None as before.
            groups: The ranks that share them; None as before.
            devices: Where it lives from now on; None is where the shard is, for all of it.
        """
        version, trainable = self.version, [self.exposed_of(i).requires_grad for i in range(len(self.names))]
        self.discard()
        self._plan(layout or self.layout, groups or self.groups, _resolved(devices or Devices(), shard.device))
        self._house(shard)
        self._take_in(self.exposed)
        self._past += version + 1 - self.version
        self._furnish(trainable)
        look_again()

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle take along: the shard and what it is of; nothing gathered, under way or reduced."""
        return {name: getattr(self, name) for name in _KEPT} | {"groups": replace(self.groups, part=None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.names, self._unit, self._flat_name = state["names"], state["_unit"], state["_flat_name"]
        self.dtypes, self.flatten = state["dtypes"], state["flatten"]
        self._past = 0
        shard, devices = state["shard"], state["devices"]
        if shard.device != devices.shard:  # torch.load has mapped it elsewhere.
            devices = devices if devices.shard != devices.compute else _resolved(Devices(), shard.device)
            devices = replace(devices, shard=shard.device)
        self._plan(state["layout"], state["groups"], devices)
        self._house(shard)
        trainable = [param.requires_grad for param in state["exposed"]]
        self._take_in(state["exposed"])
        self._furnish(trainable * len(self.names) if self.flatten else trainable)

    # What these are made of.

    def _plan(self, layout: FlatLayout, groups: Groups, devices: Devices) -> None:
        """Who shares what, and where."""
        assert devices.shard is not None and devices.compute is not None
        self.layout, self.groups, self.devices = layout, groups, devices
        self.group = groups.shard
        self.compute_device = devices.compute
        self._moves = devices.shard != devices.compute
        self._stream: Stream = _copy_stream(self.compute_device) if self._moves else HostStream()
        self.spans = layout.spans(self.group.rank)

    def _house(self, shard: Tensor) -> None:
        """The shard, the views of it, and what its dtype decides."""
        assert shard.shape == (self.layout.shard_numel,), "a shard has as many elements as the layout says"
        self.shard = shard.pin_memory() if self._pins and not shard.is_pinned() else shard
        self.dtype = shard.dtype
        self.compute_dtype = self.dtypes.compute or self.dtype
        self.reduce_dtype = self.dtypes.reduce or self.compute_dtype
        # Empty ones, too, are views, so that a write to a parameter counts in the shard's version on every rank alike.
        self.pieces = [self.shard.narrow(0, span.shard_offset, span.numel).view(span.shape) for span in self.spans]

    def _expose(self, trainable: Sequence[bool]) -> list[nn.Parameter]:
        if self.flatten:
            return [nn.Parameter(self.shard, requires_grad=any(trainable))]
        return [nn.Parameter(piece, requires_grad=wanted) for piece, wanted in zip(self.pieces, trainable, strict=True)]

    def _take_in(self, exposed: Sequence[nn.Parameter]) -> None:
        """Exposes the shard through parameters that there are already, the same objects where torch can do that."""
        self.exposed = []
        for param, memory in zip(exposed, [self.shard] if self.flatten else self.pieces, strict=True):
            if compat.takes_data_of(param, memory):
                param.grad = None
                param.data = memory
                self.exposed.append(param)
            else:
                self.exposed.append(nn.Parameter(memory, requires_grad=param.requires_grad))
        # They keep version counters of their own, where those that are made from the shard share that of the shard.
        self._written = [self.shard, *self.exposed]

    def _furnish(self, trainable: Sequence[bool]) -> None:
        """The full buffer with its views, released; and whatever works between it and the shard."""
        self.is_aliased = self.group.size == 1 and self.compute_dtype == self.dtype and not self._moves
        full = self.shard.data if self.is_aliased else self._new_full(self.compute_dtype)
        self.wholes = [nn.Parameter(view, requires_grad=False) for view in self._views(full)]
        # Written to through `.data`, which counts no versions: a gather only brings back what autograd has saved.
        self.full = full.data
        for whole, wanted in zip(self.wholes, trainable, strict=True):
            whole.requires_grad_(wanted)
        self.state = State.GATHERED
        self.part = None
        wide = torch.promote_types(self.reduce_dtype, self.dtype)
        self.gradient = FlatGradient(self.wholes, self.layout, self.reduce_dtype, wide)
        self.gradient.holds = self.gradient.holds and not self.is_aliased
        self._gathering = None
        assert self.devices.reduced is not None
        self.reduction = Reduction(self.group, self.groups.replicas, self.dtype, self.devices.reduced, self._stream)
        self._gathered_version = self.version
        self.rename(self.names, self._unit, self._flat_name)
        self.release()
        _live.add(self)
        mark_copies(self.wholes, self)
        refuse_steps(self)
        watch_optimizers()

    def _new_shard(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.devices.shard, pin_memory=self._pins)

    @property
    def _pins(self) -> bool:
        """Whether the host's side of a copy is pinned, so that the copy runs beside the computation."""
        return self._moves and self.compute_device.type == "cuda"

    def _new_full(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.layout.full_numel, dtype=dtype, device=self.compute_device)

    def _sent_shard(self, full: Tensor) -> Tensor:
        """The shard as it is sent: in the dtype and on the device of `full`, in its own part of it if it must move."""
        shard = self.shard.data
        if shard.dtype == full.dtype and not self._moves:
            return shard
        if self._moves and shard.dtype != full.dtype:  # Cast before it is copied: the way between devices is narrow.
            shard = torch.empty_like(shard, dtype=full.dtype, pin_memory=self._pins).copy_(shard)
        return self._part(full, self.group).copy_(shard, non_blocking=True)

    def _add_to_grads(self, gradient: Tensor) -> None:
        if self.flatten:
            _add_to_grad(self.exposed[0], gradient)
            return
        for param, span in zip(self.exposed, self.spans, strict=True):
            if param.requires_grad:
                _add_to_grad(param, gradient.narrow(0, span.shard_offset, span.numel).view(span.shape))

    def _part(self, full: Tensor, group: Group) -> Tensor:
        """What one rank of `group` has of a full buffer that is cut evenly between its ranks."""
        size = full.numel() // group.size
        return full.narrow(0, group.rank * size, size)

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [self._view(buffer, index) for index in range(len(self.layout.entries))]

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        entry = self.layout.entries[index]
        return buffer.narrow(0, entry.offset, entry.numel).view(entry.shape)


def _resolved(devices: Devices, here: torch.device) -> Devices:
    """The same with every device named, given that of the parameters."""
    shard = devices.shard or here
    return Devices(shard, devices.compute or here, devices.reduced or shard)


def _add_to_grad(param: nn.Parameter, grad: Tensor) -> None:
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
