"""backward.py: reduced gradients are told of while the backward pass of other units still runs, or at its end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import scale_fsdp.offload.backward
from scale_check.exact import assert_equal
from scale_core import StepError
from scale_core.comm.group import group_of
from scale_core.hooks.gradients import register_grad_published_hook, register_reduced_grad_hook
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import OffloadOptimizer, fully_shard
from scale_fsdp.offload.backward import ConsumedGradient

UNITS = 6


class Layers(nn.Module):
    """Units of one weight each, that write down when their backward begins.

    Attributes:
        log: What has happened.
        fails_at: The unit at which the next backward fails.
        used: For each unit, which others' gradients had been used up when its backward began.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(UNITS))
        self.layers[3].idle = nn.Parameter(torch.ones(3))  # Nobody uses it, as its unit's reduction can't know.
        self.log: list[str] = []
        self.fails_at = -1
        self.used: dict[int, list[int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x.register_hook(self._begins(number))
        return x

    def _begins(self, number: int) -> Callable[[Tensor], None]:
        def begins(_: Tensor) -> None:
            self.log.append(f"backward {number}")
            grads = [layer._parameters["weight"].grad for layer in self.layers]  # type: ignore[union-attr]
            self.used[number] = [unit for unit, grad in enumerate(grads) if isinstance(grad, ConsumedGradient)]
            if self.fails_at == number:
                self.fails_at = -1
                raise ValueError("on purpose")

        return begins


def sharded(**kwargs: Any) -> Layers:
    model = Layers()
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + group_of().rank))
    model(x).square().sum().backward()


def names(params: Sequence[Tensor]) -> list[str]:
    shards = [shard_of(param) for param in params]
    return [shard.name.split(".")[1] for shard in shards if shard is not None and shard.name.endswith("weight")]


@contextmanager
def listening(log: list[str], at_once: Sequence[Tensor] = ()) -> Iterator[None]:
    def arriving(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        assert all(
            param.grad is None and grad.shape == local_tensor(param).shape
            for param, grad in zip(params, grads, strict=True)
        )
        log.extend(f"arriving {name}" for name in names(params))

    def reduced(params: Sequence[Tensor]) -> None:
        assert all(param.grad is not None for param in params)
        log.extend(f"reduced {name}" for name in names(params))

    handles = [register_reduced_grad_hook(arriving), register_grad_published_hook(reduced, set(at_once))]
    yield
    for handle in handles:
        handle.remove()


def lead(log: Sequence[str], word: str) -> list[int]:
    """For each unit but the last two of the pass, how many begin their backward after it and before it is told of."""
    begins = [log.index(f"backward {number}") for number in range(UNITS)]
    told = {number: log.index(f"{word} {number}") for number in range(2, UNITS)}
    return [sum(begins[number] < begin < told[number] for begin in begins[:number]) for number in range(2, UNITS)]


@pytest.mark.ranks(0, 2)
def test_gradients_are_told_of_one_unit_later() -> None:
    model = sharded()
    with listening(model.log):
        for step in range(3):
            model.log.clear()
            backward(model, step)
            # Unit k's gradient is known before the backward of unit k - 2 begins: only that of k - 1 has.
            assert lead(model.log, "arriving") == [1] * (UNITS - 2), model.log
            end = model.log.index("reduced 0")
            assert end == len(model.log) - UNITS, "all stand in grad when the pass is over, and not before"
            model.zero_grad()
        backward(model, 3)
        model.log.clear()
        backward(model, 3)
        assert not [line for line in model.log if line.startswith("arriving")], "they are added to what is there"


@pytest.mark.ranks(0, 2)
def test_gradients_used_up_in_the_pass_are_in_grad_at_once() -> None:
    model = sharded()
    first = model.layers[2].weight
    with listening(model.log, at_once=[first]):
        backward(model, 0)
    assert model.log.index("reduced 2") < model.log.index("backward 0")
    assert model.log.count("reduced 2") == 1 and "arriving 2" not in model.log
    assert model.log.index("arriving 3") < model.log.index("backward 1") < model.log.index("reduced 3")


@pytest.mark.ranks(0, 2)
def test_reduced_gradients_are_those_of_the_pass() -> None:
    mine, theirs = sharded(), sharded()
    seen: dict[str, Tensor] = {}

    def arriving(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        for param, grad in zip(params, grads, strict=True):
            seen[shard_of(param).name] = grad  # type: ignore[union-attr]

    backward(theirs, 0)
    handle = register_reduced_grad_hook(arriving)
    backward(mine, 0)
    handle.remove()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        if one.grad is None or other.grad is None:
            assert one.grad is other.grad is None, "a parameter that nobody has used"
            continue
        assert one.grad is seen[shard_of(one).name] and torch.equal(one.grad, other.grad)  # type: ignore[union-attr]


@pytest.mark.ranks(2)
def test_gradients_of_replicas_are_told_of_two_units_later() -> None:
    model = sharded(mesh=init_device_mesh("cpu", (group_of().size, 1), mesh_dim_names=("copies", "shard")))
    with listening(model.log):
        backward(model, 0)
    assert lead(model.log, "arriving") == [2] * (UNITS - 2), model.log
    assert "arriving 0" not in model.log and model.log[-1] == f"reduced {UNITS - 1}"


@pytest.mark.ranks(2)
def test_an_overlapped_step_uses_gradients_during_the_pass() -> None:
    """With overlap_step=True a unit has its new values when the backward of the second unit after it begins."""
    mine, theirs = sharded(), sharded()
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    other = torch.optim.AdamW(theirs.parameters(), fused=False, **settings)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(scale_fsdp.offload.backward, "CHUNK_ELEMENTS", 1)
        ours = OffloadOptimizer(
            torch.optim.AdamW, mine.parameters(), host_fraction=0.5, overlap_step=True, fused=False, **settings
        )
        for step in range(3):
            backward(mine, step)
            backward(theirs, step)
            assert mine.used == {number: list(range(number + 2, UNITS)) for number in range(UNITS)}
            ours.step()
            other.step()
            other.zero_grad()
            assert_equal(mine, theirs)


@pytest.mark.ranks(2)
def test_a_pass_that_fails_gives_no_gradient() -> None:
    def failure_in(model: Layers) -> str:
        """One rank fails in the backward pass; what the ranks are told."""
        if group_of().rank == 1:
            model.fails_at = 1
        expected = ValueError if group_of().rank == 1 else StepError
        with pytest.raises(expected) as caught:
            backward(model, 2)
        return str(caught.value) + "".join(getattr(caught.value, "__notes__", []))

    model = sharded()
    optimizer = OffloadOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, overlap_step=True)
    kept = sharded()
    for each in (model, kept):
        for step in range(2):
            backward(each, step)
            optimizer.step()
            each.zero_grad()
    before = copy.deepcopy([param.detach() for param in kept.parameters()])
    with listening(kept.log):
        said = failure_in(kept)
    assert [param.grad for param in kept.parameters()] == [None] * (UNITS + 1)
    assert all(torch.equal(one, other) for one, other in zip(before, kept.parameters(), strict=True))
    assert group_of().rank == 1 or "Parameters and optimizer state are as before it" in said
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(scale_fsdp.offload.backward, "CHUNK_ELEMENTS", 1)
        said = failure_in(model)
    advice = "overlap_step=True) may have updated some of the parameters: load the last snapshot"
    assert group_of().rank == 1 or advice in said  # That of rank 1 is autograd's own, which nobody can add to.
    for fails in (optimizer.step, lambda: backward(model, 3)):
        with pytest.raises(RuntimeError, match=r"after 'layers.*were updated in it .*zero_grad\(\) to go on"):
            fails()
    optimizer.zero_grad()
    backward(model, 4)
    optimizer.step()
