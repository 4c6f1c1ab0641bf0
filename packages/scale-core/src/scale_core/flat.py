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
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.backward import local_grads_wanted, report_local_grads
from scale_core.collectives import Pending, all_gather
from scale_core.flat_gradient import FlatGradient
from scale_core.flat_shard import FlatShard
from scale_core.flat_terms import Devices, Dtypes, Groups
from scale_core.group import Group
from scale_core.joining import current_share
from scale_core.layout import FlatLayout
from scale_core.reduction import Reduction
from scale_core.sending import Sending
from scale_core.stepping import look_again, mark_copies, refuse_steps, watch_optimizers
from scale_core.streams import HostStream, Stream, copy_over, stream_for
from scale_core.whole import Whole

__all__ = ["Devices", "Dtypes", "FlatBuffer", "Groups", "State", "live_buffers", "wait_sent"]


class State(enum.Enum):
    """Which memory a flat buffer takes, beside the shard of S elements that is always there."""

    SHARDED = "nothing else: the full buffer has no memory (but for a part of it, after `release(keep_part=True)`)"
    GATHERING = "the full buffer, W * S elements, being filled: nobody may read it yet"
    GATHERED = "the full buffer, W * S elements, readable"


_AS_GIVEN = Dtypes(), Devices()
_KEPT = ("names", "layout", "dtypes", "devices", "flatten", "shard", "exposed", "_unit", "_flat_name")

_live: weakref.WeakSet[FlatBuffer] = weakref.WeakSet()


@functools.cache
def _copy_stream(device: torch.device, what: str) -> Stream:
    """The stream on which copies of one kind run; the ways to a device and back can be used at the same time."""
    return stream_for(device)


def live_buffers() -> Iterator[tuple[str, Tensor]]:
    """Yields every flat tensor that exists now: "shard" [S], "gathered" [W * S], "gradient" [W * S]."""
    for buffer in _live:
        yield "shard", buffer.shard
        if buffer.state is not State.SHARDED and not buffer.is_aliased:
            yield "gathered", buffer.full
        if buffer.part is not None:
            yield "gathered", buffer.part
        for gradient in (buffer.gradient.flat, buffer.gradient.waiting):
            if gradient is not None:
                yield "gradient", gradient


def wait_sent() -> None:
    """Returns when every shard may be written to; see `FlatBuffer.wait_sent`."""
    for buffer in list(_live):
        buffer.wait_sent()


class FlatBuffer(FlatShard):
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
        wholes: What the module computes with: per parameter, a view of the full buffer in the full shape.
        state: Whether the wholes can be read.
        part: [W * S / size of the part's group], what `release(keep_part=True)` has left of the full buffer, or None.
        gradient: This rank's own gradients of the wholes, before they are reduced.
        reduction: What they have become, until `commit`.
    """

    state: State
    part: Tensor | None
    _gathering: Pending | None
    _aside: list[tuple[nn.Parameter, Tensor]]

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        layout: FlatLayout,
        groups: Group | Groups,
        dtypes: Dtypes = _AS_GIVEN[0],
        flatten: bool = False,
        devices: Devices = _AS_GIVEN[1],
    ) -> None:
        super().__init__(names, dtypes, flatten)
        device = params[0].device
        self._plan(layout, groups if isinstance(groups, Groups) else Groups(groups), devices.resolved(device))
        self._house(self._new_shard(params[0].dtype))
        for index, param in enumerate(params):
            self.load(index, param)
        trainable = [param.requires_grad for param in params]
        self.exposed = self._expose(trainable)
        self._written = [self.shard]
        self._furnish(trainable)

    # What it is.

    def rename(self, names: Sequence[str], unit: str = "", flat_name: str = "flat_param") -> None:
        super().rename(names, unit, flat_name)
        self.gradient.names = self.names

    def follow_trainable(self) -> None:
        """Takes over what the user has frozen or unfrozen since the last step."""
        for index, whole in enumerate(self.wholes):
            wanted = self.exposed_of(index).requires_grad
            if whole.requires_grad != wanted:
                whole.requires_grad_(wanted)
        if self.gradient and not self.trains:
            self.gradient.drop()  # Of what is frozen now; it must not come back when it is unfrozen.

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return bool(self.gradient)

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

    def wait_sent(self) -> None:
        """Returns when the shard may be written to: it is no longer read by a gather that has returned before."""
        self._sending.wait()

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

    def set_aside(self, limit_seconds: float | None = None) -> list[tuple[nn.Parameter, Tensor]]:
        """Waits for what was reduced since the last call, and returns it by exposed parameter, in their shapes.

        It stands aside until `hand_out` or `commit`; until then it may be read.

        Raises:
            TransferError: See `Pending.wait`.
        """
        new: list[tuple[nn.Parameter, Tensor]] = []
        for reduced in self.reduction.results(limit_seconds):
            if reduced.device != self.shard.device:
                reduced = copy_over(reduced, self.shard.device, self._grad_stream)
            new += self._by_exposed(reduced)
        self._aside += new
        return new

    def hand_out(self, params: Container[Tensor] | None = None) -> None:
        """Adds what stands aside to the gradients of these exposed parameters; None is all."""
        aside, self._aside = self._aside, []
        for param, gradient in aside:
            if params is not None and param not in params:
                self._aside.append((param, gradient))
            elif param.requires_grad or self.flatten:
                _add_to_grad(param, gradient)

    def commit(self, limit_seconds: float | None = None) -> None:
        """Adds all that was reduced since the last commit to the gradients of the exposed parameters.

        Own gradients that were not reduced join those that wait for a later reduction.

        Raises:
            TransferError: See `Pending.wait`.
        """
        self.set_aside(limit_seconds)
        self.hand_out()
        self.gradient.settle()

    def discard(self) -> None:
        """After an error: gives up every transfer, what was gathered and what came since the last `commit`.

        Own gradients that waited for their reduction then, wait on.
        """
        if self._gathering is not None:
            self._gathering.abandon()
            self._gathering = None
            self._stream.join()
        self.reduction.abandon()
        self._aside = []
        self.gradient.revoke()
        self.release()
        self.wait_sent()

    # Whole tensors, for checkpoints and for people.

    def load(self, index: int, whole: Tensor) -> None:
        self.wait_sent()
        super().load(index, whole)

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
        self._plan(layout or self.layout, groups or self.groups, (devices or Devices()).resolved(shard.device))
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
            devices = devices if devices.shard != devices.compute else Devices().resolved(shard.device)
            devices = replace(devices, shard=shard.device)
        self._plan(state["layout"], state["groups"], devices)
        self._house(shard)
        trainable = [param.requires_grad for param in state["exposed"]]
        self._take_in(state["exposed"])
        self._furnish(trainable * len(self.names) if self.flatten else trainable)

    # What these are made of.

    def _plan(self, layout: FlatLayout, groups: Groups, devices: Devices) -> None:
        super()._plan(layout, groups, devices)
        self._stream: Stream = _copy_stream(self.compute_device, "shards") if self._moves else HostStream()
        stays = devices.shard == devices.compute == devices.reduced
        self._grad_stream: Stream = HostStream() if stays else _copy_stream(self.compute_device, "gradients")
        self._sending = Sending(self._stream)

    def _furnish(self, trainable: Sequence[bool]) -> None:
        """The full buffer with its views, released; and whatever works between it and the shard."""
        self.is_aliased = self.group.size == 1 and self.compute_dtype == self.dtype and not self._moves
        full = self.shard.data if self.is_aliased else self._new_full(self.compute_dtype)
        self.wholes: list[nn.Parameter] = [Whole(view, requires_grad=False) for view in self._views(full)]
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
        self._aside = []
        where = self.devices.reduced, self._grad_stream
        self.reduction = Reduction(self.group, self.groups.replicas, self.dtype, *where)
        self._gathered_version = self.version
        self.rename(self.names, self._unit, self._flat_name)
        self.release()
        _live.add(self)
        mark_copies(self.wholes, self)
        refuse_steps(self)
        watch_optimizers()

    def _new_full(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.layout.full_numel, dtype=dtype, device=self.compute_device)

    def _sent_shard(self, full: Tensor) -> Tensor:
        """The shard as it is sent: in the dtype and on the device of `full`, in its own part of it if it must move."""
        shard = self.shard.data
        if shard.dtype == full.dtype and not self._moves:
            return shard
        part = self._part(full, self.group)
        if self._moves:
            self._sending.start(shard, part)
            return part
        return part.copy_(shard)

    def _part(self, full: Tensor, group: Group) -> Tensor:
        """What one rank of `group` has of a full buffer that is cut evenly between its ranks."""
        size = full.numel() // group.size
        return full.narrow(0, group.rank * size, size)

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [self._view(buffer, index) for index in range(len(self.layout.entries))]

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        entry = self.layout.entries[index]
        return buffer.narrow(0, entry.offset, entry.numel).view(entry.shape)


def _add_to_grad(param: nn.Parameter, grad: Tensor) -> None:
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
