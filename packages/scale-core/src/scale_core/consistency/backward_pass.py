"""The end of a backward pass that reduces gradients: the same on all ranks, or an error on all of them.

During the pass, each bucket of gradients is reduced, `mark_reduced`. A parameter without a gradient counts as zeros
there. At the end, `compare` tells each rank how the pass has gone on the others. If one has failed, all raise. If not,
`commit` reduces gradients that came late, publishes all, and takes zeros away from parameters that no rank has used.

A parameter that no rank has used keeps the gradient it had, none as a rule, as in plain PyTorch: Adam's momentum and
weight decay would move it on zeros. If only some ranks have used it, the others contribute zeros. No rank knows this
alone, so each records which parameters it reduced as zeros, and they compare these records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from scale_core.comm.group_state import CallLog
from scale_core.consistency.all_ranks import all_gather_failures, all_gather_json
from scale_core.consistency.contract import Contract
from scale_core.errors import StepError


class LocalGradients(Protocol):
    """Gradients of this rank before they are reduced, as `FlatGradient`; parameters are numbers."""

    def __bool__(self) -> bool: ...  # Whether some were not reduced yet.
    def missing(self) -> list[int]: ...  # Parameters that train, and have none.
    def has_grad(self) -> list[int]: ...
    def frozen(self) -> list[int]: ...  # Parameters that were frozen after they got one.


class GradBucket(Protocol):
    """Parameters whose gradients are reduced together."""

    @property
    def gradient(self) -> LocalGradients: ...
    def has_grad(self, index: int) -> bool: ...  # Whether a parameter has a reduced gradient.
    def drop_grad(self, index: int) -> None: ...  # Sets that to None.


class ParamKey(NamedTuple):
    """A parameter by numbers that are equal on all ranks."""

    bucket: int
    param: int  # in the bucket


class PassStatus(NamedTuple):
    """How a pass has gone on one rank, exchanged together with the fingerprint of its events."""

    num_late: int = 0  # buckets with gradients after their reduction, and parameters frozen with a gradient
    num_unused: int = 0  # parameters that it has reduced as zeros
    failed: bool = False
    note: int = 0  # what the ranks exchange besides, as their engine packs it

    def pack(self) -> tuple[int, int, int]:
        """Returns the integers that `Contract.end_checked` sends."""
        return self.num_late, self.num_unused, 2 * self.note + self.failed

    @staticmethod
    def unpack(row: Sequence[int]) -> PassStatus:
        num_late, num_unused, note = row
        return PassStatus(num_late, num_unused, bool(note & 1), note // 2)


class LateGradients(NamedTuple):
    """Gradients of one rank that were not reduced with their bucket, or do not train."""

    buckets: list[int]  # with gradients that came after the reduction, or of frozen parameters
    frozen: list[ParamKey]  # parameters that were frozen when they had an accumulated gradient

    @property
    def number(self) -> int:
        return len(self.buckets) + len(self.frozen)


class CommittedPass(NamedTuple):
    """What the ranks have found in common when they committed a pass."""

    late_buckets: set[int]  # reduced at the end, because a rank had late gradients
    unused: set[ParamKey]  # parameters that no rank has used


def end_pass(contract: Contract, status: PassStatus) -> list[PassStatus]:
    """Compares the events of all ranks, and returns how the pass has gone on each, by rank."""
    return [PassStatus.unpack(row) for row in contract.end_checked(*status.pack())]


class BackwardPass:
    """The reductions of one backward pass after the other, as far as all ranks must agree on them.

    Args:
        contract: Compares the ranks.
        buckets: In an order that is the same on all ranks. Others may be appended between passes.
        describe_abort: Says that a pass was aborted, given each rank's error, by rank; "" where it has not failed.
    """

    def __init__(
        self, contract: Contract, buckets: Sequence[GradBucket], describe_abort: Callable[[Sequence[str]], str]
    ) -> None:
        self._contract, self._buckets, self._describe_abort = contract, buckets, describe_abort
        self.reduced: set[int] = set()  # the numbers of buckets
        self.unused: dict[ParamKey, bool] = {}  # reduced as zeros, and whether they had no gradient before

    def reset(self) -> None:
        """A pass begins, is over, or was aborted."""
        self.reduced, self.unused = set(), {}

    def mark_reduced(self, number: int) -> None:
        """Records that a bucket is about to be reduced; called before its gradients are taken."""
        bucket = self._buckets[number]
        if number in self.reduced:
            self.mark_used(number)
            return
        self.reduced.add(number)
        for index in bucket.gradient.missing():
            self.unused[ParamKey(number, index)] = not bucket.has_grad(index)

    def mark_used(self, number: int) -> None:
        """Records which parameters of a bucket have got a gradient since its reduction: they are not unused."""
        if self.unused and number in self.reduced:
            for index in self._buckets[number].gradient.has_grad():
                self.unused.pop(ParamKey(number, index), None)

    def late_gradients(self, numbers: Iterable[int], frozen: Iterable[ParamKey] = ()) -> LateGradients:
        """Returns this rank's late gradients in these buckets, and parameters `frozen` before they were packed."""
        late = LateGradients([], list(frozen))
        for number in numbers:
            self.mark_used(number)
            gradient = self._buckets[number].gradient
            if gradient:
                late.buckets.append(number)
            late.frozen.extend(ParamKey(number, index) for index in gradient.frozen())
        return late

    def compare(self, status: PassStatus, error: BaseException | None = None) -> list[PassStatus]:
        """Ends the pass; returns each rank's status, by rank. `error` is this rank's own, if the pass has failed here.

        Raises:
            ContractError: The ranks have run different events.
            StepError: Another rank has failed. On that rank its own error is raised, with the same text as a note.
        """
        statuses = end_pass(self._contract, status)
        if any(rank_status.failed for rank_status in statuses):
            if error is not None and self._contract.is_single_rank:
                raise error
            message = self._describe_abort(all_gather_failures(error, self._contract))
            if error is None:
                raise StepError(message, step=self._contract.step)
            error.add_note(message)
            raise error
        if CallLog.is_used:
            self._contract.compare_calls()
        return statuses

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Around `commit` and the hooks after it: the others hear of an error in here when they next compare.

        They have found no failure, and are about to use their gradients.
        """
        try:
            yield
        except BaseException:
            self._contract.mark_late_failure()
            raise

    def commit(
        self,
        statuses: Sequence[PassStatus],
        late: LateGradients,
        reduce: Callable[[int], None],
        publish: Callable[[Mapping[int, Sequence[int]]], None],
    ) -> CommittedPass:
        """The pass has gone well on every rank: publishes its gradients.

        Args:
            statuses: As `compare` returned them.
            late: This rank's late gradients.
            reduce: Reduces a bucket, given its number, on all ranks together.
            publish: Adds all reduced gradients to the gradients of the parameters. It is given, by bucket, the
                parameters that some rank has frozen when they had an accumulated gradient.
        """
        frozen: dict[int, list[int]] = {}
        late_buckets: set[int] = set()
        if any(status.num_late for status in statuses):
            late_by_rank = all_gather_json((late.buckets, late.frozen), self._contract)
            late_buckets = {number for numbers, _ in late_by_rank for number in numbers}
            for number in sorted(late_buckets):
                reduce(number)
            for number, index in (key for _, keys in late_by_rank for key in keys):
                frozen.setdefault(number, []).append(index)
        publish(frozen)
        unused: set[ParamKey] = set()
        if all(status.num_unused for status in statuses):
            unused_by_rank = all_gather_json(sorted(self.unused), self._contract)
            unused = set.intersection(*({ParamKey(*key) for key in keys} for keys in unused_by_rank))
            for key in unused:
                if self.unused[key]:
                    self._buckets[key.bucket].drop_grad(key.param)
        return CommittedPass(late_buckets, unused)
