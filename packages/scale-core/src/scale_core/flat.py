"""Storage and views over a layout: the one mechanism behind every kind of sharding here.

Parameters of one dtype stand in one flat buffer. Each rank keeps its shard of it; the whole buffer exists only
between a gather and a release, and the parameters that a module computes with are *views* of it. A collective
therefore reads and writes the very memory that the module uses: nothing is split, concatenated or copied per
parameter on the way in. Three verbs move it through its life: gather, release, reduce. ZeRO-1, -2 and -3 differ only
in when they call them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scale_core.backward import local_grads_wanted, report_local_grads
from scale_core.collectives import Pending, all_gather, reduce_scatter
from scale_core.group import Group
from scale_core.layout import FlatLayout
from scale_core.shard import Axis, Held, Shard, mark
from scale_core.stepping import refuse_steps, watch_optimizers


class State(enum.Enum):
    """Which memory a flat buffer takes, beside the shard of S elements that is always there."""

    SHARDED = "nothing else: the full buffer has no memory"
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


# From this size on, gradients wait outside of the flat one until the backward is over: they are far too large to be
# packed while they are in a processor's cache, which is what smaller ones gain by being packed at once.
_HELD_FROM_BYTES = 256 * 2**20

_live: weakref.WeakSet[FlatBuffer] = weakref.WeakSet()


def live_buffers() -> Iterator[tuple[str, Tensor]]:
    """Yields every flat tensor that exists now: "shard" [S], "gathered" [W * S], "gradient" [W * S]."""
    for buffer in _live:
        yield "shard", buffer.shard
        if buffer.state is not State.SHARDED and not buffer.is_aliased:
            yield "gathered", buffer.full
        if buffer.gradient is not None:
            yield "gradient", buffer.gradient


class FlatBuffer:
    """Parameters of one dtype, sharded over a group.

    Args:
        names: The parameters' names, for errors and for `shard_of`.
        params: The whole parameters, equal on all ranks, of one dtype and device. They are copied, not kept.
        layout: Where each of them stands; planned for the group's size.
        group: The ranks that share them.
        dtypes: In which dtypes they are computed with and reduced.
        flatten: Expose one flat parameter [S] in place of one local shard per parameter.

    Attributes:
        shard: [S] in the parameters' own dtype: this rank's elements of all of them.
        pieces: Per parameter, the view of `shard` that belongs to it, in its local shape.
        exposed: What an optimizer gets: the pieces as parameters, or the one flat parameter.
        wholes: What the module computes with: per parameter, a view of the full buffer in the full shape.
        state: Whether the wholes can be read.
        holds: Whether `hold` lets gradients stand alone; only large buffers do.
        gradient: [W * S], this rank's own gradients of the wholes, before they are reduced; None while there are none.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        layout: FlatLayout,
        group: Group,
        dtypes: Dtypes = Dtypes(),
        flatten: bool = False,
    ) -> None:
        self.layout, self.group = layout, group
        self.dtype = params[0].dtype
        self.compute_dtype = dtypes.compute or self.dtype
        self.reduce_dtype = dtypes.reduce or self.compute_dtype
        self.flatten = flatten
        self.spans = layout.spans(group.rank)
        self.shard = torch.zeros(layout.shard_numel, dtype=self.dtype, device=params[0].device)
        # Empty ones, too, are views, so that a write to a parameter counts in the shard's version on every rank alike.
        self.pieces = [self.shard.narrow(0, span.shard_offset, span.numel).view(span.shape) for span in self.spans]
        for index, param in enumerate(params):
            self.load(index, param)
        trainable = [param.requires_grad for param in params]
        self.exposed = self._expose(trainable)
        self.is_aliased = group.size == 1 and self.compute_dtype == self.dtype
        full = self.shard.data if self.is_aliased else self.shard.new_empty(layout.full_numel, dtype=self.compute_dtype)
        self.wholes = [nn.Parameter(view, requires_grad=False) for view in self._views(full)]
        # Written to through `.data`, which counts no versions: a gather only brings back what autograd has saved.
        self.full = full.data
        for whole, wanted in zip(self.wholes, trainable, strict=True):
            whole.requires_grad_(wanted)
        self.state = State.GATHERED
        self.gradient: Tensor | None = None
        self._has_gradient = [False] * len(params)
        gradient_bytes = layout.full_numel * self.reduce_dtype.itemsize
        self.holds = gradient_bytes >= _HELD_FROM_BYTES and not self.is_aliased
        self._held: dict[int, Tensor] = {}
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._shard_version = self.shard._version
        self.rename(names)
        self.release()
        _live.add(self)
        refuse_steps(self)
        watch_optimizers()

    # What it is.

    def rename(self, names: Sequence[str], unit: str = "", flat_name: str = "flat_param") -> None:
        """Records what each exposed parameter is a piece of, under these qualified names.

        Args:
            names: Of each parameter.
            unit: Of the unit that gathers them.
            flat_name: Of the one flat parameter, where they are exposed as that.
        """
        self.names = list(names)
        axes = (Axis(self.group, Held.SHARD),)
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
        if self.has_gradient and not self.trains:
            self.drop_gradient()  # Of what is frozen now; it must not come back when it is unfrozen.

    def exposed_of(self, index: int) -> nn.Parameter:
        """What an optimizer has of a parameter: its own piece, or the one flat parameter that holds it."""
        return self.exposed[0 if self.flatten else index]

    @property
    def trains(self) -> bool:
        """Whether any of the parameters wants a gradient."""
        return any(param.requires_grad for param in self.exposed)

    # Gather and release.

    def gather(self, tag: int = 0) -> None:
        """Starts to fill the full buffer with every rank's shard; does nothing where it is filled or on its way."""
        if self.state is not State.SHARDED:
            return
        self._shard_version = self.shard._version
        if self.is_aliased:
            self.state = State.GATHERED
            return
        self.state = State.GATHERING
        if not self.layout.full_numel:
            return
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        source = self.shard.data
        if self.compute_dtype != self.dtype:
            size = self.layout.shard_numel
            source = self.full.narrow(0, self.group.rank * size, size).copy_(source)
        self._gathering = all_gather(self.full, source, self.group, tag=tag)

    def wait_gathered(self, limit_seconds: float | None = None) -> None:
        """Returns when the wholes can be read.

        Raises:
            TransferError: See `Pending.wait`.
        """
        assert self.state is not State.SHARDED, "waited for a gather that nobody started"
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            pending.wait(limit_seconds)
        self.state = State.GATHERED

    def release(self, limit_seconds: float | None = None) -> None:
        """Frees the full buffer; the wholes keep their places in it and can't be read until the next gather.

        Raises:
            TransferError: It was still being filled, and that has failed; see `Pending.wait`.
        """
        if self._gathering is not None:
            self.wait_gathered(limit_seconds)
        if not self.is_aliased:
            self.full.untyped_storage().resize_(0)
        self.state = State.SHARDED

    def is_stale(self) -> bool:
        """Whether the shard was written to, as by an optimizer, since it was gathered."""
        return self.state is not State.SHARDED and self.shard._version != self._shard_version

    # Gradients.

    def hold(self, index: int, *, accumulate: bool = False) -> None:
        """Takes the gradient of a whole, and lets it stand alone until the next `pack` or `reduce`.

        So the flat gradient takes its W * S elements after the backward, when the full buffer and what the backward
        computes with are free, not beside them. In a small buffer the gradient is packed at once.

        Args:
            index: Which parameter.
            accumulate: As in `pack`.

        Raises:
            RuntimeError: As in `pack`.
        """
        grad = self._take(index)
        if grad is None:
            return
        if not self.holds or self.gradient is not None or index in self._held:
            self.pack(accumulate=accumulate)
            self._pack(index, grad, accumulate)
        else:
            self._held[index] = grad

    def pack(self, index: int | None = None, *, accumulate: bool = False) -> None:
        """Moves gradients into the flat gradient, where each adds to one that is there already.

        Args:
            index: Which parameter's, and all that are held; None is only those.
            accumulate: More backward passes will follow before the reduction: sum them in a dtype that is wide enough.

        Raises:
            RuntimeError: The gradient has a gradient of its own (`create_graph=True`).
        """
        while self._held:  # Each is free as soon as it is copied.
            self._pack(*self._held.popitem(), accumulate)
        grad = None if index is None else self._take(index)
        if index is not None and grad is not None:
            self._pack(index, grad, accumulate)

    def _take(self, index: int) -> Tensor | None:
        whole = self.wholes[index]
        grad, whole.grad = whole.grad, None
        if grad is None:
            return None
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of '{self.names[index]}' has a gradient of its own, which can't follow it into a shard: "
                "call backward() without create_graph=True, or compute the penalty from outputs and inputs instead"
            )
        return grad if grad.layout is torch.strided else grad.to_dense()

    def _pack(self, index: int, grad: Tensor, accumulate: bool) -> None:
        if self.gradient is None:
            dtype = torch.promote_types(self.reduce_dtype, self.dtype) if accumulate else self.reduce_dtype
            fills_it = len(self.wholes) == 1 and grad.numel() == self.layout.full_numel
            if fills_it and grad.dtype == dtype and grad.is_contiguous():
                self.gradient = grad.view(-1)  # It is laid out as the buffer is: taken over, not copied.
                self._has_gradient[index] = True
                return
            self.gradient = torch.empty(self.layout.full_numel, dtype=dtype, device=grad.device)
        target = self._view(self.gradient, index)
        if self._has_gradient[index]:
            target.add_(grad)
        else:
            target.copy_(grad)
            self._has_gradient[index] = True

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return self.gradient is not None or bool(self._held)

    def unused(self) -> list[int]:
        """The trainable parameters that have got no gradient since the last reduction."""
        got = [has or index in self._held for index, has in enumerate(self._has_gradient)]
        return [index for index, whole in enumerate(self.wholes) if whole.requires_grad and not got[index]]

    def reduce(self, tag: int = 0) -> None:
        """Starts to average the flat gradient over the ranks, in `reduce_dtype`; what has none counts as zeros."""
        assert self._reducing is None, "a reduction is under way already"
        self.pack()
        gradient = self.gradient
        if gradient is None:
            gradient = torch.zeros(self.layout.full_numel, dtype=self.reduce_dtype, device=self.shard.device)
        elif not all(self._has_gradient) or self.layout.padding:
            self._fill_gaps(gradient)
        if local_grads_wanted() and self.flatten:
            report_local_grads(self.exposed, [gradient])
        elif local_grads_wanted():
            used = [i for i, has in enumerate(self._has_gradient) if has]
            report_local_grads([self.exposed[i] for i in used], [self._view(gradient, i) for i in used])
        self.gradient, self._has_gradient = None, [False] * len(self.wholes)
        self._reducing = reduce_scatter(gradient.to(self.reduce_dtype), self.group, dtype=self.dtype, tag=tag)

    def settle(self, limit_seconds: float | None = None) -> None:
        """Waits for the reduction, if there is one, and adds its result to the exposed parameters' gradients."""
        if self._reducing is None:
            return
        pending, self._reducing = self._reducing, None
        reduced = pending.wait(limit_seconds)
        if self.flatten:
            _add_to_grad(self.exposed[0], reduced)
            return
        for param, span in zip(self.exposed, self.spans, strict=True):
            if param.requires_grad:
                _add_to_grad(param, reduced.narrow(0, span.shard_offset, span.numel).view(span.shape))

    def drop_gradient(self) -> None:
        """Forgets the gradients that were not reduced yet."""
        self.gradient, self._has_gradient, self._held = None, [False] * len(self.wholes), {}
        for whole in self.wholes:
            whole.grad = None

    def discard(self) -> None:
        """After an error: gives up every transfer and what was gathered; gradients not reduced yet stay."""
        for pending in (self._gathering, self._reducing):
            if pending is not None:
                pending.abandon()
        self._gathering = self._reducing = None
        self.release()

    # Whole tensors, for checkpoints and for people.

    def load(self, index: int, whole: Tensor) -> None:
        """Takes this rank's piece out of a whole tensor of the parameter's full shape."""
        span, piece = self.spans[index], self.pieces[index]
        with torch.no_grad():
            piece.copy_(whole.detach().reshape(-1)[span.start : span.stop].view(span.shape))

    def gather_whole(self, tag: int = 0, limit_seconds: float | None = None) -> list[Tensor]:
        """Returns every parameter whole, in its own dtype; they share one new buffer of W * S elements."""
        buffer = torch.empty(self.layout.full_numel, dtype=self.dtype, device=self.shard.device)
        if buffer.numel():
            all_gather(buffer, self.shard.data, self.group, tag=tag).wait(limit_seconds)
        return self._views(buffer)

    def _expose(self, trainable: Sequence[bool]) -> list[nn.Parameter]:
        if self.flatten:
            return [nn.Parameter(self.shard, requires_grad=any(trainable))]
        return [nn.Parameter(piece, requires_grad=wanted) for piece, wanted in zip(self.pieces, trainable, strict=True)]

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [self._view(buffer, index) for index in range(len(self.layout.entries))]

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        entry = self.layout.entries[index]
        return buffer.narrow(0, entry.offset, entry.numel).view(entry.shape)

    def _fill_gaps(self, gradient: Tensor) -> None:
        """Zeroes what holds no gradient: padding, and parameters that were not used."""
        place = 0
        filled = zip(self.layout.entries, self._has_gradient, strict=True)
        for entry in sorted((e for e, has in filled if has and e.numel), key=lambda e: e.offset):
            gradient[place : entry.offset].zero_()
            place = entry.offset + entry.numel
        gradient[place:].zero_()


def _add_to_grad(param: nn.Parameter, grad: Tensor) -> None:
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
