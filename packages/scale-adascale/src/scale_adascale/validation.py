"""Checks of AdaScale's arguments."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.optim import Optimizer

from scale_adascale.adam_preconditioner import base_optimizer, is_adaptive, is_rescaling
from scale_adascale.gain import is_real
from scale_adascale.measurement.param_info import all_params
from scale_core.comm.group import Group
from scale_core.dtensor import is_dtensor
from scale_core.hooks.microbatch_grads import pipeline_ranks


def check_optimizer(optimizer: Any, wrapper: type[Optimizer]) -> None:
    """Raises TypeError unless it is an optimizer of plain tensors that AdaScale can be built around."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, wrapper):
        raise TypeError(
            f"expected a torch.optim.Optimizer that is not an AdaScale, got {type(optimizer).__name__}. Write "
            "AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    if isinstance(base_optimizer(optimizer), torch.optim.LBFGS):
        raise TypeError(
            "expected an optimizer that takes one step for one gradient, got LBFGS, which computes several in each "
            "step. AdaScale can't tell what one is worth: use LBFGS without it"
        )
    for index, param in enumerate(all_params(optimizer)):
        if is_dtensor(param):
            raise TypeError(
                f"expected plain tensors, got parameter {index} of shape {tuple(param.shape)} as a DTensor, whose "
                "gradients are reduced before AdaScale could measure them. Shard the model by scale_fsdp.fully_shard, "
                "or scale_tp.parallelize, in the place of torch's"
            )


def check_numbers(
    data: Group, world_size: int | None, num_gradients: int, power: float | None, smoothing: float | None
) -> None:
    """Raises ValueError for numbers out of their range."""
    if world_size is not None and world_size != data.size:
        raise ValueError(
            f"expected world_size to be the number of ranks in process_group, {data.size}, got {world_size}. Leave it "
            "out, and pass the group of the data parallel ranks as process_group if that is not the default group"
        )
    check_num_gradients(num_gradients)
    if power is not None and not (is_real(power) and 0 < power <= 1):
        raise ValueError(f"expected power above 0 and at most 1, got {power!r}: 1 is AdaScale's own, 0.5 Adam's")
    if smoothing is not None and not (is_real(smoothing) and 0 <= smoothing < 1):
        raise ValueError(f"expected smoothing from 0 to below 1, got {smoothing!r}. Leave it out for the default")


def check_num_gradients(number: Any) -> None:
    """Raises ValueError unless it is an integer of at least 1."""
    try:
        is_whole = not isinstance(number, bool) and operator.index(number) >= 1
    except TypeError:
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"expected num_gradients_to_accumulate to be a whole number of at least 1, got {number!r}. Pass how often "
            "backward() is called before each step"
        )


def check_rule(optimizer: Optimizer, data: Group, power: float | None, preconditioned: bool | None) -> None:
    """Raises ValueError for an unknown optimizer without `power`, or gradients that can't be preconditioned."""
    if power is None and is_rescaling(optimizer):
        raise ValueError(
            f"expected power for {type(base_optimizer(optimizer)).__name__}, of which AdaScale does not know whether "
            "its steps depend on the length of a gradient. Pass AdaScaleOptions(power=0.5), the rule of Adam, where "
            "they do not, or power=1, SGD's rule, where they do; its gradients are measured as they are"
        )
    wrapped = base_optimizer(optimizer) is not optimizer and not hasattr(optimizer, "grad_holders")
    if preconditioned is not False and is_adaptive(optimizer) and wrapped and data.size > 1:
        raise ValueError(
            f"AdaScale divides gradients by second moments, and {type(optimizer).__name__} does not tell which rank "
            "has the moments of which parameter. Take scale_oss.OSS, or pass AdaScaleOptions(preconditioned=False)"
        )
    if preconditioned and not is_adaptive(optimizer):
        raise ValueError(
            f"expected Adam or AdamW for preconditioned=True, got {type(optimizer).__name__}. AdaScale does not know "
            "by what it divides gradients. Leave preconditioned out"
        )


def check_trains(optimizer: Optimizer, data: Group, model: Group) -> None:
    """Raises ValueError on a rank with frozen parameters alone: others in its model group would wait for it."""
    params = all_params(optimizer)
    if model.size > 1 and not any(param.requires_grad for param in params) and pipeline_ranks(params) is None:
        raise ValueError(
            f"expected a parameter that is not frozen on each of the ranks {list(model.ranks)}, which have other "
            "parts of the model, but this one has none: it gets no gradient, and the others would wait for it. "
            "Give its stage a layer that is trained, by another balance, or build AdaScale(..., process_group=the "
            f"ranks with other data, {list(data.ranks)}, model_parallel_group=a group of the ranks that train)"
        )
