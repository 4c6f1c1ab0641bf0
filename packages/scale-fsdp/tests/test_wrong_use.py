"""Wrong use gets an error that says what was expected, what came, and what to write instead."""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_beside import adam, noise, sharded
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp import fully_shard


def test_a_module_is_sharded_once():
    layer = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear is sharded already: call fully_shard once"):
        fully_shard(layer)


@pytest.mark.parametrize("container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_a_container_that_is_never_called_is_refused(container):
    with pytest.raises(ValueError, match=f"{type(container).__name__} is never called.*for member in container"):
        fully_shard(container)


def test_only_modules_are_sharded():
    with pytest.raises(TypeError, match=r"expected an nn.Module, got list"):
        fully_shard([nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="expected a ProcessGroup"):
        fully_shard(nn.Linear(2, 2), "gloo")


def test_parameters_without_values_are_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device.*to_empty"):
        fully_shard(model)


def test_a_step_between_forward_and_backward_is_refused():
    model = sharded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["0", "1", ""])
    optimizer = adam(model.parameters())
    model(noise(2, 3)).sum().backward()
    loss = model(noise(2, 3)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed between its forward and its backward.*loss.backward\(\) first"):
        loss.backward()


def test_second_order_gradients_are_refused_and_training_goes_on():
    model = sharded(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), ["0", ""])
    with pytest.raises(RuntimeError, match=r"'0\.\w+' has a gradient of its own.*create_graph"):
        model(noise(2, 3)).square().sum().backward(create_graph=True)
    model.zero_grad()
    model(noise(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def backward_twice() -> str:
    model = sharded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["0", "1", ""])
    loss = model(noise(2, 3)).square().sum()
    loss.backward(retain_graph=True)
    once = [param.grad.clone() for param in model.parameters()]
    loss.backward()
    same = all(torch.equal(p.grad, 2 * grad) for p, grad in zip(model.parameters(), once, strict=True))
    return "doubled" if same else "wrong"


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_backward_through_a_retained_graph_adds_the_same_gradient(world):
    assert run_ranks(backward_twice, world) == ["doubled"] * world


def use_a_foreign_group() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return "member"
    with pytest.raises(ValueError, match="no member") as caught:
        fully_shard(nn.Linear(2, 2), group)
    return str(caught.value)


def test_a_rank_outside_of_the_group_is_told_so():
    assert "new_group" in run_ranks(use_a_foreign_group, 2)[1]


def test_a_mesh_of_two_dimensions_says_which_to_pass():
    assert all("mesh['a']" in message for message in run_ranks(use_a_plane, 2))


def use_a_plane() -> str:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="one dimension") as caught:
        fully_shard(nn.Linear(2, 2), mesh)
    return str(caught.value)


def test_a_plain_model_can_be_copied_before_and_its_copies_sharded_by_themselves():
    plain = nn.Sequential(nn.Linear(2, 2))
    first, second = (fully_shard(copy.deepcopy(plain)) for _ in range(2))
    first(noise(1, 2)).sum().backward()
    assert all(param.grad is None for param in second.parameters())
