"""What AdaScale raises: checks of its arguments, and the errors of passes and steps in a wrong order."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.optim import Optimizer

from scale_adascale.adam_preconditioner import base_optimizer, is_adaptive, is_rescaling
from scale_adascale.gain import is_real
from scale_adascale.local_grad_norms import LocalGradNorms
from scale_adascale.param_info import all_params
from scale_core.comm.group import Group
from scale_core.microbatch_grads import pipeline_ranks
from scale_core.shard import title_of
from scale_core.state.param_ownership import flat_buffer_of

# Arguments.


def check_optimizer(optimizer: Any, wrapper: type[Optimizer]) -> None:
    """Raises TypeError unless it is an optimizer of plain tensors that AdaScale can be built around."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, wrapper):
        raise TypeError(
            f"expected a torch.optim.Optimizer that is no AdaScale, got {type(optimizer).__name__}. Write "
            "AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    if isinstance(base_optimizer(optimizer), torch.optim.LBFGS):
        raise TypeError(
            "expected an optimizer that takes one step for one gradient, got LBFGS, which computes several in each "
            "step. AdaScale can't tell what one is worth: use LBFGS without it"
        )
    for index, param in enumerate(all_params(optimizer)):
        if hasattr(param, "placements"):
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
    """Raises ValueError unless it is a whole number of at least 1."""
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
            "its steps depend on the length of a gradient. Pass AdaScale(..., power=0.5), the rule of Adam, where they "
            "do not, or power=1, that of SGD, where they do; its gradients are measured as they are"
        )
    wrapped = base_optimizer(optimizer) is not optimizer and not hasattr(optimizer, "grad_holders")
    if preconditioned is not False and is_adaptive(optimizer) and wrapped and data.size > 1:
        raise ValueError(
            f"{type(optimizer).__name__} does not tell which rank has the second moments of which parameter, by which "
            "AdaScale divides gradients. Take scale_oss.OSS, or pass AdaScale(..., preconditioned=False)"
        )
    if preconditioned and not is_adaptive(optimizer):
        raise ValueError(
            f"expected an Adam or AdamW for preconditioned=True, got {type(optimizer).__name__}, of which AdaScale "
            "does not know what it divides gradients by. Leave preconditioned out"
        )


def check_tensors(optimizer: Optimizer) -> None:
    """Raises ValueError for a flat parameter, where each tensor's gradient is divided by its own second moments."""
    for param in all_params(optimizer):
        buffer = flat_buffer_of(param)
        if buffer is not None:
            raise ValueError(
                f"expected each parameter as a tensor of its own, got {title_of(param)}, which holds "
                f"{len(buffer.names)}, as '{buffer.names[0]}': AdaScale divides the gradient of each by the root of "
                "its own mean second moment, as Adam uses it, and of a flat one the gain would be another. Shard the "
                "model with flatten_parameters=False, or measure gradients as they are by "
                "AdaScale(..., preconditioned=False)"
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


# Steps and passes.


def no_step_error(passes: int, num_gradients: int, local: LocalGradNorms) -> RuntimeError:
    """The error of a step whose gradients are not all there."""
    begin, around = "Don't step without finishing backward phase", "put it around OSS, not inside: AdaScale(OSS(...))"
    if not passes and not local.can_get_grads:
        return RuntimeError(
            f"{begin}: no parameter of the optimizer can have a gradient. Unfreeze some and call "
            f"optimizer.zero_grad(); {around}; and call optimizer.unhook() where gradients come by hand"
        )
    last = ", and one is running" if local.in_backward else ", and the last one has failed" if local.failed else ""
    shorter = ""
    if 0 < passes < num_gradients and not last:
        shorter = (
            " Where the last accumulation of an epoch is shorter, call "
            f"optimizer.set_num_gradients_to_accumulate({passes}) and optimizer.set_scale(optimizer.scale * {passes} / "
            f"{num_gradients}, update_estimate=False) before the first of them, and both back after."
        )
    return RuntimeError(
        f"{begin}: expected {num_gradients} backward passes since the last step, got {passes}{last}.{shorter} Call "
        "backward() once for each gradient to accumulate, build AdaScale(..., "
        f"num_gradients_to_accumulate={max(1, passes)}), or optimizer.unhook() where gradients come by hand; and "
        f"{around}"
    )


def too_many_error(num_gradients: int, came: int | None) -> RuntimeError:
    """The error of a pass after the last one of a step; None for the begin of a pipeline's step, of any number."""
    what = "another step of the pipeline began after them" if came is None else f"{came} came"
    number = "the micro-batches of all steps of the pipeline" if came is None else came
    return RuntimeError(
        f"expected {num_gradients} backward pass{'es' if num_gradients > 1 else ''} between two steps, but {what} "
        "(each micro-batch of a pipeline is one, and so may be each reentrant checkpoint: use_reentrant=False). Call "
        "optimizer.step() after the last one, optimizer.zero_grad() where the step is left out, or pass "
        f"num_gradients_to_accumulate={number} if that many are meant"
    )


def leftover_gradients_text(*, pass_failed: bool) -> str:
    """The error of a step whose first backward pass has added its gradients to others."""
    why = (
        "a backward pass has failed after it had brought some, or they are those of the last step"
        if pass_failed
        else "those of the last step, or of passes that were not measured"
    )
    return (
        f"expected no gradients, or zeros, before the first backward pass of a step, but there are some ({why}), so "
        "that the mean would not be that of what is measured. Call optimizer.zero_grad() before it"
    )


def changed_gradients_text(passes: int, num_gradients: int, *, pass_failed: bool) -> str:
    """The error of a backward pass before which gradients have been changed since the last of `passes`."""
    what = (
        f"a backward pass has failed after {passes} of {num_gradients} of a step, and had added to some gradients"
        if pass_failed
        else f"gradients were changed or cleared after {passes} of {num_gradients} backward passes of a step"
    )
    return (
        f"{what}, so that their mean is not that of what was measured. Call optimizer.zero_grad() and begin with the "
        "first pass of the step; clip gradients and call model.zero_grad() after the last pass only"
    )
