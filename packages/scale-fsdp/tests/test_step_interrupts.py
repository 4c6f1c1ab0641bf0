"""step.py: Ctrl-C in a forward pass leaves the model as any error does, also on ranks that it has not reached."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp_parity import noise
from torch import Tensor, nn

from scale_check.exact import assert_equal
from scale_core import StepError
from scale_core.comm.group import group_of
from scale_core.flat.buffer import State
from scale_fsdp import fully_shard, register_fsdp_forward_method
from scale_fsdp.runtime.unit import units_in

PLACES = ("block", "root", "entry", "exit", "method", "evaluation")


class Interrupted(nn.Module):
    """A block that is interrupted once, where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.now = nn.Linear(3, 3), False

    def forward(self, x: Tensor) -> Tensor:
        if self.now:
            self.now = False
            raise KeyboardInterrupt
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(Interrupted(), Interrupted()), Interrupted()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def sharded(plain: nn.Module) -> nn.Module:
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block)
    register_fsdp_forward_method(fully_shard(model), "encode")
    return model


@pytest.mark.parametrize("on_all", [False, True])
@pytest.mark.ranks(0, 2, in_turn=True)
def test_an_interrupted_pass_leaves_nothing_gathered(on_all: bool) -> None:
    def left_behind(model: nn.Module) -> None:
        """What a pass that has ended must not leave."""
        units = units_in(model)
        assert not [f"{unit.name} is in use" for unit in units if unit.use_count or unit.in_backward]
        assert not [f"{unit.name} is gathered" for unit in units for b in unit.buffers if b.state is not State.SHARDED]
        shards = {id(param) for unit in units for buffer in unit.buffers for param in buffer.sharded_params}
        assert not [f"{name} is no shard" for name, param in model.named_parameters() if id(param) not in shards]

    def run(model: nn.Module, place: str, x: Tensor) -> None:
        if place == "evaluation":
            with torch.no_grad():
                model(x)
        else:
            (model.encode if place == "method" else model)(x).square().mean().backward()

    def interrupt(model: nn.Module, place: str, patch: pytest.MonkeyPatch) -> None:
        """The next pass is interrupted there, on this rank."""

        def now(*_: object) -> None:
            raise KeyboardInterrupt

        root = units_in(model)[0].root
        if place == "entry":
            patch.setattr(root, "record", now)
        elif place == "exit":
            patch.setattr(root, "end_forward", now)
        elif place == "root":
            model.head.now = True
        else:
            model.blocks[1].now = True

    group = group_of()
    plain = Net()
    model = sharded(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step, place in enumerate(("", "", *PLACES)):
        if place in ("method", "evaluation"):
            run(model, place, noise(2, 3))  # Its order becomes known, or all of it is compared.
        if place:
            mine = on_all or group.rank == group.size - 1
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt if mine else StepError):
                if mine:
                    interrupt(model, place, patch)
                run(model, place, noise(2, 3))
            left_behind(model)
            model.zero_grad()
        for each in (model, plain):
            each(noise(2, 3, seed=step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Every rank has the same batch, so a mean over 2 ranks is to the bit that of one.
    assert_equal(model, plain)


def test_a_failing_abort_does_not_hide_the_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded(Net())
    model(noise(2, 3))

    def lost(_: BaseException) -> None:
        raise RuntimeError("nobody there")

    monkeypatch.setattr(units_in(model)[0].root, "abort", lost)
    model.head.now = True
    with pytest.raises(KeyboardInterrupt) as caught:
        model(noise(2, 3))
    assert caught.value.__notes__ == ["the other ranks could not be reached: nobody there"]
