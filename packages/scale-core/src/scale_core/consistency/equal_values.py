"""Comparison of tensors that may or may not be equal on all ranks: buffers, and layers built by hand.

Some of them are equal on all ranks and stay so, as a table of positions; others are each rank's own, as a
running statistic. Their history tells which: a tensor that was equal on all ranks each time, as a constant or through
several changes, has to stay equal. One that has differed before, or is replaced by another tensor, is each rank's own.
Zeros say nothing: they may be a count that has not begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scale_core import compat
from scale_core.comm.collectives import exchange, fingerprint_of
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import Divergence, digests_of, divergence_error
from scale_core.shard import on_local_tensors, wait_for

FIRST_PASSES = 3
"""Passes before which tensors are compared each time, beside those at an interval."""

_ENOUGH_REPEATS, _ENOUGH_CHANGES = 2, 3  # Equal values after these are no accident.
_ESCAPE = "They were equal before. Where each rank is to have its own values there, pass check_replicas_every=0"
_COMPARISON = "the comparison of replicas before a forward"


@dataclass
class _History:
    """The history of a tensor that has been equal on all ranks each time."""

    digest: int
    is_zero: bool
    num_repeats: int = 0  # since the last change
    num_changes: int = 0


class EqualValues:
    """The tensors of one model that have been equal on all ranks so far."""

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}
        self._of_each_rank: set[str] = set()  # names of tensors that have differed, the same on all ranks
        self._addresses: dict[str, int] = {}

    @torch.no_grad()
    @on_local_tensors
    def compare(self, named: Sequence[tuple[str, Tensor]], contract: Contract, step: int) -> None:
        """Compares tensors of floating point by name, any shape; all ranks of the contract call it together.

        Raises:
            DivergenceError: On all ranks: one has changed on some ranks only, or otherwise than on the others.
            ScaleDistributedError: A rank did not come.
        """
        if contract.is_single_rank or contract.group.backend == "fake" or compat.active_fake_mode() is not None:
            return
        named = [item for item in named if self._is_candidate(*item)]
        wait_for(*(tensor for _, tensor in named))
        names = [name for name, _ in named]
        digests = digests_of([tensor for _, tensor in named])
        # A cache that grows with the batches of a rank is another tensor then.
        addresses = {name: tensor.data_ptr() for name, tensor in named}
        replaced = [int(self._addresses.get(name, address) != address) for name, address in addresses.items()]
        self._addresses = addresses
        with contract.waiting(_COMPARISON):
            summary = [fingerprint_of(*names), fingerprint_of(*digests)]
            rows = exchange(summary, contract.group, limit_seconds=contract.limit_seconds)
            if any(row[0] != rows[0][0] for row in rows):  # Ranks have different tensors.
                self._histories.clear()
                return
            records = [[*digests, *replaced]] * len(rows)
            if any(row[1] != rows[0][1] for row in rows):
                records = exchange([*digests, *replaced], contract.group, limit_seconds=contract.limit_seconds)
        by_rank = [record[: len(names)] for record in records]
        for name, *was_replaced in zip(names, *(record[len(names) :] for record in records), strict=True):
            if any(was_replaced):
                self._histories.pop(name, None)
        is_zero = {name: not bool(tensor.any()) for name, tensor in named if name not in self._histories}
        diverged = []
        for name, *held in zip(names, *by_rank, strict=True):
            if self._has_diverged(name, held, is_zero.get(name, False)):
                diverged.append(Divergence(f"'{name}'", dict(enumerate(held))))
        if diverged:
            self._histories.clear()  # Nothing is known of the state that the program goes back to.
            self._of_each_rank.clear()
            error = divergence_error(diverged, len(names), step)
            error.add_note(_ESCAPE)
            raise error

    def _is_candidate(self, name: str, tensor: Tensor) -> bool:
        is_plain = type(tensor.data) in compat.plain_tensor_types() and not tensor.is_meta
        return is_plain and tensor.is_floating_point() and name not in self._of_each_rank

    def _has_diverged(self, name: str, held: Sequence[int], is_zero: bool) -> bool:
        """Takes in each rank's digest of a tensor; returns whether they had to be equal and are not."""
        history = self._histories.get(name)
        if len(set(held)) == 1:
            if history is None:
                self._histories[name] = _History(held[0], is_zero)
            elif history.digest == held[0]:
                history.num_repeats += 1
            else:
                history.digest, history.is_zero = held[0], False
                history.num_repeats, history.num_changes = 0, history.num_changes + 1
            return False
        if history is not None and history.num_changes >= _ENOUGH_CHANGES:
            return True
        is_constant = history is not None and history.num_repeats >= _ENOUGH_REPEATS and not history.is_zero
        if is_constant and history is not None and history.digest in held:
            return True  # Some ranks alone have changed it.
        self._of_each_rank.add(name)
        return False
