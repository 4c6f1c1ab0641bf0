"""What stands in `param.grad` when an update during the backward pass has used the gradient up.

With None in its place, clipping would find a norm of zero and a second backward pass would begin a new sum, both
without a word. This has a shape and no memory, and whoever computes with it learns what has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from scale_core.shard import title_of


class UsedGradient(Tensor):
    """The place of a gradient that is gone; every operation on it raises.

    Args:
        param: Whose gradient it was.
    """

    of_whom: str

    @staticmethod
    def __new__(cls, param: Tensor) -> UsedGradient:  # noqa: PYI034  # torch's maker of subclasses is untyped
        used: UsedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, storage_size=0
        )
        used.of_whom = title_of(param)
        return used

    __torch_function__ = cast(Any, torch._C)._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the operator first
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuses.

        Raises:
            RuntimeError: Always.
        """
        raise used_up(next(arg.of_whom for arg in _flat((*args, *(kwargs or {}).values())) if isinstance(arg, cls)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UsedGradient({self.of_whom})"


def used_up(name: str) -> RuntimeError:
    """The error about a gradient that is wanted although it has been used."""
    return RuntimeError(
        f"the gradient of {name} was used for its update during the backward pass and is gone: overlap_step=True "
        "allows one backward() per step(), without clipping, gradient scaler or anything else that needs gradients "
        "between the two. Build OffloadOptimizer(..., overlap_step=False) for those"
    )


def _flat(arguments: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for argument in arguments:
        found += _flat(argument) if isinstance(argument, list | tuple) else [argument]
    return found
