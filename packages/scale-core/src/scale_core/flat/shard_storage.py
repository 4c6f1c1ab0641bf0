"""What one rank keeps of the parameters in a flat buffer: its shard, and what an optimizer sees of it.

The shard is one tensor. What `parameters()` yields are views of it, under the parameters' own names, each marked with
what it is a piece of; or, where they are to be flat, the shard itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.autograd_hooks import mark_reported
from scale_core.comm.group import Group
from scale_core.flat.layout import FlatLayout
from scale_core.shard import Axis, Held, Shard, mark, shard_of
from scale_core.streams import Event, Stream, copy_into


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

    def resolved(self, here: torch.device) -> Devices:
        """The same with every device named, given that of the parameters."""
        shard = self.shard or here
        return Devices(shard, self.compute or here, self.reduced or shard)


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


def give_attributes(param: Tensor, other: Tensor) -> None:
    """Has `other` carry the attributes that users gave to the parameter whose place it takes.

    Such as `param._no_weight_decay = True`, by which parameter groups are made.
    """
    for name, value in vars(param).items():
        vars(other).setdefault(name, value)  # What there is belongs to it, as a fake tensor's own device.


class FlatShard:
    """This rank's shard of parameters of one dtype.

    Args:
        names: The parameters' names.
        dtypes: In which dtypes they are computed with and reduced.
        flatten: Expose one flat parameter [S] in place of one local shard per parameter.

    Attributes:
        group: The W ranks between which they are cut.
        shard: [S] in the parameters' own dtype: this rank's elements of all of them.
        pieces: Per parameter, the view of `shard` that belongs to it, in its local shape.
        exposed: What an optimizer gets: the pieces as parameters, or the one flat parameter.
    """

    exposed: list[nn.Parameter]
    _written: list[Tensor]
    _within: list[Shard | None]  # What each parameter is a piece of already, on other axes of the mesh.

    def __init__(self, names: Sequence[str], dtypes: Dtypes, flatten: bool) -> None:
        self.dtypes, self.flatten = dtypes, flatten
        self.names, self._unit, self._flat_name = list(names), "", "flat_param"
        self._counted_over: Group | None = None
        self._past = 0  # What makes `version` grow over all the shards that there were.

    # What it is.

    def rename(
        self,
        names: Sequence[str],
        unit: str = "",
        flat_name: str = "flat_param",
        counted_over: Group | None = None,
    ) -> None:
        """Records what each exposed parameter is a piece of, under these qualified names.

        Args:
            names: Of each parameter.
            unit: Of the unit that gathers them.
            flat_name: Of the one flat parameter, where they are exposed as that.
            counted_over: As in `Shard`.
        """
        self.names[:] = names  # The same list, by which errors about gradients name them, too.
        self._unit, self._flat_name, self._counted_over = unit, flat_name, counted_over
        mark_reported(self.exposed)
        axes: tuple[Axis, ...] = (Axis(self.group, Held.SHARD),)
        if self.groups.replicas.size > 1:
            axes += (Axis(self.groups.replicas, Held.REPLICATE),)
        if self.flatten:
            divided = [name for name, within in zip(names, self._within, strict=True) if within is not None]
            if divided:
                raise ValueError(
                    f"'{divided[0]}' is divided between ranks by its layer, and one flat parameter can't say of which "
                    "tensors it holds parts: leave flatten_parameters out"
                )
            start = self.group.rank * self.layout.shard_numel
            stop = start + self.layout.shard_numel
            shard = Shard(flat_name, (self.layout.full_numel,), start, stop, axes, unit, counted_over=counted_over)
            mark(self.exposed[0], shard)
            return
        pieces = zip(names, self.layout.entries, self.spans, self.exposed, self._within, strict=True)
        for name, entry, span, param, within in pieces:
            if within is None:
                shape, place = entry.shape, (span.start, span.stop)
                mark(param, Shard(name, shape, *place, axes, unit, counted_over=counted_over))
            else:
                mark(param, within.cut(name, span.start, span.stop, axes, unit))

    def exposed_of(self, index: int) -> nn.Parameter:
        """What an optimizer has of a parameter: its own piece, or the one flat parameter that holds it."""
        return self.exposed[0 if self.flatten else index]

    @property
    def trains(self) -> bool:
        """Whether any of the parameters wants a gradient."""
        return any(param.requires_grad for param in self.exposed)

    @property
    def travels_on(self) -> bool:
        """Whether gradients that were reduced have a way to go still: to the replicas, or to another device."""
        return self.groups.replicas.size > 1 or self.devices.reduced != self.compute_device

    @property
    def keeps_reduced(self) -> bool:
        """Whether reduced gradients wait where they will be used, and not on another device until they are."""
        return self.devices.reduced == self.devices.shard

    @property
    def is_meta(self) -> bool:
        """Whether the shard has no values yet, as that of a model that is built on the meta device."""
        return self.shard.is_meta

    @property
    def version(self) -> int:
        """Grows whenever the shard is written to, directly or through an exposed parameter, and when it is replaced."""
        return self._past + sum(tensor._version for tensor in self._written)

    def load(self, index: int, whole: Tensor) -> None:
        """Takes this rank's piece out of a whole tensor of the parameter's full shape; of one on meta, nothing."""
        if whole.is_meta:
            return
        span, piece = self.spans[index], self.pieces[index]
        with torch.no_grad():
            piece.copy_(whole.detach().reshape(-1)[span.start : span.stop].view(span.shape))

    # How it is made.

    def _plan(self, layout: FlatLayout, groups: Groups, devices: Devices) -> None:
        """Who shares what, and where."""
        assert devices.shard is not None and devices.compute is not None
        self.layout, self.groups, self.devices = layout, groups, devices
        self.group = groups.shard
        self.compute_device = devices.compute
        self._moves = devices.shard != devices.compute
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

    def _expose(self, params: Sequence[Tensor]) -> list[nn.Parameter]:
        known = [shard_of(param) for param in params]
        self._within = [shard if shard is not None and not shard.gathered else None for shard in known]
        if self.flatten:
            return [nn.Parameter(self.shard, requires_grad=any(param.requires_grad for param in params))]
        exposed = []
        for piece, param in zip(self.pieces, params, strict=True):
            exposed.append(nn.Parameter(piece, requires_grad=param.requires_grad))
            give_attributes(param, exposed[-1])
        return exposed

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
                give_attributes(param, self.exposed[-1])
        # They keep version counters of their own, where those that are made from the shard share that of the shard.
        self._written = [self.shard, *self.exposed]

    def _new_shard(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.devices.shard, pin_memory=self._pins)

    @property
    def _pins(self) -> bool:
        """Whether the host's side of a copy is pinned, so that the copy runs beside the computation."""
        return self._moves and self.compute_device.type == "cuda"

    def _by_exposed(self, gradient: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """What each exposed parameter has of a reduced gradient [S]."""
        if self.flatten:
            yield self.exposed[0], gradient
            return
        for param, span in zip(self.exposed, self.spans, strict=True):
            yield param, gradient.narrow(0, span.shard_offset, span.numel).view(span.shape)


# The way of a shard that stands on the host to the device that computes with it.
#
# The copy runs beside the computation, on a stream of its own, and beside the host: when it has been started, the host
# goes on. So there is a moment at which the shard may be written to again, and not before.
#
# Where the device computes in another dtype, the shard is cast there, piece by piece. The host would be busy with that:
# one of its cores casts some 1.7 billion elements per second, and as many fp32 elements take a seventh of that time to
# cross a link of 50 GB/s, twice the bytes of bf16. A copy in the other dtype that is kept on the host would cost 2
# bytes per parameter, and a whole one on the device 4 for each of a unit's elements.

PIECE_ELEMENTS = 1 << 24
"""How many elements are cast at once: 64 MiB of fp32 stand on the device beside the parameters."""


class Sending:
    """Copies of one shard to the device, on a stream.

    Args:
        stream: Of the device; on it stands all that follows a copy as well.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._sent: Event | None = None

    def start(self, shard: Tensor, target: Tensor) -> None:
        """Starts to copy; to be called inside of `stream.run()`.

        Args:
            shard: [S] on the host, pinned where the device is a CUDA device.
            target: [S] on the device, of any dtype.
        """
        if shard.dtype == target.dtype:
            copy_into(target, shard)
        elif shard.numel():
            size = min(PIECE_ELEMENTS, shard.numel())
            room = torch.empty(size, dtype=shard.dtype, device=target.device)
            for source, place in zip(shard.split(size), target.split(size), strict=True):
                piece = room[: source.numel()]
                copy_into(piece, source)
                place.copy_(piece)
        self._sent = self._stream.record()

    def wait(self) -> None:
        """Returns when the shard may be written to: all copies of it have ended."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None
