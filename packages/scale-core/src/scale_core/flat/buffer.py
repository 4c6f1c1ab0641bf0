"""Storage and views over a layout: the one mechanism behind every kind of sharding here.

Parameters of one dtype stand in one flat buffer. Each rank keeps its shard of it; the whole buffer exists only
between a gather and a release, and the parameters that a module computes with are *views* of it. A collective
therefore reads and writes the very memory that the module uses: nothing is split, concatenated or copied per
parameter on the way in. Three verbs move it through its life: gather, release, reduce. ZeRO-1, -2 and -3 differ only
in when they call them. Gather and release stand here; reduce, and what follows it, in `reduction.py`.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scale_core import buffer_pool
from scale_core.comm.collectives import Pending, all_gather
from scale_core.comm.group import Group
from scale_core.flat.layout import FlatLayout
from scale_core.flat.reduction import FlatReduced, copy_stream
from scale_core.flat.shard_storage import Devices, Dtypes, Groups, Sending, give_attributes
from scale_core.optim.step_checks import look_again, mark_copies, refuse_steps, watch_optimizers
from scale_core.streams import HostStream, Stream

# A parameter that a module computes with, whose memory comes and goes.
#
# Between a release and the next gather there is nothing behind it, and torch would end the process where it reads that:
# to print a traceback with the local variables of each frame, as test runners do, is enough. Views that a module has
# made of a parameter are plain tensors of torch's, and can't be saved from that.


class Whole(nn.Parameter):
    """A view of a full buffer, in a parameter's full shape; printed without its values while these are released."""

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # Tensor's own takes keywords that vary
        if not self.numel() or self.untyped_storage().nbytes():
            return repr(nn.Parameter(self.data, self.requires_grad))  # Not by a name that nobody has written.
        return f"<a released parameter of shape {tuple(self.shape)}, {self.dtype}: it has values while its unit runs>"


__all__ = ["Devices", "Dtypes", "FlatBuffer", "Groups", "State", "live_buffers", "wait_sent"]


class State(enum.Enum):
    """Which memory a flat buffer takes, beside the shard of S elements that is always there."""

    SHARDED = "nothing else: the full buffer has no memory (but for a part of it, after `release(keep_part=True)`)"
    GATHERING = "the full buffer, W * S elements, being filled: nobody may read it yet"
    GATHERED = "the full buffer, W * S elements, readable"


_AS_GIVEN = Dtypes(), Devices()
_KEPT = (
    "names",
    "layout",
    "dtypes",
    "devices",
    "flatten",
    "shard",
    "exposed",
    "_unit",
    "_flat_name",
    "_counted_over",
    "_within",
)

_live: weakref.WeakSet[FlatBuffer] = weakref.WeakSet()


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


class FlatBuffer(FlatReduced):
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
        self.exposed = self._expose(params)
        self._written = [self.shard]
        self._furnish([param.requires_grad for param in params])

    # What it is.

    def follow_trainable(self) -> None:
        """Takes over what the user has frozen or unfrozen since the last step."""
        for index, whole in enumerate(self.wholes):
            wanted = self.exposed_of(index).requires_grad
            if whole.requires_grad != wanted:
                whole.requires_grad_(wanted)
        if self.gradient and not self.trains:
            self.gradient.drop()  # Of what is frozen now; it must not come back when it is unfrozen.

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
        if self.layout.full_numel:
            buffer_pool.fill(self.full)
            self._gathering = self._all_gather(tag)
        self.state = State.GATHERING  # Only now: where there was no memory for it, it has not begun.

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
        self._whole_version = self.wholes[0]._version

    @property
    def is_overwritten(self) -> bool:
        """Whether one of the wholes was written to in place since they were gathered: a release loses that.

        They share one counter, which a gather leaves alone.
        """
        return not self.is_aliased and self.wholes[0]._version != self._whole_version

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
            buffer_pool.free(self.full)
        self.state = State.SHARDED

    def wait_sent(self) -> None:
        """Returns when the shard may be written to: it is no longer read by a gather that has returned before."""
        self._sending.wait()

    def is_stale(self) -> bool:
        """Whether the shard was written to, as by an optimizer, since what there is of the full buffer was gathered."""
        gathered = self.state is not State.SHARDED or self.part is not None
        return gathered and self.version != self._gathered_version

    # The end of what is under way.

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
        self._counted_over = state["_counted_over"]
        self.dtypes, self.flatten, self._within = state["dtypes"], state["flatten"], state["_within"]
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
        self._stream: Stream = copy_stream(self.compute_device, "shards") if self._moves else HostStream()
        self._sending = Sending(self._stream)

    def _furnish(self, trainable: Sequence[bool]) -> None:
        """The full buffer with its views, released; and whatever works between it and the shard."""
        self.is_aliased = self.group.size == 1 and self.compute_dtype == self.dtype and not self._moves
        full = self.shard.data if self.is_aliased else self._new_full(self.compute_dtype)
        self.wholes: list[nn.Parameter] = [Whole(view, requires_grad=False) for view in self._views(full)]
        # Written to through `.data`, which counts no versions: a gather only brings back what autograd has saved.
        self.full = full.data
        for index, (whole, wanted) in enumerate(zip(self.wholes, trainable, strict=True)):
            whole.requires_grad_(wanted)
            if not self.flatten:
                give_attributes(self.exposed[index], whole)
        self.state = State.GATHERED
        self.part = None
        self._gathering = None
        self._whole_version = self.wholes[0]._version
        self._furnish_gradients(self.wholes)
        self.gradient.holds = self.gradient.holds and not self.is_aliased
        self._gathered_version = self.version
        self.rename(self.names, self._unit, self._flat_name, self._counted_over)
        self.release()
        if self not in _live:
            _live.add(self)
            buffer_pool.trim_after(self)
        mark_copies(self.wholes, self)
        refuse_steps(self)
        watch_optimizers()

    def _all_gather(self, tag: int) -> Pending:
        if self.part is not None and self.groups.part is not None:
            return all_gather(self.full, self.part, self.groups.part, tag=tag)
        with self._stream.run():  # The collective starts there, when the shard has arrived.
            return all_gather(self.full, self._sent_shard(self.full), self.group, tag=tag)

    def _new_full(self, dtype: torch.dtype) -> Tensor:
        return buffer_pool.empty(self.layout.full_numel, dtype, self.compute_device)

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
