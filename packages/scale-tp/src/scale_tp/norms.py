"""Norms on a sequence that is divided between ranks.

A norm works token by token, so each rank norms its own part. But its parameters are the same on all ranks, and each
rank finds only its tokens' share of their gradient. Here these shares are added in the backward pass, in one message
for all parameters of a norm: after it every rank has the whole gradient, which counts once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scale_core.compat import untraced
from scale_core.group import Group, GroupLike
from scale_core.shard import Axis, Held, Shard, mark, shard_of
from scale_tp.groups import layer_group
from scale_tp.regions import copy_all_to_model_parallel_region


class ParallelLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` for an input that is this rank's part of a sequence.

    Args:
        normalized_shape: As in `torch.nn.LayerNorm`.
        eps: As there.
        elementwise_affine: As there.
        bias: As there.
        device: As there.
        dtype: As there.
        group: The ranks that divide the sequence; None is the model axis, or this process alone.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        group: GroupLike = None,
    ) -> None:
        ranks = layer_group(group)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        sum_gradients_over(self, ranks)


class ParallelRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` for an input that is this rank's part of a sequence.

    Args:
        normalized_shape: As in `torch.nn.RMSNorm`.
        eps: As there.
        elementwise_affine: As there.
        device: As there.
        dtype: As there.
        group: The ranks that divide the sequence; None is the model axis, or this process alone.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        group: GroupLike = None,
    ) -> None:
        ranks = layer_group(group)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        sum_gradients_over(self, ranks)


def sum_gradients_over(module: nn.Module, group: GroupLike = None) -> nn.Module:
    """Has the gradients of a module's own parameters summed over the ranks, each of which has a part of its input.

    The module stays the same object, with the same names; its class becomes one that is made from it. Parameters of
    modules inside it are not meant.

    Args:
        module: Such as a norm; the values of its parameters are the same on all ranks.
        group: The ranks that divide its input; None is the model axis, or this process alone.

    Returns:
        The module.

    Raises:
        ValueError: Its gradients are summed already.
    """
    ranks = layer_group(group)
    if isinstance(module, _Summed):
        raise ValueError(f"the gradients of this {type(module).__name__} are summed already: once is enough")
    if ranks.size > 1:
        # A dict of the module's own, beside its parameters, so that copies and pickles take it along.
        module.__dict__["_sequence_group"] = ranks
        module.__class__ = _summed_class(type(module))
        _mark_copies(module, ranks)
    return module


class _Summed:
    """Marks classes whose parameters' gradients are summed over the ranks."""

    _sequence_group: Group


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _summed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name, whose forward sees parameters with gradients that are summed."""
    if kind in _classes:
        return _classes[kind]

    @untraced
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, param in self._parameters.items() if param is not None]
        params = [self._parameters[name] for name in names]
        copies = copy_all_to_model_parallel_region(*params, group=self._sequence_group)
        before = dict(self._parameters)
        try:
            self._parameters.update(zip(names, copies, strict=True))
            return kind.forward(self, *args, **kwargs)
        finally:
            self._parameters.update(before)

    def after_copy(self: Any) -> Any:
        return _restored, (kind, self.__dict__.copy())

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        kind._apply(self, fn, recurse)
        _mark_copies(self, self._sequence_group)
        return self

    members = {
        "forward": forward,
        "__reduce__": after_copy,
        "_apply": apply,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    _classes[kind] = type(kind.__name__, (_Summed, kind), members)
    return _classes[kind]


def _restored(kind: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    """What a copy or a pickle of such a module becomes."""
    module = kind.__new__(kind)
    module.__setstate__(dict(state))
    ranks: Group = module.__dict__["_sequence_group"]
    module.__class__ = _summed_class(kind)
    _mark_copies(module, ranks)
    return module


def _mark_copies(module: nn.Module, group: Group) -> None:
    for param in module.parameters(recurse=False):
        if shard_of(param) is None:
            mark(param, replicated(param, group))


def replicated(param: Tensor, group: Group) -> Shard:
    """What is said of a parameter that all ranks hold with the same values."""
    return Shard("", tuple(param.shape), 0, param.numel(), (Axis(group, Held.REPLICATE),), gathered=False)
