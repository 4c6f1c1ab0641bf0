"""Ways by name."""

import pytest
import torch
from torch import nn

from scale_checkpoint import apply_checkpointing
from scale_checkpoint.planner.strategies import resolve, treated

CPU = torch.device("cpu")


def test_offload_is_a_way_where_the_device_is_not_the_host() -> None:
    assert list(resolve(None, CPU)) == ["keep", "recompute", "selective"]
    assert list(resolve(None, torch.device("cuda"))) == ["keep", "recompute", "selective", "offload"]


def test_keep_and_recompute_are_always_among_them() -> None:
    assert resolve(["selective"], CPU) == {"keep": "keep", "recompute": "recompute", "selective": "selective"}
    assert resolve({"mine": "selective"}, CPU)["mine"] == "selective"
    assert resolve({"mine": ["addmm"]}, CPU)["mine"] == ("addmm",)


def test_what_is_no_way_is_refused() -> None:
    with pytest.raises(ValueError, match="a way is one of 'keep', 'recompute', 'selective', 'offload', but 'drop'"):
        resolve(["drop"], CPU)
    with pytest.raises(ValueError, match=r"the way 'mine' is .* but is 'addmm'"):
        resolve({"mine": "addmm"}, CPU)
    with pytest.raises(TypeError, match="names operators in a list of strings"):
        resolve({"mine": [torch.ops.aten.mm]}, CPU)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="name of no operator"):
        resolve({"mine": ["admm"]}, CPU)


def test_a_module_is_afterwards_what_it_was() -> None:
    module = nn.Linear(2, 2)
    with treated(module, "recompute"):
        assert "forward" in vars(module)
    assert "forward" not in vars(module) and not module._forward_pre_hooks
    apply_checkpointing(module, "offload")
    before = module.forward
    with treated(module, "keep"):
        assert "forward" not in vars(module)
    assert module.forward is before and len(module._forward_pre_hooks) == 1
