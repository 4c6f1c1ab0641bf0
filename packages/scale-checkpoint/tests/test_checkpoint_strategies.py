"""Ways by name."""

import pytest
import torch
from torch import nn

from scale_checkpoint import apply_checkpointing
from scale_checkpoint.planner.blocks import applied, resolve_strategies

CPU = torch.device("cpu")


def test_offload_is_a_strategy_where_the_device_is_not_the_host() -> None:
    assert list(resolve_strategies(None, CPU)) == ["keep", "recompute", "selective"]
    assert list(resolve_strategies(None, torch.device("cuda"))) == ["keep", "recompute", "selective", "offload"]


def test_keep_and_recompute_are_always_among_them() -> None:
    assert resolve_strategies(["selective"], CPU) == {
        "keep": "keep",
        "recompute": "recompute",
        "selective": "selective",
    }
    assert resolve_strategies({"mine": "selective"}, CPU)["mine"] == "selective"
    assert resolve_strategies({"mine": ["addmm"]}, CPU)["mine"] == ("addmm",)


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a strategy is one of 'keep', .*'offload', got 'drop'"):
        resolve_strategies(["drop"], CPU)
    with pytest.raises(ValueError, match=r"strategy 'mine': expected .* got 'addmm'"):
        resolve_strategies({"mine": "addmm"}, CPU)
    with pytest.raises(TypeError, match="plans are saved, so give names of operators"):
        resolve_strategies({"mine": [torch.ops.aten.mm]}, CPU)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="give names of operators"):
        resolve_strategies({"mine": []}, CPU)
    mine = resolve_strategies({"mine": iter(["addmm"])}, CPU)["mine"]  # type: ignore[dict-item]
    assert mine == ("addmm",)
    with pytest.raises(ValueError, match="name of no operator"):
        resolve_strategies({"mine": ["admm"]}, CPU)


def test_a_module_is_afterwards_what_it_was() -> None:
    module = nn.Linear(2, 2)
    with applied(module, "recompute"):
        assert "forward" in vars(module)
    assert "forward" not in vars(module) and not module._forward_pre_hooks
    apply_checkpointing(module, "offload")
    before = module.forward
    with applied(module, "keep"):
        assert "forward" not in vars(module)
    assert module.forward is before and len(module._forward_pre_hooks) == 1
