"""What is stashed waits until it is popped, and no longer."""

import gc
import weakref

import pytest
import torch

from scale_pipe.skip.layout import Skip
from scale_pipe.skip.portal import Portals

FAR, NEAR = (None, "far"), (None, "near")


def test_a_tensor_goes_to_the_partition_that_pops_it() -> None:
    portals = Portals([Skip(FAR, 0, 2), Skip(NEAR, 0, 1)])
    portals.put(0, {FAR: "far 0", NEAR: "near 0"})
    portals.put(1, {FAR: "far 1", NEAR: None})
    assert portals.pop(0, 0) == {}
    assert portals.pop(1, 1) == {NEAR: None}
    assert portals.pop(0, 1) == {NEAR: "near 0"}
    assert portals.pop(0, 2) == {FAR: "far 0"} and portals.pop(1, 2) == {FAR: "far 1"}


def test_what_was_taken_is_held_no_longer() -> None:
    portals, tensor = Portals([Skip(FAR, 0, 1)]), torch.ones(1)
    seen = weakref.ref(tensor)
    portals.put(0, {FAR: tensor})
    del tensor
    assert seen() is not None
    gc.disable()
    try:
        portals.pop(0, 1)
        assert seen() is None and portals.pop(0, 1) == {}
    finally:
        gc.enable()


def test_what_waits_is_not_overwritten_in_place() -> None:
    portals, tensor = Portals([Skip(FAR, 0, 2)]), torch.ones(2, 2)
    portals.put(0, {FAR: [tensor]})
    portals.check_not_overwritten(0, (tensor.clone(), tensor.to_sparse()))
    portals.check_not_overwritten(1, tensor)  # Of another micro-batch.
    with pytest.raises(RuntimeError, match=r"'far' is stashed.*yield stash\('far', input.clone\(\)\).*inplace=False"):
        portals.check_not_overwritten(0, {"input": tensor[1:]})
