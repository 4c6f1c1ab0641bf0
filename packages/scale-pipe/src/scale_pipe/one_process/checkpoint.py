"""One micro-batch through one partition: plain, or so that it is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from scale_checkpoint import checkpoint_wrapper
from scale_checkpoint.recompute.rng import Drawn, replaying
from scale_core.tree import map_tensors
from scale_pipe.microbatch import Arguments, copied_to
from scale_pipe.partition.partition import contents_in_words, works_in_place
from scale_pipe.skip.namespace import SkipKey
from scale_pipe.skip.tracker import run_with_skips

Result: TypeAlias = tuple[Any, dict[SkipKey, Any]]
"""A partition's output, and what it has stashed."""


class PartitionRun(nn.Module):
    """Runs a partition on its device, in such a way that skips are inputs and outputs of it like all others.

    Args:
        partition: Some layers.
        device: Where they are.

    Attributes:
        device: The same.
        works_in_place: Whether the first layer overwrites what it is given.
    """

    def __init__(self, partition: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.partition, self.device = partition, device
        # Random numbers are seen to here: with a thread for each device, only its own generators stand still.
        self._recomputed = checkpoint_wrapper(RecomputedPartition(partition), preserve_random_state=False)
        self.works_in_place = works_in_place(partition)

    def fetch(self, given: Arguments, popped: Mapping[SkipKey, Any]) -> tuple[Arguments, dict[SkipKey, Any]]:
        """Returns what a micro-batch needs, on this partition's device.

        Args:
            given: What the partition is called with, on any device.
            popped: What it pops, on any device.
        """
        args, kwargs, own = copied_to(self.device, (given.args, given.kwargs, dict(popped)))
        return Arguments(args, kwargs), own

    def forward(self, given: Arguments, popped: dict[SkipKey, Any], checkpoint: bool, from_batch: bool) -> Result:
        """Computes a micro-batch.

        Args:
            given: What the partition is called with, on its device.
            popped: What it pops, likewise.
            checkpoint: Keep the inputs alone, and compute the rest again in the backward pass.
            from_batch: The inputs may be pieces of the caller's tensors, not results of a partition.
        """
        args, kwargs = given
        if checkpoint:
            result: Result = self._recomputed(args, kwargs, popped, _Draws(self.device), self.works_in_place)
            return result
        if self.works_in_place and from_batch:  # Pieces of one tensor share a counter of changes, too.
            args, kwargs = map_tensors(torch.clone, (args, kwargs))
        return run_with_skips(self.partition, popped, *args, **kwargs)


class RecomputedPartition(nn.Module):
    """A partition as a function of what it is given and pops; errors of checkpointing name its layers.

    Args:
        partition: Some layers.
    """

    def __init__(self, partition: nn.Module) -> None:
        super().__init__()
        self.partition = partition

    def _get_name(self) -> str:
        return f"partition with {contents_in_words(self.partition)}"

    def forward(self, args: Any, kwargs: Any, popped: Mapping[SkipKey, Any], draws: _Draws, clone: bool) -> Result:
        """The forward, and the recomputation."""
        with draws.made_once():
            if clone:  # What it is given is needed again.
                args, kwargs = map_tensors(torch.clone, (args, kwargs))
            return run_with_skips(self.partition, popped, *args, **kwargs)


class _Draws:
    """The random numbers of one micro-batch in one partition: drawn in the forward, and the same ones again.

    It looks at the generators of the host and of the partition's device. Other devices' belong to other threads. (What
    several threads draw from the host's generator at the same time has no order that could be repeated.)

    Args:
        device: Of the partition.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drawn: list[Drawn] | None = None

    @contextmanager
    def made_once(self) -> Iterator[None]:
        """Around the forward, and around each recomputation."""
        if self._drawn is not None:
            with replaying(self._drawn):
                yield
            return
        before = [Drawn(generator, generator.get_state()) for generator in self._generators()]
        yield
        self._drawn = [drawn for drawn in before if not torch.equal(drawn.state, drawn.generator.get_state())]

    def _generators(self) -> list[torch.Generator]:
        found = [torch.default_generator]
        if self._device.type == "cuda":
            torch.cuda.init()
            found.append(torch.cuda.default_generators[self._device.index])
        return found


# Known to whoever takes apart what a partition is given: it holds no tensor, and the recomputation gets the same one.
pytree.register_pytree_node(_Draws, lambda draws: ([], draws), lambda _, draws: draws)
