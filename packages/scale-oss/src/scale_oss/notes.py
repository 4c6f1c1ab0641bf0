"""What ranks tell each other at the end of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEFT_OUT = (
    "its forward pass was followed by no backward pass: an error in its loss was caught, its batch was skipped, or a "
    "forward pass of this rank alone was not under torch.no_grad()"
)
"""Why a rank has failed that did not run a pass at all."""


class Notes(NamedTuple):
    """What a rank says of itself at the end of a pass.

    Attributes:
        num_late: Buckets that have got gradients after their reduction.
        num_missing: Parameters that it has reduced as zeros.
        num_unmet: Forward passes to which no backward has come.
        order_is_known: It has learned in which order buckets become ready.
        failed: It has failed, and given the others zeros.
        left_out: It has done so for a pass that it did not run at all.
        brought_some: It has had gradients to reduce.
    """

    num_late: int = 0
    num_missing: int = 0
    num_unmet: int = 0
    order_is_known: bool = False
    failed: bool = False
    left_out: bool = False
    brought_some: bool = False

    def packed(self) -> tuple[int, int, int]:
        """As three integers, which is what ranks can tell each other there."""
        flags = self.order_is_known + 2 * self.failed + 4 * self.left_out + 8 * self.brought_some
        return self.num_late, self.num_missing, 16 * self.num_unmet + flags

    @staticmethod
    def unpacked(row: Sequence[int]) -> Notes:
        num_late, num_missing, rest = row
        flags = (bool(rest & bit) for bit in (1, 2, 4, 8))
        return Notes(num_late, num_missing, rest // 16, *flags)


def not_alike(step: int, unmet: Sequence[int]) -> str:
    """In words: ranks have different numbers of forward passes without a backward."""
    return (
        f"pass {step} was given up on all ranks: expected each rank's backward to follow the same forward passes, but "
        f"there are forward passes without a backward, {list(unmet)} by rank. A rank that skips a batch leaves the "
        "others in its backward, and averages its next one with theirs: skip it on all ranks; and put a forward pass "
        "that is only looked at under torch.no_grad()"
    )
