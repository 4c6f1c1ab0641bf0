"""The reductions of one backward pass, in an order that is the same on all ranks.

A bucket is reduced when all its gradients have come and those before it are under way, beside the backward of the next
ones. Which parameters a rank has used may depend on its data: what is missing at the end counts as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from scale_core.contract import Contract, ContractError
from scale_core.events import Event, message_tag
from scale_oss.bucket import Bucket

_ONE_WRAPPER = (
    "Where several models are trained by one backward pass, and ranks use different parameters of them, their buckets "
    "have no common order: make one module whose forward runs them all, and wrap that, "
    "ShardedDataParallel(module, [optimizer, other_optimizer])"
)


class Pass:
    """One backward pass that reduces.

    Args:
        buckets: All of them.
        order: In which they are reduced, by number; those that have nothing to reduce, on any rank, are left out.
        contract: What the ranks have promised each other.
        in_half: Gradients of fp32 parameters travel in fp16.

    Attributes:
        ready: The buckets all of whose gradients have come, in that order.
        missing: Parameters that were reduced as zeros; whether there was no gradient of an earlier pass.
        brought_some: There were gradients to reduce.
        is_closed: The ranks have compared what they did.
    """

    def __init__(self, buckets: Sequence[Bucket], order: Sequence[int], contract: Contract, *, in_half: bool) -> None:
        self._buckets, self._contract, self._in_half = buckets, contract, in_half
        self._awaited = [{i for i, param in enumerate(each.params) if param.requires_grad} for each in buckets]
        due = [bool(awaited) or any(param.grad is not None for param in each.params) for awaited, each in self._pairs]
        self._to_do = [number for number in order if due[number]]
        self._is_announced = False  # The next one to do has been compared with the other ranks'.
        self._reducing: int | None = None
        self.ready: list[int] = []
        self.missing: dict[tuple[int, int], bool] = {}
        self.brought_some = False
        self.is_closed = False

    def arrived(self, number: int, index: int) -> None:
        """A gradient has come, and was packed; reduces what has waited for it."""
        awaited = self._awaited[number]
        awaited.discard(index)
        if not awaited and number not in self.ready:
            self.ready.append(number)
            while self._to_do and self._to_do[0] in self.ready:
                self._reduce_next()

    def reduce_rest(self, before: Callable[[int], None]) -> None:
        """Reduces what is left, and waits until all is done.

        Args:
            before: Called with the number of each bucket that is left, before it is reduced.
        """
        while self._to_do:
            before(self._to_do[0])
            self._reduce_next()
        self._wait()

    def _reduce_next(self) -> None:
        """Starts a reduction, after the one before it."""
        number = self._to_do[0]
        bucket = self._buckets[number]
        event = reduction_of(bucket)
        if not self._is_announced:
            self._announce(event)
            self._is_announced = True
        self._wait()
        missing = bucket.gradient.missing()
        self.brought_some = self.brought_some or bool(bucket.gradient)
        halved = self._in_half and bucket.dtype == torch.float32
        bucket.reduce(message_tag(event), torch.float16 if halved else None)
        self._to_do.pop(0)
        self._is_announced, self._reducing = False, number
        for index in missing:
            self.missing[number, index] = index not in bucket.averaged

    def _announce(self, event: Event) -> None:
        try:
            self._contract.announce(event)
        except ContractError as error:
            error.add_note(_ONE_WRAPPER)
            raise

    def _wait(self) -> None:
        number, self._reducing = self._reducing, None
        if number is not None:
            with self._contract.waiting(reduction_of(self._buckets[number])):
                self._buckets[number].reduction.wait(self._contract.limit_seconds)

    @property
    def _pairs(self) -> list[tuple[set[int], Bucket]]:
        return list(zip(self._awaited, self._buckets, strict=True))


def reduction_of(bucket: Bucket) -> Event:
    """What ranks call the reduction of a bucket."""
    return Event("reduction", bucket.title)
