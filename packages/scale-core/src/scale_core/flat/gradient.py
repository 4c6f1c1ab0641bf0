"""The gradients of one flat buffer, from autograd (`FlatGradient`) through their reduce-scatter (`Reduction`).

A rank's own gradients are in one flat tensor of W * S elements, as the collective wants them. It exists only while
there are gradients, and each one is copied into it when it is complete, while it is in the processor's cache. The
gradients of the current pass are kept apart from the sum of earlier passes (`no_sync`) until it has succeeded: a failed
pass could not be subtracted again.

The gradient of one parameter in the current pass (`GradState`):

    NONE --- accumulate, of a large buffer ---> HELD
     |                                           |
     | accumulate                                | pack, take, or a second gradient
     v                                           |
    PACKED <-------------------------------------+
     |
     | a second gradient in this pass, on top of one of earlier passes
     v
    PACKED_WITH_SUM

`take` hands all of them to the reduction, `commit_pass` adds them to the sum, and `rollback_pass` drops them: then
each is NONE. The sum of earlier passes (`SumState`):

    NONE --- commit_pass ---> WAITING --- take, which adds it ---> TAKEN --- commit_pass ---> NONE
                                 ^                                   |
                                 +---------- rollback_pass ----------+
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import UNTAGGED, all_reduce, reduce_scatter
from scale_core.comm.work import CollectiveWork
from scale_core.device import buffer_pool
from scale_core.device.streams import Stream, StreamEvent, copy_to
from scale_core.flat.config import ShardGroups
from scale_core.flat.layout import LayoutEntry
from scale_core.flat.transport import ReduceScatter, ReduceWork, TransportTraits
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad, unreduced_grad

# From this size on, gradients wait outside of the flat one until the backward is over: they are far too large to be
# packed while they are in a processor's cache, so smaller ones are packed at once.
_HELD_FROM_BYTES = 256 * 2**20


class GradState(enum.Enum):
    """Where the gradient of one parameter is that came in the current pass, and the memory that it takes."""

    NONE = "there is none, or it was taken"
    HELD = "in the tensor that autograd has made, of the parameter's size: the flat gradient has no memory yet"
    PACKED = "in the flat gradient of W * S elements"
    PACKED_WITH_SUM = "in the flat gradient, and the accumulated sum of this parameter was added to it there"


class SumState(enum.Enum):
    """Whether the next `take` adds the sum of earlier passes, W * S elements."""

    NONE = "there is none"
    WAITING = "it is added"
    TAKEN = "it is being reduced, or the pass has failed here: not added, but kept until the pass has succeeded"


_IN_FLAT = (GradState.PACKED, GradState.PACKED_WITH_SUM)


class FlatGradient:
    """The local gradients of the unsharded parameters of one flat buffer."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        entries: Sequence[LayoutEntry],
        full_numel: int,
        dtype: torch.dtype,
        wide_dtype: torch.dtype,
    ) -> None:
        self.flat: Tensor | None = None  # [W * S], the gradients of the current pass; None while none is packed
        self.accumulated: Tensor | None = None  # [W * S], the sum of earlier passes, which the next `take` adds.
        # Whether `accumulate` keeps gradients apart, as large buffers do.
        self.holds = full_numel * dtype.itemsize >= _HELD_FROM_BYTES
        self.names: Sequence[str] = ()  # The parameters' names, for errors
        self.wide = False  # Whether `make_hook`'s hooks accumulate in the wider dtype, as in a pass that is not reduced
        self.observer: Callable[[int], object] | None = None  # Called by them before a parameter's gradient is moved
        self._params, self._entries, self._full_numel = params, entries, full_numel
        self._has_padding = full_numel > sum(entry.numel for entry in entries)
        self._dtype, self._wide_dtype = dtype, wide_dtype
        self._states = [GradState.NONE] * len(params)
        self._held_grads: dict[int, Tensor] = {}  # By index, of those in the state HELD
        self._sum_state = SumState.NONE
        self._summed_params: set[int] = set()  # Those that the accumulated sum has a gradient of

    def __bool__(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return self._sum_state is SumState.WAITING or self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether the current pass has brought a gradient."""
        return self.flat is not None or bool(self._held_grads)

    def make_hook(self, index: int, before_first: Callable[[], None]) -> Callable[[Tensor], None]:
        """Returns a post-accumulate-grad hook; `before_first` is called before the first gradient of a pass."""
        self_ref = weakref.ref(self)  # Autograd's hooks are invisible to the garbage collector.

        def hook(_: Tensor) -> None:
            gradient = self_ref()
            assert gradient is not None, "a gradient has come whose buffer is gone"
            if gradient.flat is None and not gradient._held_grads:
                before_first()
            if not gradient._params[index].requires_grad:  # Frozen since the forward; torch calls hooks all the same.
                set_unreduced_grad(gradient._params[index], None)
                return
            if gradient.observer is not None:
                gradient.observer(index)
            gradient.accumulate(index, wide=gradient.wide)

        return hook

    def accumulate(self, index: int, *, wide: bool = False) -> None:
        """Moves the gradient of parameter `index` from `.grad` into the flat gradient, or adds it there."""
        # In a large buffer it stays apart until the next `pack` or `take`: the flat gradient then takes its W * S
        # elements after the backward, when the full buffer and the activations are free.
        param = self._params[index]
        grad = unreduced_grad(param)
        if grad is None:
            return
        set_unreduced_grad(param, None)
        if grad.requires_grad or grad.layout is not torch.strided:
            grad = self._dense(index, grad)
        elif grad.untyped_storage()._cdata == param.untyped_storage()._cdata:
            grad = grad.clone()  # A custom backward has returned the weight: the full buffer may be released first.
        if self.holds and self.flat is None and self._states[index] is not GradState.HELD:
            self._held_grads[index], self._states[index] = grad, GradState.HELD
            return
        if self._held_grads:
            self.pack(wide=wide)
        if self.flat is None or self.accumulated is not None:
            self._pack(index, grad, wide)
            return
        entry = self._entries[index]
        target = self.flat.narrow(0, entry.offset, entry.numel).view(entry.shape)
        if self._states[index] is GradState.NONE:
            target.copy_(grad)
            self._states[index] = GradState.PACKED
        else:
            target.add_(grad)

    def pack(self, *, wide: bool = False) -> None:
        """Moves gradients that were kept apart into the flat one; `wide` as in `accumulate`."""
        while self._held_grads:  # Each is free as soon as it is copied.
            self._pack(*self._held_grads.popitem(), wide)

    def has_grad(self) -> list[int]:
        """The parameters that got a gradient since the last `take`."""
        accumulated = self._summed_params if self._sum_state is SumState.WAITING else ()
        states = enumerate(self._states)
        return [index for index, state in states if state is not GradState.NONE or index in accumulated]

    def missing(self) -> list[int]:
        """The trainable parameters that got none since the last `take`."""
        with_grad = set(self.has_grad())
        return [index for index, param in enumerate(self._params) if param.requires_grad and index not in with_grad]

    def frozen(self) -> list[int]:
        """The parameters that were frozen after they got an accumulated gradient; plain torch keeps it in `.grad`."""
        return [index for index in sorted(self._summed_params) if not self._params[index].requires_grad]

    def pass_gradient(self) -> tuple[list[int], Tensor | None]:
        """The parameters with gradients of the current pass, and these [W * S], without the sum of earlier passes."""
        self.pack()
        if self.flat is not None:
            self._fill_gaps(self.flat)
        return self._packed(), self.flat

    def take(self, device: torch.device) -> Tensor:
        """Returns the flat gradient [W * S] with the accumulated sum, and drops it; unused parameters are zero."""
        # The accumulated sum is kept until `commit_pass`: the pass may fail.
        self.pack()
        flat = self.flat
        if self._sum_state is SumState.WAITING:
            flat = self._add_accumulated(flat)
            self._sum_state = SumState.TAKEN
        if flat is None:
            flat = torch.zeros(self._full_numel, dtype=self._dtype, device=device)
        else:
            self._fill_gaps(flat)
        self._forget_pass()
        return flat

    def commit_pass(self) -> None:
        """Adds the gradients of a pass that has succeeded to the accumulated sum, or drops a sum that was reduced."""
        if self._sum_state is SumState.TAKEN:
            self._drop_accumulated()
        self.pack(wide=True)
        flat, packed, states = self.flat, self._packed(), self._states
        self._forget_pass()
        if flat is None:
            return
        if self.accumulated is None:
            self._set_accumulated(flat.to(self._wide_dtype), packed)
            return
        for index in packed:
            adds = index in self._summed_params and states[index] is GradState.PACKED
            _add(self._view(self.accumulated, index), self._view(flat, index), adds)
        self._summed_params.update(packed)

    def rollback_pass(self) -> None:
        """Drops the gradients of a pass that has failed; the accumulated sum stays."""
        self._forget_pass()
        self._sum_state = SumState.NONE if self.accumulated is None else SumState.WAITING
        for param in self._params:
            set_unreduced_grad(param, None)

    def use_zeros(self) -> None:
        """Makes every `take` return zeros until `rollback_pass`: the pass failed here and goes on elsewhere."""
        self.rollback_pass()
        self._sum_state = SumState.TAKEN

    def adopt(self, other: FlatGradient, device: torch.device) -> None:
        """Takes over the accumulated gradients of the same parameters on another device or in another dtype."""
        other.commit_pass()
        if other.accumulated is not None:
            self._set_accumulated(other.accumulated.to(device, self._wide_dtype), other._summed_params)

    def zero_accumulated(self, indices: Iterable[int], *, set_to_none: bool) -> None:
        """Drops the accumulated gradients of these parameters, or sets them to zeros."""
        for index in self._summed_params.intersection(indices):
            assert self.accumulated is not None, "there is a sum of these parameters"
            if set_to_none:
                self._summed_params.discard(index)
            else:
                self._view(self.accumulated, index).zero_()
        if not self._summed_params:
            self._drop_accumulated()

    def drop(self) -> None:
        """Drops all gradients."""
        self.rollback_pass()
        self._drop_accumulated()

    def _forget_pass(self) -> None:
        self.flat, self._held_grads, self._states = None, {}, [GradState.NONE] * len(self._params)

    def _packed(self) -> list[int]:
        """The parameters whose gradient is in the flat gradient."""
        return [index for index, state in enumerate(self._states) if state in _IN_FLAT]

    def _set_accumulated(self, accumulated: Tensor, indices: Iterable[int]) -> None:
        self.accumulated, self._summed_params, self._sum_state = accumulated, set(indices), SumState.WAITING

    def _drop_accumulated(self) -> None:
        self.accumulated, self._summed_params, self._sum_state = None, set(), SumState.NONE

    def _dense(self, index: int, grad: Tensor) -> Tensor:
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of '{self.names[index]}' has a gradient of its own, which can't follow it into a shard: "
                "call backward() without create_graph=True, or compute the penalty from outputs and inputs instead"
            )
        return grad.to_dense()

    def _pack(self, index: int, grad: Tensor, wide: bool) -> None:
        """As `accumulate`, where the flat gradient has to be allocated or there is a sum of earlier passes."""
        accumulated = self.accumulated if self._sum_state is SumState.WAITING else None
        if self.flat is None:
            dtype = self._wide_dtype if wide else self._dtype
            if accumulated is not None:
                dtype = grad.dtype  # It is added to the sum in a dtype that is wide enough.
            is_flat = len(self._params) == 1 and grad.numel() == self._full_numel
            if is_flat and grad.dtype == dtype and grad.is_contiguous():
                self.flat = grad.view(-1)  # It is laid out as the buffer is: taken over, not copied.
                self._states[index] = GradState.PACKED
                return
            if self._full_numel * dtype.itemsize >= buffer_pool.SMALLEST_BYTES:
                self.flat = buffer_pool.empty(self._full_numel, dtype, grad.device)
            else:
                self.flat = torch.empty(self._full_numel, dtype=dtype, device=grad.device)
        if self._states[index] is GradState.PACKED and accumulated is not None:
            # A second gradient in one pass, as of reentrant checkpoints: added as autograd does, each to all before it.
            self.flat = self.flat.to(self._wide_dtype)
            if index in self._summed_params:
                self._view(self.flat, index).add_(self._view(accumulated, index))
                self._states[index] = GradState.PACKED_WITH_SUM
        is_packed = self._states[index] in _IN_FLAT
        _add(self._view(self.flat, index), grad, is_packed)
        if not is_packed:
            self._states[index] = GradState.PACKED

    def _add_accumulated(self, flat: Tensor | None) -> Tensor:
        """Returns this pass's gradients plus the accumulated sum, [W * S] in the wide dtype; gaps are undefined."""
        accumulated = self.accumulated
        assert accumulated is not None, "a sum that is waiting is there"
        total = accumulated.clone() if flat is None else flat.to(accumulated.dtype)
        for index in self._summed_params:
            state = self._states[index]
            if flat is not None and state is not GradState.PACKED_WITH_SUM:
                _add(self._view(total, index), self._view(accumulated, index), state is GradState.PACKED)
            self._states[index] = GradState.PACKED_WITH_SUM
        return total

    def _view(self, flat: Tensor, index: int) -> Tensor:
        return view_of(flat, self._entries[index])

    def _fill_gaps(self, flat: Tensor) -> None:
        """Zeroes padding and unused parameters."""
        packed = self._packed()
        if len(packed) == len(self._params) and not self._has_padding:
            return
        offset = 0
        entries = (self._entries[index] for index in packed)
        for entry in sorted((entry for entry in entries if entry.numel), key=lambda entry: entry.offset):
            if offset < entry.offset:
                flat[offset : entry.offset].zero_()
            offset = entry.offset + entry.numel
        flat[offset:].zero_()


def view_of(flat: Tensor, entry: LayoutEntry) -> Tensor:
    """A parameter's view of a flat tensor [W * S], in its full shape."""
    return flat.narrow(0, entry.offset, entry.numel).view(entry.shape)


def _add(target: Tensor, grad: Tensor, has: bool) -> None:
    """Adds `grad` to `target`, or copies it where there is none yet."""
    if has:
        target.add_(grad)
    else:
        target.copy_(grad)


# The average over the ranks.


class PlainReduceScatter(ReduceScatter):
    """Sends gradients in their own dtype.

    Args:
        groups: The ranks; with replicas, gradients are averaged over these in a second half.
        sizes: How many elements the shard of each rank has; None is S each.
    """

    def __init__(self, groups: ShardGroups, sizes: Sequence[int] | None = None) -> None:
        super().__init__()
        self.group, self.replicas, self._sizes = groups.shard, groups.replicas, sizes
        self.traits = TransportTraits(reduces_in_halves=self.replicas.size > 1)

    def reduce(
        self, reduce_scatter_input: Tensor, dtype: torch.dtype, *, tag: int = UNTAGGED, divisor: float | None = None
    ) -> ReduceWork:
        full = reduce_scatter_input
        work = reduce_scatter(full, self.group, dtype=dtype, divisor=divisor, sizes=self._sizes, tag=tag)
        return ReduceWork(work, full, self.replicate(divisor) if self.replicas.size > 1 else None)

    def replicate(self, divisor: float | None) -> Callable[[Tensor], CollectiveWork]:
        """The second half: the average over the replicas, whose sum was divided already if there is a `divisor`."""
        num_copies = self.replicas.size if divisor is None else 1
        return lambda reduced: all_reduce(reduced, self.replicas).then(lambda total: total.div_(num_copies))


class Reduction:
    """Averages flat gradients of W * S elements over the ranks; keeps this rank's S elements of the results.

    One reduction is under way at a time. Its second half, if the transport has one, runs on until the next one is
    waited for: during the backward of the next unit.

    Args:
        transport: The collectives.
        dtype: Of the results.
        device: Where results are kept.
        stream: Brings them there.
    """

    def __init__(self, transport: ReduceScatter, dtype: torch.dtype, device: torch.device, stream: Stream) -> None:
        self.transport = transport
        self._dtype, self._device, self._stream = dtype, device, stream
        self.keeps_memory = True  # That of a large flat gradient is kept for the next one of its size.
        self._first_half: ReduceWork | None = None
        self._second_half: CollectiveWork | None = None
        self._reduced: list[tuple[Tensor, StreamEvent | None]] = []  # [S] each; the copy that brings it to its device

    def start(self, gradient: Tensor, tag: int = UNTAGGED, divisor: float | None = None) -> None:
        """Starts to average a flat gradient [W * S] in its own dtype; the reduction owns it from now on."""
        assert self._first_half is None, "a reduction is under way already"
        self._first_half = self.transport.reduce(gradient, self._dtype, tag=tag, divisor=divisor)

    def wait(self, limit_seconds: float | None = None) -> None:
        """Waits for the first half of a reduction, if one was started, and frees its flat gradient."""
        if self._first_half is None:
            return
        (work, flat, second_half), self._first_half = self._first_half, None
        reduced = work.wait(limit_seconds)
        if self.keeps_memory and flat.nbytes >= buffer_pool.SMALLEST_BYTES:
            buffer_pool.free_unshared(flat)
        if second_half is None:
            self._keep(reduced)
        else:
            self._wait_second_half(limit_seconds)
            self._second_half = second_half(reduced)
        self._check_error()

    def finish(self, limit_seconds: float | None = None) -> None:
        """Waits for both halves."""
        self.wait(limit_seconds)
        self._wait_second_half(limit_seconds)
        self._check_error()

    def results(self, limit_seconds: float | None = None) -> list[Tensor]:
        """Returns the gradients reduced since the last call, each [S], in the order of `start`."""
        self.finish(limit_seconds)
        reduced, self._reduced = self._reduced, []
        for _, copied in reduced:
            if copied is not None:
                copied.synchronize()
        return [gradient for gradient, _ in reduced]

    def cancel(self) -> None:
        """After an error: cancels every transfer and drops every result."""
        if self._first_half is not None:
            self._first_half.work.cancel()
        if self._second_half is not None:
            self._second_half.cancel()
        self._first_half = self._second_half = None
        self._reduced = []
        self.transport.deferred.reset()
        for feedback in self.transport.feedback:
            feedback.rollback()

    def commit(self) -> None:
        """The pass has succeeded: the errors of its messages wait for the next one."""
        for feedback in self.transport.feedback:
            feedback.commit()

    def _check_error(self) -> None:
        if self.transport.deferred.error is not None:
            self.transport.deferred.check()

    def _wait_second_half(self, limit_seconds: float | None) -> None:
        if self._second_half is not None:
            work, self._second_half = self._second_half, None
            self._keep(work.wait(limit_seconds))

    def _keep(self, reduced: Tensor) -> None:
        """Keeps a result, on the device of the results."""
        if reduced.device == self._device:
            self._reduced.append((reduced, None))
        else:
            copy = copy_to(reduced, self._device, self._stream)
            self._reduced.append((copy, self._stream.record()))
