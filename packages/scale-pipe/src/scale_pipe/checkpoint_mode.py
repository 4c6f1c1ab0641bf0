"""Which micro-batches are computed again in the backward pass: one answer for both runtimes."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from torch import nn

Checkpoint: TypeAlias = Literal["always", "except_last", "never"]
"""Which micro-batches are computed again; the last one's backward begins at once, so it need not be."""


def check_checkpoint(checkpoint: Any) -> None:
    """Checks that it is one of the three.

    Raises:
        ValueError: It is not.
    """
    if checkpoint not in get_args(Checkpoint):
        raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', but {checkpoint!r}")


def works_in_place(module: nn.Module) -> bool:
    """Whether the first layer that runs says that it overwrites what it is given, as `nn.ReLU(inplace=True)` does.

    What such a layer is given has to be copied where it is needed again.
    """
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return getattr(module, "inplace", False) is True
