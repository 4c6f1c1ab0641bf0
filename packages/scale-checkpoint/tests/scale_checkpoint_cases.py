"""What the tests of scale-checkpoint share: a training that notices every difference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def train(
    model: nn.Module, steps: int = 2, seed: int = 1, around: AbstractContextManager[Any] | None = None
) -> list[Tensor]:
    """Trains on [4, 5, 8] by SGD; returns outputs, all gradients, buffers, and what is drawn next."""
    torch.manual_seed(seed)
    found: list[Tensor] = []
    for _ in range(steps):
        x = torch.randn(4, 5, 8, requires_grad=True)
        model.zero_grad()
        with around or nullcontext():
            output = model(x)
        output.float().square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        found += [output.detach(), torch.zeros(0) if x.grad is None else x.grad, *(grad.clone() for grad in grads)]
        found += [buffer.clone() for buffer in model.buffers()]
        with torch.no_grad():  # torch.optim would load a compiler first, which takes seconds.
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
        found.append(torch.rand(3))
    return found


def differing(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> list[int]:
    """Returns the numbers of those that are not equal to the bit."""
    assert len(ours) == len(theirs)
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [i for i, (a, b) in pairs if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))]
