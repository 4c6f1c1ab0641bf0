"""step_checks.py: an optimizer steps on the model's own parameters, on full gradients, and leaves a trace."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.optim.step_checks import allow_full_state, invalidate_cache, register_replaced, register_shard_owner
from scale_core.optim.step_hooks import watch_optimizers
from scale_core.shard import Axis, Placement, Shard, as_local
from scale_core.sharded_tensor.replicated_parameter import set_reduced_gradient
from scale_core.sharded_tensor.tensor import local_tensor, set_shard


@pytest.fixture(autouse=True)
def _watched() -> None:
    watch_optimizers()


class Owner:
    """A minimal `ShardOwner`."""

    def __init__(self, *params: nn.Parameter) -> None:
        self.sharded_params, self.names, self.has_gradient = list(params), ["layer.weight", "layer.bias"], False


def with_grad(size: int = 2) -> nn.Parameter:
    param = nn.Parameter(torch.ones(size))
    param.grad = torch.ones(size)
    return param


def as_shard(param: nn.Parameter) -> nn.Parameter:
    set_shard(param, Shard("weight", (param.numel(),), 0, param.numel(), (Axis(Group(), Placement.SHARD),)))
    return param


def test_a_step_on_replaced_parameters_is_refused_by_name() -> None:
    param, owner = with_grad(), Owner()
    optimizer = torch.optim.SGD([with_grad(), param], lr=1.0)
    register_replaced(param, owner, 1)
    owner.names[1] = "block.layer.bias"  # As a module around it is sharded later.
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"SGD was built before.*'block.layer.bias'.*SGD\(model.parameters\(\)"):
            optimizer.step()
    assert param.tolist() == [1, 1] and optimizer.param_groups[0]["params"][0].tolist() == [1, 1]


def test_an_optimizer_around_another_says_itself_how_it_is_built() -> None:
    class Around(torch.optim.SGD):
        construction = "Around(Adam, model.parameters(), ...)"

    param = with_grad()
    optimizer = Around([param], lr=1.0)
    register_replaced(param, Owner(), 0)
    with pytest.raises(RuntimeError, match=r"afterwards: Around\(Adam, model.parameters\(\), \.\.\.\)"):
        optimizer.step()


def test_a_group_added_between_two_steps_is_looked_at() -> None:
    replaced = with_grad()
    register_replaced(replaced, Owner(), 0)
    optimizer = torch.optim.SGD([with_grad()], lr=1.0)
    optimizer.step()
    optimizer.add_param_group({"params": [replaced]})
    with pytest.raises(RuntimeError, match=r"'layer.weight' is not the model's"):
        optimizer.step()


def test_an_optimizer_stepped_before_a_replacement_is_refused() -> None:
    param = with_grad()
    optimizer = torch.optim.SGD([param], lr=1.0)
    optimizer.step()
    register_replaced(param, Owner(), 0)
    with pytest.raises(RuntimeError, match=r"'layer.weight' is not the model's"):
        optimizer.step()


class Around(torch.optim.SGD):
    """Steps by another optimizer, and knows who is around it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=1.0)
        self.several = [inner]
        inner.outer = self  # type: ignore[attr-defined]


def test_an_optimizer_without_gradients_is_refused_if_withheld() -> None:
    param = with_grad()
    early, owner, wrapper = torch.optim.SGD([param], lr=1.0), torch.optim.Adam([param], lr=1.0), nn.Identity()
    early.step()
    reduced: Any = SimpleNamespace(name="layer.weight", optimizer=owner, wrapper=wrapper, read=lambda: None)
    set_reduced_gradient(param, reduced)
    invalidate_cache()
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\): Identity hands .* 'layer.weight' to its Adam"):
        early.step()
    assert param.tolist() == [0, 0]
    owner.step()
    Around(owner).step()
    reduced.wrapper = None
    early.step()


def test_waiting_gradients_refuse_steps_of_their_parameters_only() -> None:
    mine, other = with_grad(), with_grad()
    owner = Owner(mine)
    register_shard_owner(owner)
    optimizer = torch.optim.Adam([mine], lr=1.0)
    optimizer.step()
    owner.has_gradient = True
    with pytest.raises(RuntimeError, match=r"Adam.step\(\): gradients of 'layer.weight'.*no_sync.*model.zero_grad"):
        optimizer.step()
    torch.optim.Adam([other], lr=1.0).step()
    owner.has_gradient = False
    optimizer.step()


@pytest.mark.parametrize("by_name", [True, False])
def test_after_a_closure_what_waits_is_looked_at(by_name: bool) -> None:
    param = with_grad()
    owner = Owner(param)
    register_shard_owner(owner)
    optimizer = torch.optim.SGD([param], lr=1.0)

    def closure(reduces: bool) -> float:
        owner.has_gradient = not reduces
        return 3.0

    def step(reduces: bool) -> float | None:
        return optimizer.step(closure=lambda: closure(reduces)) if by_name else optimizer.step(lambda: closure(reduces))

    owner.has_gradient = True
    assert step(reduces=True) == 3.0
    assert param.tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match="have not been reduced"):
        step(reduces=False)
    assert param.tolist() == [0.0, 0.0]


def test_an_optimizer_given_other_parameters_is_checked_again() -> None:
    mine, other = with_grad(), with_grad()
    optimizer = torch.optim.SGD([other], lr=1.0)
    owner = Owner(mine)
    register_shard_owner(owner)
    optimizer.step()
    owner.has_gradient = True
    optimizer.param_groups[0]["params"] = [mine]
    with pytest.raises(RuntimeError, match="have not been reduced"):
        optimizer.step()


def test_an_owner_that_is_gone_refuses_nothing() -> None:
    param = with_grad()
    owner = Owner(param)
    owner.has_gradient = True
    register_shard_owner(owner)
    del owner
    torch.optim.SGD([param], lr=1.0).step()


@pytest.mark.parametrize("fused", [True, False])
def test_every_step_on_a_shard_counts_as_a_new_version(fused: bool) -> None:
    flat: Tensor = torch.ones(4)
    piece = as_shard(nn.Parameter(flat[:2]))
    piece.grad = torch.ones(2)
    before = flat._version
    torch.optim.Adam([piece], lr=1.0, fused=fused).step()
    assert flat._version > before
    assert piece._version == flat._version


def test_a_parameter_exchanged_in_a_group_counts_its_steps() -> None:
    first, old, new = (as_shard(with_grad()) for _ in range(3))
    optimizer = torch.optim.SGD([first, old], lr=1.0, fused=True)
    optimizer.step()
    optimizer.param_groups[0]["params"][1] = new
    before = [param._version for param in (old, new)]
    optimizer.step()
    assert [param._version for param in (old, new)] == [before[0], before[1] + 1]


def test_an_optimizer_keeps_no_parameter_that_it_has_lost() -> None:
    optimizer = torch.optim.SGD([{"params": [as_shard(with_grad())]}, {"params": [with_grad()]}], lr=1.0)
    optimizer.step()
    gone = weakref.ref(optimizer.param_groups.pop(0)["params"][0])
    gc.collect()
    assert gone() is None


def test_a_shallow_copy_of_a_replaced_parameter_is_ordinary() -> None:
    param = with_grad()
    register_replaced(param, Owner(), 0)
    copied = copy.copy(param)
    copied.grad = torch.ones(2)
    torch.optim.SGD([copied], lr=1.0).step()
    assert copied.tolist() == [0, 0]


def test_watching_twice_is_watching_once() -> None:
    piece = as_shard(with_grad())
    watch_optimizers()
    optimizer = torch.optim.SGD([piece], lr=1.0, fused=True)
    before = piece._version
    optimizer.step()
    assert piece._version == before + 1


def piece_of(shape: tuple[int, ...], start: int, stop: int, ranks: int = 2) -> nn.Parameter:
    """Elements `start` to `stop` of a parameter that this many ranks hold between them."""
    param = nn.Parameter(torch.ones(stop - start, 1) if len(shape) == 2 else torch.ones(stop - start))
    param.grad = torch.ones_like(param)
    set_shard(param, Shard("layer.weight", shape, start, stop, (Axis(Group(size=ranks), Placement.SHARD),)))
    return param


class Svd(torch.optim.SGD):
    """Needs the full matrix, and has changed the first parameter by then."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                torch.linalg.svd(param.add_(1.0))


class Trust(torch.optim.SGD):
    """Divides by a norm, which all ranks measure together."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.div_(param.norm())


@pytest.mark.parametrize("cls", [Svd, getattr(torch.optim, "Muon", Svd)])
@pytest.mark.parametrize("held", [(0, 4), (0, 2), (2, 2)])
def test_what_needs_other_ranks_elements_is_refused_unchanged(cls: type, held: tuple[int, int]) -> None:
    piece = piece_of((4, 1), *held)
    optimizer = cls([piece], lr=1.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{cls.__name__}\.step\(\): .* of 'layer.weight' \[.*OSS\("):
            optimizer.step()
    assert local_tensor(piece).tolist() == [[1.0]] * (held[1] - held[0])


def test_a_step_of_reductions_and_elementwise_functions_is_taken() -> None:
    piece = piece_of((4,), 0, 2)
    Trust([piece], lr=1.0).step()  # The ranks of this group are taken to have the same.
    assert torch.equal(local_tensor(piece), torch.full((2,), 0.5))


def test_plain_parameters_and_a_world_of_one_step_as_ever() -> None:
    Trust([with_grad(), piece_of((2,), 0, 1, ranks=1)], lr=1.0).step()


def test_the_state_of_a_shard_is_sharded_where_it_is_read() -> None:
    piece = piece_of((4,), 0, 2)
    optimizer = torch.optim.Adam([piece], lr=1.0)
    optimizer.step()
    assert optimizer.state[piece]["exp_avg"].shape == (4,) and optimizer.state[piece]["step"].shape == ()
    assert optimizer.state.get(with_grad()) is None and list(optimizer.state) == [piece]


@pytest.mark.parametrize(
    "cls, reason", [(torch.optim.LBFGS, "cat of 'layer.weight'"), (torch.optim.SparseAdam, "dense")]
)
@pytest.mark.parametrize("held", [(0, 4), (0, 2)])
def test_what_no_shard_can_train_with_is_refused_on_all_ranks(cls: type, reason: str, held: tuple[int, int]) -> None:
    optimizer = cls([piece_of((4,), *held)], lr=1.0)
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}.step\(\): .*{reason}"):
        optimizer.step(lambda: torch.zeros(()))


def test_one_rank_may_step_for_all_that_look_at_all_parameters() -> None:
    piece = piece_of((4, 1), 0, 4)
    optimizer = Svd([piece], lr=1.0)
    allow_full_state(optimizer)
    with as_local():
        optimizer.step()
    assert local_tensor(piece).tolist() == [[2.0]] * 4


def test_a_group_of_pieces_that_is_added_later_is_refused_too() -> None:
    plain = nn.Parameter(torch.ones(1, 1))
    optimizer = Svd([plain], lr=1.0)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(piece_of((4, 1), 0, 2))
    with pytest.raises(RuntimeError, match=r"Svd\.step"):
        optimizer.step()
    assert plain.item() == 2.0


def test_elementwise_optimizers_step_on_pieces() -> None:
    piece = piece_of((4,), 0, 2)
    torch.optim.SGD([piece], lr=1.0).step()
    assert local_tensor(piece).tolist() == [0, 0]
