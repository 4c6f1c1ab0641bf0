"""The flat buffer: all-gather into it, views of it as parameters, and its release.

Parameters of one dtype are in one flat buffer. Each rank keeps its shard of it; the full buffer exists only between a
gather and a release, and the parameters that a module computes with are *views* of it. A collective therefore reads and
writes the very memory that the module uses: nothing is split, concatenated or copied per parameter. ZeRO-1, -2 and -3
differ only in when they call gather, release and reduce (see `reduction.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import UNTAGGED, CollectiveWork, all_gather
from scale_core.comm.group import Group
from scale_core.consistency.optimizer_steps import OptimizerSteps
from scale_core.device import buffer_pool
from scale_core.flat.gradient import view_of
from scale_core.flat.host_staged import HostStagedTransport, HostToDeviceCopy
from scale_core.flat.layout import FlatLayout
from scale_core.flat.reduction import FlatReduced, copy_stream
from scale_core.flat.shard_storage import DevicePolicy, DtypePolicy, NodeGroups, ShardGroups
from scale_core.flat.transport import PlainTransport, ShardTransport, TransportPolicy, part_of
from scale_core.optim.step_checks import (
    invalidate_cache,
    register_shard_owner,
    register_unsharded,
    shard_owners,
    watch_optimizers,
)
from scale_core.parameters import copy_attributes
from scale_core.shard import as_local, on_local_tensors


class UnshardedParameter(nn.Parameter):
    """A view of a full buffer in a parameter's full shape; it prints without values while they are released."""

    # torch ends the process where it reads released memory: a test runner that prints local variables is enough.

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # Tensor's own takes keywords that vary
        if not self.numel() or self.untyped_storage().nbytes():
            return repr(nn.Parameter(self.data, self.requires_grad))  # Prints as a plain parameter.
        return f"<a released parameter of shape {tuple(self.shape)}, {self.dtype}: it has values while its unit runs>"


__all__ = [
    "DevicePolicy",
    "DtypePolicy",
    "FlatBuffer",
    "NodeGroups",
    "ShardGroups",
    "State",
    "live_buffers",
    "wait_sent",
]


class State(enum.Enum):
    """The memory of a flat buffer, in addition to the shard of S elements that is always there."""

    SHARDED = "nothing else: the full buffer has no memory (but for a part of it, after `release(keep_part=True)`)"
    GATHERING = "the full buffer, W * S elements, being filled: it must not be read yet"
    GATHERED = "the full buffer, W * S elements, readable"


_AS_GIVEN = DtypePolicy(), DevicePolicy()
# Attributes that are pickled as they are.
_KEPT = (
    "names",
    "dtypes",
    "flatten",
    "sharded_params",
    "_unit",
    "_flat_name",
    "_counted_over",
    "_outer_shards",
    "gradient_divisor",
    "transport_policy",
)


def _live_flat_buffers() -> list[FlatBuffer]:
    return [owner for owner in shard_owners() if isinstance(owner, FlatBuffer)]


def live_buffers() -> Iterator[tuple[str, Tensor]]:
    """Yields every flat tensor that exists now: "shard" [S], "gathered" [W * S], "gradient" [W * S]."""
    for buffer in _live_flat_buffers():
        yield "shard", buffer.shard
        if buffer.state is not State.SHARDED and not buffer.is_aliased:
            yield "gathered", buffer.full
        if buffer.part is not None:
            yield "gathered", buffer.part
        for gradient in (buffer.gradient.flat, buffer.gradient.accumulated):
            if gradient is not None:
                yield "gradient", gradient


def wait_sent() -> None:
    """Waits until every shard may be written to; see `FlatBuffer.wait_sent`."""
    for buffer in _live_flat_buffers():
        buffer.wait_sent()


class FlatBuffer(FlatReduced):
    """Parameters of one dtype, sharded over a group.

    Args:
        names: The parameters' names, for errors and for `shard_of`.
        params: The full parameters, equal on all ranks, of one dtype and device. They are copied, not kept.
        layout: The place of each; planned for the group's size.
        groups: The ranks that share them, or the `Group` between whose ranks they are cut.
        dtypes: In which dtypes they are computed with and reduced.
        flatten: Expose one flat parameter [S] in place of one local shard per parameter.
        devices: Where shard, full buffer and reduced gradients live.
        transport_policy: How parameters and gradients are sent; None sends them as they are.

    Attributes:
        unsharded_params: Per parameter, a view of the full buffer in the full shape.
        state: Whether they can be read.
        has_post_all_gather: Whether a module computes with tensors around the gathered data (`post_all_gather`).
        part: [W * S / size of the part's group], the part of the full buffer left by `release(keep_part=True)`, or
            None.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.flat.buffer import FlatBuffer
        >>> from scale_core.flat.layout import FlatLayout
        >>> names, params = zip(*torch.nn.Linear(3, 4).named_parameters())
        >>> layout = FlatLayout.plan(names, [param.shape for param in params], world_size=1)
        >>> buffer = FlatBuffer(names, params, layout, Group())  # a group of this rank only
        >>> [tuple(param.shape) for param in buffer.sharded_params]
        [(4, 3), (4,)]

    See also: [the core](../how-the-core-works.md).
    """

    state: State
    part: Tensor | None
    has_post_all_gather: bool
    recorded_steps: OptimizerSteps | None = None  # Of the model, whose ranks compare them
    _gathering: CollectiveWork | None
    _host_copies: HostToDeviceCopy | None  # Of the shard, where it is on another device than that which computes
    _plain_transport: ShardTransport  # Of full parameters in their own dtype

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        layout: FlatLayout,
        groups: Group | ShardGroups,
        dtypes: DtypePolicy = _AS_GIVEN[0],
        flatten: bool = False,
        devices: DevicePolicy = _AS_GIVEN[1],
        transport_policy: TransportPolicy | None = None,
    ) -> None:
        super().__init__(names, dtypes, flatten)
        self.transport_policy = transport_policy
        device = params[0].device
        self._plan(layout, groups if isinstance(groups, ShardGroups) else ShardGroups(groups), devices.resolved(device))
        self._set_shard(self._new_shard(params[0].dtype))
        for index, param in enumerate(params):
            self.load(index, param)
        self.sharded_params = self._make_sharded_params(params)
        self._written = [self.shard]
        self._init_unsharded([param.requires_grad for param in params])

    # Properties.

    @property
    def version(self) -> int:
        """Grows whenever the shard is written to, directly or through a sharded parameter, and when it is replaced."""
        with as_local():
            return self._past_versions + sum(tensor._version for tensor in self._written)

    def follow_trainable(self) -> dict[str, bool]:
        """Copies `requires_grad` from the sharded parameters to the unsharded ones; returns the changed names."""
        sharded = self.sharded_params * len(self.names) if self.flatten else self.sharded_params
        changed = {}
        with as_local():
            for index, (param, shard) in enumerate(zip(self.unsharded_params, sharded, strict=True)):
                if param.requires_grad != shard.requires_grad:
                    param.requires_grad_(shard.requires_grad)
                    changed[self.names[index]] = shard.requires_grad
        return changed

    def post_all_gather(self, index: int) -> Tensor:
        """Returns the tensor to compute with for a gathered parameter; its gradient goes to the unsharded parameter."""
        data = view_of(self.full, self.layout.entries[index])
        return self.transport.post_all_gather(index, self.unsharded_params[index], data)

    # Gather and release.

    def allocate(self) -> None:
        """Takes the memory of the full buffer, as the next gather does; `release` frees it."""
        if self.is_aliased or self.full.untyped_storage().nbytes():
            return
        if self._is_pooled:
            buffer_pool.allocate(self.full)
        else:
            self.full.untyped_storage().resize_(self.full.nbytes)

    def gather(self, tag: int = UNTAGGED, *, copies_shard: bool = False) -> None:
        """Starts to fill the full buffer with every rank's shard; does nothing where it is filled or being filled.

        With `copies_shard` the shard may be written to before `wait_gathered`, and is sent as it is now.
        """
        if self.state is not State.SHARDED:
            return
        if self.is_stale():
            self.part = None
        if self.part is None:
            self._gathered_version, self._gathered_after = self.version, self.group.state.optimizer_steps.number
        if self.is_aliased:
            self.state = State.GATHERED
            return
        if self.layout.full_numel:
            self.allocate()
            if self.part is not None and self.groups.part is not None:
                self._gathering = all_gather(self.full, self.part, self.groups.part, tag=tag)
            else:
                shard = self.shard.data
                self._gathering = self.transport.all_gather(shard, self.full, tag=tag, copies_input=copies_shard)
            if copies_shard:
                self.wait_sent()
        self.state = State.GATHERING  # Only now: where there was no memory for it, it has not begun.

    def wait_gathered(self, limit_seconds: float | None = None) -> None:
        """Waits until the unsharded parameters can be read.

        Raises:
            TransferError: See `CollectiveWork.wait`.
            Exception: A message of this rank could not be made; it is sharded again.
        """
        assert self.state is not State.SHARDED, "waited for a gather that was not started"
        if self._gathering is not None:
            work, self._gathering = self._gathering, None
            work.wait(limit_seconds)
            deferred = self.transport.deferred
            if deferred.error is not None:
                if not deferred.is_ignored:
                    self.release()  # It has zeros in place of the failed part: the next gather starts again.
                deferred.check()
        self.part = None
        self.state = State.GATHERED
        self._unsharded_version = self.unsharded_params[0]._version

    @property
    def is_overwritten(self) -> bool:
        """Whether an unsharded parameter was written to in place since the gather: a release loses that."""
        return not self.is_aliased and self.unsharded_params[0]._version != self._unsharded_version

    def release(self, limit_seconds: float | None = None, *, keep_part: bool = False) -> None:
        """Frees the full buffer; the unsharded parameters stay views of it and can't be read until the next gather.

        `keep_part` keeps this rank's part of it, for a gather among the ranks of `ShardGroups.part`.

        Raises:
            TransferError: It was still being filled, and that has failed; see `CollectiveWork.wait`.
        """
        if self._gathering is not None:
            self.wait_gathered(limit_seconds)
        part_group = self.groups.part
        if keep_part and part_group is not None and self.state is State.GATHERED and not self.is_aliased:
            self.part = part_of(self.full, part_group).clone()
        elif not keep_part:
            self.part = None
        if not self.is_aliased:
            if self._is_pooled:
                buffer_pool.free(self.full)
            else:
                self.full.untyped_storage().resize_(0)
        self.state = State.SHARDED

    @property
    def gather_has_second_half(self) -> bool:
        """Whether its gather has a second half, which starts when it is waited for, in one order on all ranks."""
        return self.state is State.GATHERING and self.part is None and self.transport.traits.gathers_in_halves

    def wait_sent(self) -> None:
        """Waits until the shard may be written to: no gather reads it any more."""
        if self._host_copies is not None:
            self._host_copies.wait()

    def is_stale(self, *, by_writes_alone: bool = False) -> bool:
        """Whether an optimizer has stepped, or the shard was written to, since the full buffer was gathered.

        All ranks must find the same, or some would gather it again alone. So each step on shards of these ranks counts,
        whether or not it wrote to these tensors, unless `by_writes_alone`.
        """
        if self.state is State.SHARDED and self.part is None:
            return False
        stepped = self.group.state.optimizer_steps.number != self._gathered_after and self.trains
        return (stepped and not by_writes_alone) or self.version != self._gathered_version

    # The end of transfers under way.

    def discard(self) -> None:
        """After an error: cancels every transfer, and drops results since the last `commit`."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
            if self._host_copies is not None:
                self._host_copies.stream.join()  # A transfer that failed has not waited for the work before it there.
        self.reduction.cancel()
        self._unpublished = []
        self.gradient.rollback_pass()
        self.release()
        self.wait_sent()

    # Full tensors, for checkpoints and for people.

    def load(self, index: int, whole: Tensor) -> None:
        """Copies this rank's elements out of a full tensor, after transfers from the shard have ended."""
        self.wait_sent()
        super().load(index, whole)

    def gather_full_params(self, tag: int = UNTAGGED, limit_seconds: float | None = None) -> list[Tensor]:
        """Returns every full parameter, in its own dtype; they share one new buffer of W * S elements."""
        buffer = self._new_full(self.dtype)
        if buffer.numel() and not self.is_meta:
            self._plain_transport.all_gather(self.shard.data, buffer, tag=tag).wait(limit_seconds)
        return [view_of(buffer, entry) for entry in self.layout.entries]

    # Another shard in the place of this one.

    @on_local_tensors
    def set_storage(
        self,
        shard: Tensor,
        *,
        layout: FlatLayout | None = None,
        groups: ShardGroups | None = None,
        devices: DevicePolicy | None = None,
    ) -> None:
        """Replaces the shard: by one of another dtype, on another device, or of other elements.

        The full buffer is freed and gradients are dropped. The sharded parameters stay the same objects where torch can
        give them other memory; otherwise they are new ones. `shard` is [S] of the new layout and belongs to the buffer
        from now on; `layout` and `groups` are as before where they are None, `devices` that of the shard.
        """
        version, trainable = self.version, [self.sharded_param(i).requires_grad for i in range(len(self.names))]
        self.discard()
        self._plan(layout or self.layout, groups or self.groups, (devices or DevicePolicy()).resolved(shard.device))
        self._set_shard(shard)
        self._rebind_params(self.sharded_params)
        self._past_versions += version + 1 - self.version
        self._init_unsharded(trainable)
        invalidate_cache()

    def set_groups(self, groups: ShardGroups) -> None:
        """Takes other parts and nodes of the same ranks, between passes."""
        nodes, self.groups = self.groups.nodes, groups
        if groups.nodes != nodes:
            self._init_transports()
            self.reduction.transport = self.transport

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the shard and its metadata; nothing gathered, in flight or reduced."""
        layout, groups = self.layout, replace(self.groups, part=None, nodes=None)
        state = {"layout": layout, "groups": groups, "devices": self.devices, "shard": self.shard}
        return state | {name: getattr(self, name) for name in _KEPT}

    @on_local_tensors
    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in _KEPT:
            setattr(self, name, state.get(name))  # An earlier version knew fewer.
        self._past_versions = 0
        shard, devices = state["shard"], state["devices"]
        if shard.device != devices.shard:  # torch.load has mapped it elsewhere.
            devices = devices if devices.shard != devices.compute else DevicePolicy().resolved(shard.device)
            devices = replace(devices, shard=shard.device)
        self._plan(state["layout"], state["groups"], devices)
        self._set_shard(shard)
        trainable = [param.requires_grad for param in self.sharded_params]
        self._rebind_params(self.sharded_params)
        self._init_unsharded(trainable * len(self.names) if self.flatten else trainable)

    # The parts of these operations.

    def _plan(self, layout: FlatLayout, groups: ShardGroups, devices: DevicePolicy) -> None:
        super()._plan(layout, groups, devices)
        self._host_copies = HostToDeviceCopy(copy_stream(self.compute_device, "shards")) if self.moves else None

    @on_local_tensors
    def _init_unsharded(self, trainable: Sequence[bool]) -> None:
        """Makes the full buffer with its views, released, and the transfers between it and the shard."""
        self._init_transports()
        self.is_aliased = self.group.size == 1 and self.compute_dtype == self.dtype and not self.moves
        full = self.shard.data if self.is_aliased else self._new_full(self.compute_dtype)
        self.unsharded_params: list[nn.Parameter] = [
            UnshardedParameter(view_of(full, entry), requires_grad=False) for entry in self.layout.entries
        ]
        # Written to through `.data`, which counts no versions: a gather only brings back values that autograd has
        # saved.
        self.full = full.data
        if self.transport.all_gather_dtype is not None:
            # These parameters stay without memory: gradients come to them.
            full.untyped_storage().resize_(0)
            self.full = full = self._new_full(self.transport.all_gather_dtype)
        self._is_pooled = full.nbytes >= buffer_pool.SMALLEST_BYTES
        for index, (param, requires_grad) in enumerate(zip(self.unsharded_params, trainable, strict=True)):
            param.requires_grad_(requires_grad)
            if not self.flatten:
                copy_attributes(self.sharded_params[index], param)
        self.state = State.GATHERED
        self.part = None
        self._gathering = None
        self._unsharded_version = self.unsharded_params[0]._version
        self._init_gradients(self.unsharded_params)
        self.gradient.holds = self.gradient.holds and not self.is_aliased
        self._gathered_version, self._gathered_after = self.version, self.group.state.optimizer_steps.number
        self.rename(self.names, self._unit, self._flat_name, self._counted_over)
        self.release()
        if register_shard_owner(self):
            buffer_pool.trim_after(self)
        register_unsharded(self.unsharded_params, self)
        watch_optimizers()

    def _init_transports(self) -> None:
        plain: ShardTransport = PlainTransport(self.groups)
        policy, copies = self.transport_policy, self._host_copies
        transport = plain if policy is None else policy.transport(self.groups, self.spans)
        self.transport = transport if copies is None else HostStagedTransport(transport, copies)
        self._plain_transport = plain if copies is None else HostStagedTransport(plain, copies)
        self.has_post_all_gather = self.transport.all_gather_dtype is not None

    def _new_full(self, dtype: torch.dtype) -> Tensor:
        return buffer_pool.empty(self.layout.full_numel, dtype, self.compute_device)
