"""Sampler: the batch of each step, the same at any number of ranks and after a resume.

The order is a pure function of the seed and of how many sequences were drawn, which is the whole data position. Ranks
need no communication for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from scale_train.errors import InputError


@dataclass
class Sampler:
    """Draws windows of a text without replacement, in another order each epoch."""

    num_bytes: int  # length of the text; at least `sequence + 1`
    sequence: int  # tokens in a window; its targets are the same window one byte later
    seed: int  # of the order
    drawn: int = 0  # sequences drawn so far by all ranks together
    _epoch: int = field(default=-1, init=False, repr=False)
    _starts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), init=False, repr=False)

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        # One less than would fit, where several fit, leaves room for another shift in each epoch.
        return max(1, (self.num_bytes - 1) // self.sequence - 1)

    def starts(self, batch: int) -> Tensor:
        """Draws the global batch of a step: where each window starts, `[batch]`, int64."""
        starts = torch.stack([self._start(index) for index in range(self.drawn, self.drawn + batch)])
        self.drawn += batch
        return starts

    def _start(self, index: int) -> Tensor:
        epoch, position = divmod(index, self.windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            spare = self.num_bytes - 1 - self.windows * self.sequence
            shift = torch.randint(min(spare, self.sequence) + 1, (), generator=generator)
            self._starts = torch.randperm(self.windows, generator=generator) * self.sequence + shift
            self._epoch = epoch
        return self._starts[position]

    def state(self) -> dict[str, int]:
        """Returns the data position, as JSON."""
        return {"num_bytes": self.num_bytes, "sequence": self.sequence, "seed": self.seed, "drawn": self.drawn}

    def load_state(self, state: dict[str, int]) -> None:
        """Goes on from a `state`; an InputError where it belongs to another order of the data."""
        for name in ("num_bytes", "sequence", "seed"):
            if state[name] != getattr(self, name):
                raise InputError(
                    f"the checkpoint's data position has {name}={state[name]}, but this run has {getattr(self, name)}: "
                    f"resume with the same --text, --sequence and --seed"
                )
        self.drawn = state["drawn"]


def slice_of_rank(starts: Tensor, rank: int, num_ranks: int, accumulate: int) -> Tensor:
    """Returns a rank's micro-batches of a global batch: `[batch]` to `[accumulate, batch / num_ranks / accumulate]`."""
    return starts.view(num_ranks, accumulate, -1)[rank]


@dataclass(frozen=True)
class Batch:
    """Tokens and the token after each, both `[batch, sequence]`, int64."""

    tokens: Tensor
    targets: Tensor


def windows_at(text: Tensor, starts: Tensor, sequence: int) -> Batch:
    """Returns the windows of `text`, uint8 `[bytes]`, at `starts`, int64 `[batch]`."""
    windows = text[starts.unsqueeze(1) + torch.arange(sequence + 1)].long()
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
