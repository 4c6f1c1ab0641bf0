"""Wrappers with one mistake each, as `scale-check fuzz` may meet them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_check.fuzz.engines import DDP, MakeOptimizer


class SumOfGradients(DDP):
    """Adds gradients up where they are accumulated without communication, and averages others."""

    passes = 0

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        self.passes += 1
        return super().no_sync(model)

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        super().backward(model, loss * (1 + (self.passes > 0)))
        self.passes = 0


class OtherClipping(DDP):
    """Clips by the norm of some parameters."""

    def clip(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(list(model.parameters())[:-1], max_norm)


class Refusing(DDP):
    """Refuses every model on all ranks."""

    def wrap(
        self, model: nn.Module, units: Sequence[str], make_optimizer: MakeOptimizer, kind: type[Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        raise TypeError(f"rank {dist.get_rank()} of {dist.get_world_size()} does not like 'blocks.1'")
