"""How the shards of one flat buffer reach the other ranks, and how its gradients come back.

`FlatBuffer` calls two verbs, the second through a `Reduction`, and no format of messages has a line in them:

    all_gather   [S] of each rank      ->  [W * S] on every rank
    reduce       [W * S] of each rank  ->  [S], this rank's part of their average

`PlainTransport` sends the values as they are. Another transport stands with its user, and comes in by a
`TransportPolicy`: `scale_fsdp.transports` has messages of 8 and 4 bits, of fp8 weights, and in two levels over nodes.
`HostStagedTransport` brings a shard from the host to the device first, for any of them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from scale_core.comm.collectives import UNTAGGED, CollectiveWork, all_gather, all_reduce, reduce_scatter
from scale_core.comm.group import Group
from scale_core.device import buffer_pool
from scale_core.device.streams import Stream, StreamEvent, copy_to, stream_for
from scale_core.flat.config import ShardGroups
from scale_core.flat.layout import ShardSpan
from scale_core.optim.error_feedback import ErrorFeedback

T = TypeVar("T")


class DeferredError:
    """The first error of this rank inside a collective, until all that the other ranks wait for has been sent.

    To make a message takes memory, of which there may be none. The other ranks wait for it all the same. So a message
    that could not be made is sent as zeros, and the error is raised where this rank waits for the last one.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_ignored = False  # This rank has failed already, and takes part only for the others.

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Returns the result of `make`; None if that fails, or something has failed before."""
        if self.error is None:
            try:
                return make()
            except Exception as error:
                self.error = error
        return None

    def fill(self, message: Tensor, make: Callable[[], Tensor]) -> None:
        """Lets `make` fill a message; zeros are sent where it fails."""
        if self.attempt(make) is None:
            message.zero_()

    def check(self) -> None:
        """Raises the error, once."""
        error, self.error = self.error, None
        if error is not None and not self.is_ignored:
            raise error

    def reset(self) -> None:
        """The failed operation is over."""
        self.error, self.is_ignored = None, False


class ReduceWork(NamedTuple):
    """A reduction that has started.

    Attributes:
        work: Its first half, which all of them have; the result is [S].
        reduce_scatter_input: [W * S], what is sent; its memory is free when `work` has been waited for.
        second_half: Starts the rest, between nodes or replicas, from the result of `work`. None: no second half.
    """

    work: CollectiveWork
    reduce_scatter_input: Tensor
    second_half: Callable[[Tensor], CollectiveWork] | None = None


@dataclass(frozen=True)
class TransportTraits:
    """What the order of a step depends on.

    A second half starts when the first is waited for, so all ranks wait in one order. A rank that has no memory to make
    its message sends zeros and raises alone, so the others have to hear of it.

    Attributes:
        gathers_in_halves: A gather has a second half.
        gathers_messages: A gather makes messages of the shard, in memory of its own.
        reads_shard_late: A gather reads the shard in its second half.
        reduces_in_halves: A reduction has a second half.
        replicates_in_halves: That second half has itself two, which the ranks wait for together.
        reduces_messages_late: A rank may make or read messages after the first half of a reduction.
    """

    gathers_in_halves: bool = False
    gathers_messages: bool = False
    reads_shard_late: bool = False
    reduces_in_halves: bool = False
    replicates_in_halves: bool = False
    reduces_messages_late: bool = False


class ShardTransport(ABC):
    """How one flat buffer is sent between W ranks with shards of S elements each.

    Attributes:
        traits: Its halves, and where it may fail.
        deferred: The error of a message that could not be made, for the caller to raise.
        feedback: The rounding errors of gradients, which the next step adds; empty where nothing is rounded.
        all_gather_dtype: Of the gathered buffer, where parameters are tensors around a part of it (`post_all_gather`).
            None is the dtype of the computation.
    """

    traits = TransportTraits()
    feedback: Sequence[ErrorFeedback] = ()
    all_gather_dtype: torch.dtype | None = None

    def __init__(self) -> None:
        self.deferred = DeferredError()

    @abstractmethod
    def all_gather(
        self, all_gather_input: Tensor, all_gather_output: Tensor, *, tag: int = UNTAGGED, copies_input: bool = False
    ) -> CollectiveWork:
        """Starts to fill [W * S] with every rank's [S], in rank order.

        Args:
            all_gather_input: [S], the shard; must not change before the work is waited for, unless `copies_input`.
            all_gather_output: [W * S], of the dtype of the computation or of `all_gather_dtype`.
            tag: As in `scale_core.all_gather`.
            copies_input: Send the values that the shard has at the call, whatever is written to it later.
        """

    @abstractmethod
    def reduce(
        self, reduce_scatter_input: Tensor, dtype: torch.dtype, *, tag: int = UNTAGGED, divisor: float | None = None
    ) -> ReduceWork:
        """Starts to average every rank's [W * S]; each rank gets its own [S] of it, in `dtype`.

        Args:
            reduce_scatter_input: [W * S], gradients; belongs to the transport from now on.
            dtype: Of the result.
            tag: As in `scale_core.all_gather`.
            divisor: The divisor of the sum; None is the number of ranks, of all replicas.
        """

    def new_all_gather_input(self, shard: Tensor, all_gather_output: Tensor) -> Tensor:
        """Memory on the device of the output for a shard [S] of another device, with which `all_gather` is called."""
        return torch.empty(shard.shape, dtype=shard.dtype, device=all_gather_output.device)

    def post_all_gather(self, index: int, unsharded_param: Tensor, data: Tensor) -> Tensor:
        """Returns what the module computes with in place of parameter `index`; `data` is its part of the output."""
        return unsharded_param


class TransportPolicy(Protocol):
    """Which transport a flat buffer has, as a value that is pickled with it."""

    def transport(self, groups: ShardGroups, spans: Sequence[ShardSpan]) -> ShardTransport:
        """Returns a new one between these ranks; `spans` are the parts of the parameters in this rank's shard."""
        ...


class PlainTransport(ShardTransport):
    """Sends parameters in the dtype of the computation, and gradients in their own.

    Args:
        groups: The ranks; with replicas, gradients are averaged over these in a second half.
        sizes: How many elements the shard of each rank has; None is S each.
    """

    def __init__(self, groups: ShardGroups, sizes: Sequence[int] | None = None) -> None:
        super().__init__()
        self.group, self.replicas, self._sizes = groups.shard, groups.replicas, sizes
        self.traits = TransportTraits(reduces_in_halves=self.replicas.size > 1)

    def all_gather(
        self, all_gather_input: Tensor, all_gather_output: Tensor, *, tag: int = UNTAGGED, copies_input: bool = False
    ) -> CollectiveWork:
        if copies_input or all_gather_input.dtype != all_gather_output.dtype:
            all_gather_input = self.new_all_gather_input(all_gather_input, all_gather_output).copy_(all_gather_input)
        return all_gather(all_gather_output, all_gather_input, self.group, sizes=self._sizes, tag=tag)

    def new_all_gather_input(self, shard: Tensor, all_gather_output: Tensor) -> Tensor:
        return part_of(all_gather_output, self.group)

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


def part_of(full: Tensor, group: Group) -> Tensor:
    """The part of this rank of `group` in a full buffer that is cut evenly."""
    size = full.numel() // group.size
    return full.narrow(0, group.rank * size, size)


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

    def __init__(self, transport: ShardTransport, dtype: torch.dtype, device: torch.device, stream: Stream) -> None:
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


@functools.cache
def copy_stream(device: torch.device, what: str) -> Stream:
    """The stream for one kind of copies; those to a device and back run side by side."""
    return stream_for(device)
