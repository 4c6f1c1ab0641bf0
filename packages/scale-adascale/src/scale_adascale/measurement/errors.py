"""The errors of passes, steps and calls that come in a wrong order, or of gradients that are not what was measured."""

from __future__ import annotations

from scale_adascale.measurement.local_grad_norms import LocalGradNorms


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
            f"optimizer.set_num_gradients_to_accumulate({passes}) and optimizer.set_scale(optimizer.scale * {passes} "
            f"/ {num_gradients}, update_estimate=False) before the first of them, and both back after."
        )
    return RuntimeError(
        f"{begin}: expected {num_gradients} backward passes since the last step, got {passes}{last}.{shorter} Call "
        "backward() once for each gradient to accumulate, build AdaScale(..., "
        f"num_gradients_to_accumulate={max(1, passes)}), or optimizer.unhook() where gradients come by hand; and "
        f"{around}"
    )


def too_many_error(num_gradients: int, came: int | None) -> RuntimeError:
    """The error of a pass after the last one of a step; None for the begin of a pipeline's step, of any number."""
    cause = "another step of the pipeline began after them" if came is None else f"{came} came"
    number = "the micro-batches of all steps of the pipeline" if came is None else came
    return RuntimeError(
        f"expected {num_gradients} backward pass{'es' if num_gradients > 1 else ''} between two steps, but {cause} "
        "(each micro-batch of a pipeline is one, and so may be each reentrant checkpoint: use_reentrant=False). Call "
        "optimizer.step() after the last one, optimizer.zero_grad() where the step is left out, or pass "
        f"num_gradients_to_accumulate={number} if that many are meant"
    )


def leftover_gradients_text(*, pass_failed: bool) -> str:
    """The error of a step whose first backward pass has added its gradients to others."""
    why = (
        "a backward pass has failed after it had brought some, or they are from the last step"
        if pass_failed
        else "the gradients of the last step, or of passes that were not measured"
    )
    return (
        f"expected no gradients, or zeros, before the first backward pass of a step, but there are some ({why}), so "
        "that the mean would not be the mean of the measured gradients. Call optimizer.zero_grad() before it"
    )


def changed_gradients_text(passes: int, num_gradients: int, *, pass_failed: bool) -> str:
    """The error of a backward pass before which gradients have been changed since the last of `passes`."""
    failure = (
        f"a backward pass has failed after {passes} of {num_gradients} of a step, and had added to some gradients"
        if pass_failed
        else f"gradients were changed or cleared after {passes} of {num_gradients} backward passes of a step"
    )
    return (
        f"{failure}, so that their mean is not the mean of the measured gradients. Call optimizer.zero_grad() and "
        "begin with the first pass of the step; clip gradients and call model.zero_grad() after the last pass only"
    )


def middle_of_step_error(what: str, method: str, passes: int, num_gradients: int) -> RuntimeError:
    """The error of a method that is called amid the passes of a step; `what` is FairScale's text for it."""
    return RuntimeError(
        f"{what}: {method}() was called in the middle of a step, after {passes} of its {num_gradients} backward "
        f"passes. Call it after optimizer.step(), or pass num_gradients_to_accumulate={max(1, passes)} if no more "
        "passes follow"
    )


def uneven_inputs_error() -> RuntimeError:
    """The error of a step to which ranks contribute unequally."""
    return RuntimeError(
        "AdaScale can't measure the noise of this gradient, because ranks contribute unequally to it, as under join() "
        "when one rank has run out of data. Skip steps for which not all ranks have a batch, or call "
        "optimizer.unhook() before them and optimizer.hook() after them: they then use the last gain"
    )


def undivided_error(num_gradients: int) -> RuntimeError:
    """The error of a step on a sum of gradients where a mean is expected."""
    return RuntimeError(
        f"step(): losses were not divided by the {num_gradients} gradients to accumulate (is_scaled_loss=False), and "
        "neither were the gradients. Call optimizer.scale_grad_by_num_grads_to_accum() before the step, or "
        "divide the losses and build AdaScale(..., is_scaled_loss=True)"
    )


def scaled_loss_error() -> RuntimeError:
    """The error of a division of gradients whose losses were divided."""
    return RuntimeError(
        "Must use unscaled loss for scale_grad_by_num_grads_to_accum(): AdaScale was built for losses that "
        "are divided by the number of gradients. Leave this call out, or pass is_scaled_loss=False"
    )


def not_divisible_error(passes: int, num_gradients: int, *, is_divided: bool) -> RuntimeError:
    """The error of a division of gradients that are not all there, or are divided already."""
    came = "they are divided already" if is_divided else f"{passes} came"
    return RuntimeError(
        f"scale_grad_by_num_grads_to_accum(): expected {num_gradients} gradients to divide by, but {came}. Call it "
        "once, between the last backward() and step()"
    )


def unknown_scaler_error() -> RuntimeError:
    """The error of a GradScaler that AdaScale was not told of."""
    return RuntimeError(
        "a GradScaler steps an AdaScale that was built without it, and measures gradients times a scale that "
        "it does not know. Build AdaScale(..., options=AdaScaleOptions(grad_scaler=scaler)), or set "
        "optimizer.grad_scaler = scaler before the first backward pass"
    )
