from typing import Any

import pytest
import torch
from torch import nn

from scale_checkpoint import check_recomputation, checkpoint_modules, checkpoint_wrapper
from scale_checkpoint.planner.plan import best_plan
from scale_checkpoint.planner.profile import profile_memory


def test_a_wrong_argument_is_named_before_the_module_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    profile = profile_memory(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), torch.ones(1, 2), blocks=["0"], repeats=1)
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (checkpoint_wrapper, (model,), {"offload_to_cpu": "false"}, "; write offload_to_cpu=False"),
        (checkpoint_wrapper, (model,), {"min_bytes": "3"}, "checkpoint_wrapper: expected min_bytes to be an integer"),
        (checkpoint_modules, (nn.Linear, ["0"]), {}, "expected model to be a Module, got the class Linear"),
        (checkpoint_modules, (model, ["0"]), {"offload_inputs": "no"}, "; write offload_inputs=False"),
        (check_recomputation, (None,), {}, "check_recomputation: expected model to be a Module, got None"),
        (best_plan, (profile, 10**9), {"other_bytes": -3}, "other_bytes: expected 0 or more bytes of other tensors"),
    ]
    for call, args, kwargs, text in wrong:
        with pytest.raises((TypeError, ValueError), match=text):
            call(*args, **kwargs)
    assert "forward" not in vars(model) and not model._forward_hooks
    assert checkpoint_wrapper(model, min_bytes=1e6, preserve_random_state=0) is not None  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_script_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"it takes no hooks: checkpoint the plain module before"):
        checkpoint_wrapper(torch.jit.script(nn.Linear(2, 2)))
