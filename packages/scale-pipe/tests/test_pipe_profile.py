"""Measurements tell a big stage from a small one, and leave no trace."""

from collections.abc import Generator
from typing import Any

import pytest
import torch
from split_models import Tower
from torch import Tensor, nn

from scale_pipe import pop, profile_stages, skippable, split, stash
from scale_pipe.partition.profile import layer_bytes, layer_times


def trace_of(module: nn.Module) -> list[Any]:
    tensors = [tensor.clone() for tensor in module.state_dict().values()]
    return [
        *tensors,
        [p.grad for p in module.parameters()],
        [m.training for m in module.modules()],
        torch.get_rng_state(),
    ]


def assert_same(before: list[Any], after: list[Any]) -> None:
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        return x + (yield pop("skip"))


def awkward() -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Conv2d(1, 2, 3),
        Stash(),
        nn.BatchNorm2d(2),
        nn.Dropout(0.5),
        Pop(),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def test_layers_are_measured_and_nothing_is_left_of_it() -> None:
    module, sample = awkward().eval(), torch.randn(5, 1, 4, 4)
    before, given = trace_of(module), sample.clone()
    times = layer_times(module, sample, seconds=0.0)
    sizes = layer_bytes(module, sample)
    assert_same(before, trace_of(module))
    assert torch.equal(sample, given)
    assert all(forward > 0 for forward, _, _ in times)
    assert [times[index].weight_gradient > 0 for index in (1, 3, 8)] == [True] * 3
    assert [size.parameters for size in sizes] == [0, 80, 0, 16, 0, 0, 0, 0, 108]
    assert sizes[0].activations == 0 and sizes[1].activations == 5 * 2 * 4 * 4 // 4 * 4


def test_a_big_stage_takes_longer_in_each_part() -> None:
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2048), nn.Linear(2048, 2))
    costs = profile_stages(split(module, ["1", "2"]), torch.randn(64, 256), seconds=0.1, link=0.5)
    assert costs.num_stages == 3 and costs.link == (0.5, 0.5)
    assert costs.forward[1] > 2 * costs.forward[0]
    assert costs.weight_gradient[1] > 2 * costs.weight_gradient[2]
    assert costs.input_gradient[0] < costs.input_gradient[1] / 10


def test_stages_of_a_split_model_are_measured_in_their_mode() -> None:
    model = Tower()
    stages = split(model, ["blocks.1", "blocks.3"])
    sample = torch.randn(6, 4)
    before = trace_of(model)
    costs = profile_stages(stages, sample, seconds=0.0, mask=torch.ones(6, 1))
    assert_same(before, trace_of(model))
    assert min(*costs.forward, *costs.weight_gradient, *costs.input_gradient[1:]) > 0


def test_without_stages_there_is_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="there are no stages"):
        profile_stages([], torch.ones(1))


def test_one_module_is_no_list_of_stages() -> None:
    stage: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"stages are a list of modules, but got one Linear: write \[module\]"):
        profile_stages(stage, torch.ones(1, 2))


def test_an_error_says_what_was_measured() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(RuntimeError) as caught:
        layer_times(module, torch.ones(1, 3), seconds=0.0)
    assert caught.value.__notes__ == ["where layer '1', a Linear, was measured"]
    with pytest.raises(RuntimeError) as caught:
        profile_stages(list(module), torch.ones(1, 3), seconds=0.0)
    assert caught.value.__notes__ == ["where stage 1, a Linear, was measured"]
