"""backward.py: units are fetched, reduced and released in order, and a pass that fails leaves no trace."""

import pytest
import torch
from fsdp_beside import noise, sharded
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp.unit import units_in


def stack(num_layers: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


UNITS = ["0", "1", "2", "3", ""]


def follow_backward() -> list[str]:
    """Which units are gathered, or being gathered, when the gradient of each one's output has been computed."""
    model = sharded(stack(), UNITS)
    seen: list[str] = []

    def watch(layer: nn.Module, name: str) -> None:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            output.register_hook(lambda _: seen.append(f"{name}: {gathered(model)}"))

        layer.register_forward_hook(hook)

    for name, layer in model.named_children():
        watch(layer, name)
    for _ in range(2):
        seen.clear()
        model(noise(2, 4)).sum().backward()
    return seen


def gathered(model: nn.Module) -> str:
    return "".join(unit.name for unit in units_in(model) if unit.gathered)


def test_in_backward_the_unit_before_is_fetched_ahead():
    assert run_ranks(follow_backward, 2) == [["3: 23", "2: 12", "1: 01", "0: 0"]] * 2


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def wait_through_a_failure(where: str) -> tuple[list[bool], bool]:
    """A failed pass between two micro-batches; the gradients, in units of what one pass alone gives."""
    alone, model = sharded(stack(), UNITS), sharded(stack(), UNITS)
    alone(noise(2, 4)).sum().backward()
    with model.no_sync():
        model(noise(2, 4)).sum().backward()

    def fail(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if where == "forward":
            raise KeyError(where)
        output.register_hook(lambda _: {}[where])

    handle = model[1].register_forward_hook(fail)
    with pytest.raises(KeyError), model.no_sync():
        model(noise(2, 4)).sum().backward()
    handle.remove()
    saved = model.state_dict()
    with model.summon_full_params():
        whole = all(torch.equal(param, saved[name]) for name, param in model.named_parameters())
    model(noise(2, 4)).sum().backward()
    pairs = zip(gradients(model), gradients(alone), strict=True)
    same = [torch.allclose(ours, 2 * one) for ours, one in pairs]
    return same, whole and all(torch.equal(saved[name], tensor) for name, tensor in stack().state_dict().items())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_fails_keeps_the_gradients_that_wait_and_leaves_none_of_its_own(where, world):
    assert run_ranks(wait_through_a_failure, world, where) == [([True] * 8, True)] * world
