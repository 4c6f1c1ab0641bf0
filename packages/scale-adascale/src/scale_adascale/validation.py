"""What AdaScale refuses, before anything is changed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.optim import Optimizer

from scale_adascale.adam_preconditioner import base_of, is_adaptive, is_rescaling
from scale_adascale.gain import is_real
from scale_adascale.local_grad_norms import LocalGrads
from scale_core.comm.group import Group
from scale_core.microbatch_grads import announcing
from scale_core.uneven_inputs import current_share


def check_optimizer(optimizer: Any, wrapper: type[Optimizer]) -> None:
    """Checks what AdaScale is built around.

    Raises:
        TypeError: It is no optimizer, or is wrapped already.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, wrapper):
        raise TypeError(
            f"expected a torch.optim.Optimizer that is no AdaScale, got {type(optimizer).__name__}: write "
            "AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))"
        )


def check_numbers(data: Group, world_size: int | None, num_gradients: int, power: float | None) -> None:
    """Checks the numbers that AdaScale is built with.

    Raises:
        ValueError: The world size is another one than the group's, or a number is out of its range.
    """
    if world_size is not None and world_size != data.size:
        raise ValueError(
            f"expected world_size to be the number of ranks in process_group, {data.size}, got {world_size}: leave it "
            "out, and pass the group of the data parallel ranks as process_group if that is not the default group"
        )
    check_num_gradients(num_gradients)
    if power is not None and not (is_real(power) and 0 < power <= 1):
        raise ValueError(f"expected power above 0 and at most 1, got {power!r}: 1 is AdaScale's own, 0.5 Adam's")


def check_rule(optimizer: Optimizer, data: Group, power: float | None, preconditioned: bool | None) -> None:
    """Checks whether gradients can be measured as an optimizer uses them, and what its learning rates follow.

    Raises:
        TypeError: It steps with a closure that it calls itself, as LBFGS does.
        ValueError: They are to be, and it is neither Adam nor AdamW, or its state is nobody knows where; or it is none
            of both and not SGD either, and nobody has said which rule it has.
    """
    if isinstance(base_of(optimizer), torch.optim.LBFGS):
        raise TypeError(
            "expected an optimizer that takes one step for one gradient, got LBFGS, which computes several in each "
            "step: AdaScale can't tell what one is worth: use LBFGS without it"
        )
    if power is None and is_rescaling(optimizer):
        raise ValueError(
            f"expected power for {type(base_of(optimizer)).__name__}, of which AdaScale does not know whether its "
            "steps depend on the length of a gradient: pass AdaScale(..., power=0.5), the rule of Adam, where they do "
            "not, or power=1, that of SGD, where they do; its gradients are measured as they are"
        )
    wrapped = base_of(optimizer) is not optimizer and not hasattr(optimizer, "measured")
    if preconditioned is not False and is_adaptive(optimizer) and wrapped and data.size > 1:
        raise ValueError(
            f"{type(optimizer).__name__} does not tell which rank has the second moments of which parameter, by which "
            "AdaScale divides gradients: take scale_oss.OSS, or pass AdaScale(..., preconditioned=False)"
        )
    if preconditioned and not is_adaptive(optimizer):
        raise ValueError(
            f"expected an Adam or AdamW for preconditioned=True, got {type(optimizer).__name__}, of which AdaScale "
            "does not know what it divides gradients by: leave preconditioned out"
        )


def check_num_gradients(number: Any) -> None:
    """Checks a number of gradients to accumulate.

    Raises:
        ValueError: It is no whole number of at least 1.
    """
    try:
        is_whole = not isinstance(number, bool) and operator.index(number) >= 1
    except TypeError:
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"expected num_gradients_to_accumulate to be a whole number of at least 1, got {number!r}: pass how often "
            "backward() is called before each step"
        )


def check_smoothing(smoothing: float | None) -> None:
    """Checks a smoothing factor.

    Raises:
        ValueError: It is not from 0 to below 1.
    """
    if smoothing is not None and not (is_real(smoothing) and 0 <= smoothing < 1):
        raise ValueError(f"expected smoothing from 0 to below 1, got {smoothing!r}: leave it out for the default")


def check_plain(optimizer: Optimizer) -> None:
    """Checks that it is known who has which part of each parameter.

    Raises:
        TypeError: A parameter is a DTensor, of which torch itself divides the gradients.
    """
    for number, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        if hasattr(param, "placements"):
            raise TypeError(
                f"expected plain tensors, got parameter {number} of shape {tuple(param.shape)} as a DTensor, whose "
                "gradients are reduced before AdaScale could measure them: shard the model by scale_fsdp.fully_shard, "
                "or scale_tp.parallelize, in the place of torch's"
            )


def check_trains(optimizer: Optimizer, data: Group, model: Group) -> None:
    """Checks that this rank hears of backward passes, beside ranks with other parts of the model which may.

    Raises:
        ValueError: All of its parameters are frozen.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if model.size > 1 and not any(param.requires_grad for param in params) and announcing(params) is None:
        raise ValueError(
            f"expected a parameter that is not frozen on each of the ranks {list(model.ranks)}, which have other "
            "parts of the model, but this one has none, hears of no backward pass, and the others would wait for it: "
            "give its stage a layer that is trained, by another balance, or build AdaScale(..., process_group=the "
            f"ranks with other data, {list(data.ranks)}, model_parallel_group=a group of the ranks that train)"
        )


def refuse_step(passes: int, num_gradients: int, local: LocalGrads) -> None:
    """Refuses a step whose gradients are not all there.

    Raises:
        RuntimeError: They are not, or those of a rank that has run out of data count nothing.
    """
    if current_share() is not None:
        raise RuntimeError(
            "AdaScale can't tell how noisy a gradient is to which ranks contribute unequally, as under join() when one "
            "has run out of data: leave out the steps for which not all ranks have a batch, or call optimizer.unhook() "
            "before them, so that they are made with the last gain, and optimizer.hook() after them"
        )
    if passes == num_gradients and not local.is_in_pass:
        return
    if not passes and not local.hearing.can_hear:
        raise RuntimeError(
            "Don't step without finishing backward phase: no parameter of the optimizer can have a gradient that "
            "AdaScale hears of: unfreeze some and call optimizer.zero_grad(); put it around OSS, not inside: "
            "AdaScale(OSS(model.parameters(), ...)); and call optimizer.unhook() where gradients come by hand"
        )
    last = ", and one is running" if local.is_in_pass else ", and the last one has failed" if local.fails else ""
    shorter = (
        "where the last accumulation of an epoch is shorter, drop the batches that are left, or call "
        f"optimizer.set_num_gradients_to_accumulate({passes}) and optimizer.set_scale(optimizer.scale * {passes} / "
        f"{num_gradients}, update_estimate=False) before the first of them, and both back after; otherwise "
        if 0 < passes < num_gradients and not last
        else ""
    )
    raise RuntimeError(
        f"Don't step without finishing backward phase: expected {num_gradients} backward passes since the last step, "
        f"got {passes}{last}: {shorter}call backward() once for each gradient to accumulate, build AdaScale(..., "
        f"num_gradients_to_accumulate={max(1, passes)}), or optimizer.unhook() where gradients come by hand; and "
        "put it around OSS, not inside: AdaScale(OSS(model.parameters(), ...))"
    )


def refuse_undivided(num_gradients: int, *, divided: bool) -> None:
    """Refuses a step with a sum of gradients in the place of their mean.

    Raises:
        RuntimeError: Neither losses nor gradients were divided by their number.
    """
    if num_gradients > 1 and not divided:
        raise RuntimeError(
            f"step(): losses were not divided by the {num_gradients} gradients to accumulate, as AdaScale was told, "
            "and neither were the gradients: call optimizer.scale_grad_by_num_grads_to_accum() before the step, or "
            "divide the losses and build AdaScale(..., is_scaled_loss=True)"
        )


def too_many_gradients(num_gradients: int, came: int | None) -> RuntimeError:
    """What a backward pass raises that comes after the last one of a step.

    Args:
        num_gradients: As many as were to come.
        came: Those that did; None where a pipeline's step begins, of which nobody knows yet how many it has.
    """
    words = "another step of the pipeline began after them" if came is None else f"{came} came"
    number = "the micro-batches of all steps of the pipeline" if came is None else came
    return RuntimeError(
        f"expected {num_gradients} backward pass{'es' if num_gradients > 1 else ''} between two steps, but {words} "
        "(of a pipeline, each micro-batch is one): call optimizer.step() after the last one, optimizer.zero_grad() "
        f"where the step is left out, or pass num_gradients_to_accumulate={number} if that many are meant"
    )


def gradients_were_there(*, has_failed: bool) -> str:
    """What the first backward pass of a step says if it would add its gradients to others.

    Args:
        has_failed: A pass before it has failed, and may have brought them.
    """
    why = (
        "a backward pass has failed after it had brought some, or they are those of the last step"
        if has_failed
        else "those of the last step, or of passes that were not measured"
    )
    return (
        "expected no gradients, or zeros, before the first backward pass of a step, but some are there, so that the "
        f"mean would not be that of what is measured ({why}): call optimizer.zero_grad() before it"
    )


def gradients_were_changed(passes: int, num_gradients: int, *, has_failed: bool) -> str:
    """What a backward pass says before which gradients have been changed since the last one.

    Args:
        passes: How many had ended.
        num_gradients: As many as are to come.
        has_failed: Another one has failed since.
    """
    if has_failed:
        return (
            f"a backward pass has failed after {passes} of {num_gradients} of a step, and had added to some gradients "
            "already, so that their mean is not that of what was measured: call optimizer.zero_grad(), and begin with "
            "the first pass of the step"
        )
    return (
        f"gradients were changed or cleared after {passes} of {num_gradients} backward passes of a step, so that "
        "their mean is not that of what was measured: call optimizer.zero_grad(), begin with the first pass of the "
        "step, and clip gradients and call model.zero_grad() after the last pass only; or build AdaScale(..., "
        "num_gradients_to_accumulate=1)"
    )
