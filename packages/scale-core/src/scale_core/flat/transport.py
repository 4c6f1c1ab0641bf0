"""How the shards of one flat buffer reach the other ranks, and how its gradients come back.

`FlatBuffer` calls two verbs, the second through a `Reduction`, and no format of messages has a line in them:

    all_gather   [S] of each rank      ->  [W * S] on every rank
    reduce       [W * S] of each rank  ->  [S], this rank's part of their average

This page is for a new transport. In a step nothing of it runs: `PlainTransport` (in `buffer`) and `PlainReduceScatter`
(in `gradient`) send the values as they are. Another transport stands with its user, and comes in by a
`TransportPolicy`: `scale_fsdp.transports` has messages of 8 and 4 bits, of fp8 weights, and in two levels over nodes.
`HostStagedTransport` brings a shard from the host to the device first, for any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from scale_core.comm.collectives import UNTAGGED
from scale_core.comm.work import CollectiveWork
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


class ReduceScatter(ABC):
    """How the gradients of one flat buffer are averaged over W ranks with shards of S elements each.

    Attributes:
        traits: Its halves, and where it may fail.
        deferred: The error of a message that could not be made, for the caller to raise.
        feedback: The rounding errors of gradients, which the next step adds; empty where nothing is rounded.
    """

    traits = TransportTraits()
    feedback: Sequence[ErrorFeedback] = ()

    def __init__(self) -> None:
        self.deferred = DeferredError()

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


class ShardTransport(ReduceScatter):
    """How one flat buffer is sent: its parameters, and the gradients of its `ReduceScatter`.

    Attributes:
        all_gather_dtype: Of the gathered buffer, where parameters are tensors around a part of it (`post_all_gather`).
            None is the dtype of the computation.
    """

    all_gather_dtype: torch.dtype | None = None

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
