"""The shard that a rank keeps of a flat buffer, and the sharded parameters that an optimizer sees.

The shard is one tensor. `parameters()` yields views of it under the parameters' own names, each registered as a
`Shard`; or, with `flatten`, the shard itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.comm.group import Group
from scale_core.device.streams import has_streams
from scale_core.flat.layout import FlatLayout, alignment_of
from scale_core.hooks.autograd import mark_without_autograd_hooks
from scale_core.parameters import copy_attributes
from scale_core.shard import Axis, Placement, Shard, on_local_tensors, shard_of
from scale_core.sharded_tensor.tensor import set_shard


@dataclass(frozen=True)
class DtypePolicy:
    """The dtypes of one flat buffer; None is that of the parameters themselves.

    Attributes:
        compute: Of the gathered parameters and of their gradients.
        reduce: Of the gradients on their way from rank to rank.

    Examples:
        >>> import torch
        >>> from scale_core.flat.shard_storage import DtypePolicy
        >>> DtypePolicy(compute=torch.bfloat16, reduce=torch.float32)
        DtypePolicy(compute=torch.bfloat16, reduce=torch.float32)

    See also: [the core](../how-the-core-works.md).
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


def flat_alignment(dtype: torch.dtype, *, gathered_bytes: int | None = None) -> int:
    """Where parameters of `dtype` may start in their flat buffer: multiples of so many elements (`FlatLayout.plan`).

    The layout stays where floating-point numbers are gathered in two bytes, or converted by `model.half()`. Where they
    are gathered in fewer, it is that of `gathered_bytes` for each element.
    """
    if gathered_bytes is not None:
        return alignment_of(gathered_bytes)
    return alignment_of(min(dtype.itemsize, 2) if dtype.is_floating_point else dtype.itemsize)


@dataclass(frozen=True)
class DevicePolicy:
    """The devices of one flat buffer; None is that of the parameters themselves."""

    shard: torch.device | None = None  # The shard, and so the gradients and the state that an optimizer sees
    compute: torch.device | None = None  # The gathered parameters, and gradients until they are reduced
    reduced: torch.device | None = None  # Reduced gradients until the backward pass is over; None is that of the shard
    pin_memory: bool = True  # Of a shard on the host that goes to a GPU: its copies then overlap with the computation

    def resolved(self, here: torch.device) -> DevicePolicy:
        """The same with every device named; `here` is that of the parameters."""
        shard = self.shard or here
        return DevicePolicy(shard, self.compute or here, self.reduced or shard, self.pin_memory)


@dataclass(frozen=True)
class NodeGroups:
    """The ranks of a group by nodes of L neighbors each: place l in node n is rank n * L + l of N * L."""

    intra_node: Group  # The L ranks of this rank's node
    inter_node: Group  # The N ranks that have this rank's place l in their nodes


@dataclass(frozen=True)
class ShardGroups:
    """The ranks that share a flat buffer."""

    shard: Group = field(default_factory=Group)  # The W ranks between which it is cut
    # The ranks that hold the same shard, one for each copy of the model: hybrid sharding.
    replicas: Group = field(default_factory=Group)
    # Some of the ranks of `shard`, neighbors in it, between which `release(keep_part=True)` leaves the full buffer, so
    # that the next gather stays among them. Its size divides W.
    part: Group | None = None
    nodes: NodeGroups | None = None  # The ranks of `shard` by nodes, where messages between nodes are other ones


class FlatShard:
    """This rank's shard of parameters of one dtype."""

    sharded_params: list[nn.Parameter]
    _written: list[Tensor]
    _outer_shards: list[Shard | None]  # The shard, on other axes of the mesh, that each parameter already is.

    def __init__(self, names: Sequence[str], dtypes: DtypePolicy, flatten: bool) -> None:
        self.dtypes, self.flatten = dtypes, flatten
        self.names, self._unit, self._flat_name = list(names), "", "flat_param"
        self._counted_over: Group | None = None
        self._past_versions = 0  # Added to `version`, so that it grows over all earlier shards.

    # Properties.

    @on_local_tensors
    def rename(
        self,
        names: Sequence[str],
        unit: str = "",
        flat_name: str = "flat_param",
        counted_over: Group | None = None,
    ) -> None:
        """Registers each sharded parameter as a `Shard` under these qualified names."""
        self.names[:] = names  # The same list, by which errors about gradients name them, too.
        self._unit, self._flat_name, self._counted_over = unit, flat_name, counted_over
        mark_without_autograd_hooks(self.sharded_params)
        axes: tuple[Axis, ...] = (Axis(self.group, Placement.SHARD),)
        if self.groups.replicas.size > 1:
            axes += (Axis(self.groups.replicas, Placement.REPLICATE),)
        if self.flatten:
            divided = [name for name, within in zip(names, self._outer_shards, strict=True) if within is not None]
            if divided:
                raise ValueError(
                    f"'{divided[0]}' is divided between ranks by its layer, and one flat parameter can't say of which "
                    "tensors it holds shards: leave flatten_parameters out"
                )
            start = self.group.rank * self.layout.shard_numel
            stop = start + self.layout.shard_numel
            shard = Shard(flat_name, (self.layout.full_numel,), start, stop, axes, unit, counted_over=counted_over)
            set_shard(self.sharded_params[0], shard)
            return
        pieces = zip(names, self.layout.entries, self.spans, self.sharded_params, self._outer_shards, strict=True)
        for name, entry, span, param, within in pieces:
            if within is None:
                shape, span_range = entry.shape, (span.start, span.stop)
                set_shard(param, Shard(name, shape, *span_range, axes, unit, counted_over=counted_over))
            else:
                set_shard(param, within.cut(name, span.start, span.stop, axes, unit))

    @property
    def holds_pieces(self) -> bool:
        """Whether each parameter is a piece of one that its layer has divided along another axis."""
        return all(shard is not None for shard in self._outer_shards)

    def sharded_param(self, index: int) -> nn.Parameter:
        """The sharded parameter that holds parameter `index`: its own, or the one flat parameter."""
        return self.sharded_params[0 if self.flatten else index]

    @property
    def keeps_reduced(self) -> bool:
        """Whether reduced gradients are kept on the device where they will be used."""
        return self.devices.reduced == self.devices.shard

    @property
    def is_meta(self) -> bool:
        """Whether the shard has no values yet, as in a model on the meta device."""
        return self.shard.is_meta

    def load(self, index: int, whole: Tensor) -> None:
        """Copies this rank's elements out of a full tensor of the parameter's full shape; ignores one on meta."""
        if whole.is_meta:
            return
        span, piece = self.spans[index], self.pieces[index]
        with torch.no_grad():
            piece.copy_(whole.detach().reshape(-1)[span.start : span.stop].view(span.shape))

    # How it is made.

    def _plan(self, layout: FlatLayout, groups: ShardGroups, devices: DevicePolicy) -> None:
        """Sets the layout, the groups and the devices."""
        assert devices.shard is not None and devices.compute is not None
        self.layout, self.groups, self.devices = layout, groups, devices
        self.group = groups.shard  # The W ranks between which they are cut
        self.compute_device = devices.compute
        self.moves = devices.shard != devices.compute  # The shard is copied to another device to be computed with.
        self.spans = layout.spans(self.group.rank)

    def _set_shard(self, shard: Tensor) -> None:
        """Sets the shard, its views, and the dtypes that follow from its dtype."""
        assert shard.shape == (self.layout.shard_numel,), "a shard has as many elements as the layout says"
        # [S] in the parameters' own dtype: this rank's elements of all of them.
        self.shard = shard.pin_memory() if self._pins and not shard.is_pinned() else shard
        self.dtype = shard.dtype
        self.compute_dtype = self.dtypes.compute or self.dtype
        self.reduce_dtype = self.dtypes.reduce or self.compute_dtype
        # Empty ones, too, are views, so that a write to a parameter counts in the shard's version on every rank.
        # Per parameter, the view of `shard` that belongs to it, in its local shape.
        self.pieces = [self.shard.narrow(0, span.shard_offset, span.numel).view(span.shape) for span in self.spans]

    @on_local_tensors
    def _make_sharded_params(self, params: Sequence[Tensor]) -> list[nn.Parameter]:
        shards = [shard_of(param) for param in params]
        self._outer_shards = [shard if shard is not None and not shard.gathered else None for shard in shards]
        if self.flatten:
            return [nn.Parameter(self.shard, requires_grad=any(param.requires_grad for param in params))]
        sharded = []
        for piece, param in zip(self.pieces, params, strict=True):
            sharded.append(nn.Parameter(piece, requires_grad=param.requires_grad))
            copy_attributes(param, sharded[-1])
        return sharded

    @on_local_tensors
    def _rebind_params(self, sharded: Sequence[nn.Parameter]) -> None:
        """Makes existing sharded parameters views of the shard; new objects where torch can't do that."""
        self.sharded_params = []
        for param, memory in zip(sharded, [self.shard] if self.flatten else self.pieces, strict=True):
            if compat.can_set_data(param, memory):
                param.grad = None
                param.data = memory
                self.sharded_params.append(param)
            else:
                self.sharded_params.append(nn.Parameter(memory, requires_grad=param.requires_grad))
                copy_attributes(param, self.sharded_params[-1])
        # They keep version counters of their own, where those that are made from the shard share that of the shard.
        self._written = [self.shard, *self.sharded_params]

    def _new_shard(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.devices.shard, pin_memory=self._pins)

    @property
    def _pins(self) -> bool:
        """Whether the shard is pinned, so that its copies overlap with the computation."""
        return self.moves and has_streams(self.compute_device) and self.devices.pin_memory
