"""unit.py: a unit's buffers move together, are on record, and can be asked before a model has run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scale_core.comm.group import group_of
from scale_core.consistency.execution_order import Event
from scale_fsdp import fully_shard
from scale_fsdp.runtime.step import root_of
from scale_fsdp.runtime.unit import Unit, unit_of
from scale_fsdp.summon import gather_full_params


def mixed_unit() -> Unit:
    """A unit with two buffers, of two dtypes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    unit = unit_of(fully_shard(model))
    assert unit is not None
    return unit


@pytest.mark.ranks(0, 2)
def test_buffers_of_several_dtypes_move_together() -> None:
    unit = mixed_unit()
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    torch.manual_seed(0)
    for layer in plain:
        layer.reset_parameters()
    assert len(unit.buffers) == 2 and unit.root is None
    for buffer in unit.buffers:  # Before there is a root.
        for whole, name in zip(gather_full_params(unit, buffer), buffer.names, strict=True):
            assert whole.shape == plain.get_parameter(name).shape
    history = root_of(unit).contract.history
    root_of(unit).begin_forward(unit, "")
    unit.release()
    assert not unit.gathered and history.current.log == []
    unit.gather()
    unit.gather()
    unit.wait_gathered()
    assert unit.gathered and not unit.is_stale
    assert [entry.event for entry in history.current.log if entry.is_transfer] == [
        Event("gather", "#0"),
        Event("gather", "#1"),
    ]
    with torch.no_grad():
        unit.buffers[1].sharded_params[0].mul_(2)
    assert unit.is_stale or group_of().size == 1
    unit.release()
    assert not unit.gathered and not unit.is_stale


@pytest.mark.ranks(0, 2)
def test_withheld_gradients_are_zeros_until_a_discard() -> None:
    """A rank that has failed sends zeros; what had waited is there again when that is over."""

    def reduced_grads(unit: Unit) -> list[torch.Tensor]:
        grads = [param.grad for buffer in unit.buffers for param in buffer.sharded_params]
        return [grad for grad in grads if grad is not None]

    unit = mixed_unit()
    root_of(unit)
    for buffer in unit.buffers:
        for whole in buffer.unsharded_params:
            whole.grad = torch.ones(whole.shape, dtype=whole.dtype)
        for index in range(len(buffer.unsharded_params)):
            buffer.gradient.accumulate(index, wide=True)
    root_of(unit).publish()
    for buffer in unit.buffers:
        buffer.gradient.use_zeros()
    unit.reduce(unit.trained_buffers())
    unit.wait_reduced()
    unit.discard()
    assert reduced_grads(unit) == [] and all(buffer.has_gradient for buffer in unit.buffers)
    unit.reduce(unit.trained_buffers())
    root_of(unit).publish()
    grads = reduced_grads(unit)
    assert len(grads) == 4 and all(bool((grad == 1).all()) for grad in grads)
    assert not any(buffer.has_gradient for buffer in unit.buffers)
