"""A trial of an unknown optimizer on small tensors: whether its update of one tensor depends on the others.

`OSS` gives each rank some of the tensors. If an optimizer computes one number from all of them, for example a norm to
clip by, each rank would compute a different number, without an error. So the class takes a few steps on two small
parameters, three times. The second time the other parameter has larger values and gradients. If the first parameter
moves differently only then, the update is joint. An optimizer that sends messages in its step may count all ranks by
itself, so its trial ends at the first message, which is not sent.
"""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from scale_core import compat
from scale_core.shard import as_local

_NUM_STEPS = 3  # The first one only measures in D-Adaptation and its relatives.


def has_joint_update(optim_class: type[Optimizer], defaults: Mapping[str, Any]) -> bool:
    """Returns whether a trial shows that the update of one parameter depends on the other parameters.

    False where the trial can't run, for example because the class takes no plain list of parameters.

        >>> import torch
        >>> has_joint_update(torch.optim.Adam, {"lr": 0.1})
        False

    Args:
        optim_class: A class of optimizers.
        defaults: Arguments of its constructor. They are copied.
    """
    state = random.getstate()
    try:
        with (
            as_local(),
            torch.device("cpu"),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            compat.without_step_hooks(),
            _WithoutMessages(),  # type: ignore[no-untyped-call]
        ):
            warnings.simplefilter("ignore")
            # The larger one comes between the equal ones, so that a count of steps in the class can't look like it.
            values = [_first_param_after_steps(optim_class, defaults, factor) for factor in (1.0, 64.0, 1.0)]
            first, with_larger_other, repeated = values
            return torch.equal(first, repeated) and not torch.equal(first, with_larger_other)
    except Exception:  # If a trial can't run, that says nothing about a real step.
        return False
    finally:
        random.setstate(state)


class _WithoutMessages(TorchDispatchMode):
    """Raises where something would be sent to other ranks, which may be at no trial."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} sends a message")
        return func(*args, **(kwargs or {}))


def _first_param_after_steps(optim_class: type[Optimizer], defaults: Mapping[str, Any], factor: float) -> Tensor:
    """Returns the first of two parameters after some steps; `factor` scales the other one and its gradients."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed the generators of devices.
    random.seed(0)
    grads = torch.randn(_NUM_STEPS, 2, 4, 4)
    params = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4) * factor)]
    optimizer = optim_class(params, **copy.deepcopy(dict(defaults)))
    for first_grad, other_grad in grads:
        params[0].grad, params[1].grad = first_grad.clone(), other_grad * factor
        optimizer.step()
    return params[0].detach()
