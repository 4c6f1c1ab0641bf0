"""A tensor that is in a file until it is written into another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from scale_core.state.local_shard import LocalShard


class LazyTensor(LocalShard):
    """A full tensor of a file, which a planner of `torch.distributed.checkpoint` reads when it writes it.

    `LazyTensor(shape, dtype, read)`: `read()` returns it from the file, again at each call. `origin` is equal for two
    names of one tensor, and None where the format does not say.
    """

    read: Callable[[], Tensor]
    origin: object

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor], origin: object = None
    ) -> Self:
        nothing = torch.empty(tuple(shape), dtype=dtype, device="meta")
        lazy: Self = LocalShard.__new__(cls, nothing, tuple(shape), 0, nothing.numel())
        lazy.read, lazy.origin = read, origin
        return lazy

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def load(self) -> Tensor:
        """Returns the tensor from its file.

        Raises:
            ValueError: The file has another shape or dtype than it said before.
        """
        tensor = self.read().detach()
        if (tuple(tensor.shape), tensor.dtype) != (tuple(self.shape), self.dtype):
            raise ValueError(f"expected {tuple(self.shape)} {self.dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.load()
