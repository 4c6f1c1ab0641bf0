"""A sharded model is copied and pickled as a plain one is: the copy is equal, shares nothing and trains by itself."""

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Case, Net, batch, loss_of, shard
from fsdp_parity import noise
from through_a_file import through_a_file
from torch import Tensor, nn

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from scale_fsdp.runtime.unit import unit_of, units_in

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": partial(through_a_file, weights_only=False),
}

CASES = {
    "units in a unit": Case(),
    "flat": Case(flatten=True),
    "wrapper": Case(wrapper=True, wrapping="deep"),
    "tied units": Case(wrapping="leaves", reshard=False),
    "half": Case(precision="bf16, fp32 reduction"),
    "one unit": Case(wrapping="root", optimizer="sgd"),
}


def built(case: Case) -> nn.Module:
    torch.manual_seed(7)
    model = Net(case.model, blocks=2)
    model.blocks[0].up.requires_grad_(False)
    return shard(model, case)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam((param for param in model.parameters() if param.requires_grad), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = loss_of(model(batch("gpt", number, group_of().rank)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def storages(model: nn.Module) -> set[int]:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for unit in units_in(model):
        for buffer in unit.buffers:
            tensors += [buffer.shard, buffer.full, *buffer.sharded_params, *buffer.unsharded_params]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


OF_PASSES = ("pending_backwards", "had_backward")
"""What a unit knows of passes whose backward may still come; a copy has had none."""


def assert_copied(one: nn.Module, other: nn.Module, what: str = "") -> None:
    """Compares all of a copy but its values with the original, without a communication."""
    ours, theirs = list(one.named_parameters()), list(other.named_parameters())
    assert [name for name, _ in ours] == [name for name, _ in theirs], what
    for (name, param), (_, copied) in zip(ours, theirs, strict=True):
        assert shard_of(param) == shard_of(copied) is not None, (what, name)
        of_param, of_copy = ((each.dtype, each.requires_grad, type(each)) for each in (param, copied))
        assert of_param == of_copy, (what, name)
    assert [type(module) for module in one.modules()] == [type(module) for module in other.modules()], what
    assert not storages(one) & storages(other), what
    for unit, its in zip(units_in(one), units_in(other), strict=True):
        for name, value in vars(unit).items():
            if name not in OF_PASSES and isinstance(value, bool | int | str | None):
                assert getattr(its, name) == value, (what, unit.name, name)
        prefetched = [[each.name for each in unit.prefetch.get("forward", ())] for unit in (unit, its)]
        assert prefetched[0] == prefetched[1], (what, unit.name)
    assert not set(units_in(one)) & set(units_in(other)), what
    assert all(unit_of(unit.module) is unit for unit in units_in(other)), what


@pytest.mark.ranks(1, 2)
def test_a_copy_is_equal_shares_nothing_and_trains_by_itself():
    for (name, case), (way, copied) in itertools.product(CASES.items(), COPIES.items()):
        what, model = f"{name}, {way}", built(case)
        optimizer, fresh = adam(model), copied(model)
        assert_copied(model, fresh, what)
        assert_equal(model, fresh, what)
        fresh_optimizer = adam(fresh)
        assert [step(model, optimizer, n) for n in range(2)] == [step(fresh, fresh_optimizer, n) for n in range(2)]
        later = copied(model)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        assert_copied(model, later, what)
        assert_equal(later, fresh, what)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, later)]
        assert step(model, optimizers[0], 5) == step(later, optimizers[1], 5), what
        assert_equal(model, later, what)
        assert_equal(fresh, before, what)


@pytest.mark.ranks(1, 3)
def test_a_model_and_its_optimizer_are_copied_as_a_pair():
    for copied, model_first, flatten in itertools.product(COPIES.values(), (True, False), (True, False)):
        model = built(Case(flatten=flatten))
        optimizer = adam(model)
        step(model, optimizer, 0)
        if model_first:
            its_model, its_optimizer = copied((model, optimizer))
        else:
            its_optimizer, its_model = copied((optimizer, model))
        ours = [step(model, optimizer, n) for n in range(1, 3)]
        theirs = [step(its_model, its_optimizer, n) for n in range(1, 3)]
        assert ours == theirs, f"model first {model_first}, flat {flatten}: {ours} and {theirs}"
        assert_equal(model, its_model)


class Coder(nn.Module):
    """Has modules with weights of their own kinds, a buffer, and a method that computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.rnn, self.norm = nn.LSTM(3, 4, batch_first=True), nn.BatchNorm1d(5)
        self.head = nn.Linear(4, 3)

    def encode(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.norm(self.rnn(x)[0])
        return encoded

    def forward(self, x: Tensor) -> Tensor:
        decoded: Tensor = self.head(self.encode(x))
        return decoded


@pytest.mark.ranks(2)
def test_what_the_user_has_set_on_units_is_copied():
    model = built(Case())
    model.set_reshard_after_forward(False).set_reshard_after_backward(False, recurse=False)
    model.set_requires_gradient_sync(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    for copied in COPIES.values():
        assert_copied(model, copied(model))


@pytest.mark.ranks(2)
def test_methods_guards_and_hooks_of_a_copy_are_its_own():
    for copied in COPIES.values():
        model = fully_shard(Coder(), reshard_after_forward=1)
        register_fsdp_forward_method(model, "encode")
        model(noise(2, 5, 3)).sum().backward()
        its = copied(model)
        assert torch.equal(its.norm.running_mean, model.norm.running_mean)
        for x in (noise(2, 5, 3, seed=1), noise(2, 5, 3, seed=2)):
            assert torch.equal(model.encode(x), its.encode(x)) and torch.equal(model(x), its(x))
            its.encode(x).sum().backward()
        assert its.rnn.weight_ih_l0 is its.rnn._flat_weights[0] and its.encode._module is its
        own, called = its.rnn.weight_ih_l0, []
        its.register_forward_pre_hook(lambda *_: called.append(1))  # noqa: B023
        its(noise(2, 5, 3))
        assert called and own is its.rnn.weight_ih_l0
        with pytest.raises(RuntimeError, match="a Linear of the root unit was called outside of the unit's forward"):
            its.head(noise(2, 4))
        its.head.weight = nn.Parameter(torch.ones(3, 4))
        with pytest.raises(RuntimeError, match=r"'head.weight' was replaced by a different tensor, by an assign"):
            its(noise(2, 5, 3))
        outer = fully_shard(nn.Sequential(its, nn.Linear(3, 3)))
        outer(noise(2, 5, 3)).sum().backward()
        assert unit_of(its).name == "0" and "0.head.weight" in outer.state_dict()


@pytest.mark.ranks(2)
def test_a_model_in_use_and_a_part_of_a_unit_are_not_copied():
    messages: list[str] = []
    model = fully_shard(Coder())

    def forward(module: nn.Module, *_: object) -> None:
        with pytest.raises(RuntimeError, match="in use, by a forward or backward pass") as caught:
            copy.deepcopy(model)
        messages.append(str(caught.value))

    handle = model.norm.register_forward_pre_hook(forward)
    model(noise(2, 5, 3))
    handle.remove()
    with model.summon_full_params(), pytest.raises(RuntimeError, match="in use"):
        pickle.dumps(model)
    with pytest.raises(TypeError, match="a module in the root unit can't be copied without that unit's Coder"):
        copy.deepcopy(model.head)
    assert isinstance(
        copy.deepcopy(nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 3))))[0], FullyShardedDataParallel
    )
    (message,) = messages
    assert message.startswith("deepcopy and pickle: the parameters of the root unit are in use")


def write(folder: str) -> list[float]:
    model = built(Case(wrapper=True))
    optimizer = adam(model)
    step(model, optimizer, 0)
    torch.save((model, optimizer), f"{folder}/{group_of().rank}.pt")
    return [step(model, optimizer, n) for n in range(1, 3)]


def read(folder: str) -> list[float]:
    rank = group_of().rank
    with pytest.raises(
        ValueError, match=rf"the shard of rank {1 - rank} of 2, and this is rank {rank}: save one file per"
    ):
        torch.load(f"{folder}/{1 - rank}.pt", weights_only=False)
    model, optimizer = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    model.module.blocks[0].register_forward_hook(lambda *_: None)  # Its number is none that is taken.
    return [step(model, optimizer, n) for n in range(1, 3)]


def read_on_three(folder: str) -> list[float]:
    rank = dist.get_rank()
    with pytest.raises(
        ValueError, match=r"over ranks \[0, 1\], but the default group has ranks \[0, 1, 2\].*new_group"
    ):
        torch.load(f"{folder}/0.pt", weights_only=False)
    dist.new_group([0, 1])
    return [] if rank == 2 else [type(torch.load(f"{folder}/{rank}.pt", weights_only=False)[0]).__name__]


def test_another_process_reads_its_own_file_and_goes_on(tmp_path: Path):
    expected = run_ranks(write, 2, str(tmp_path))
    assert run_ranks(read, 2, str(tmp_path)) == expected
    assert run_ranks(read_on_three, 3, str(tmp_path)) == [
        ["FullyShardedDataParallel"],
        ["FullyShardedDataParallel"],
        [],
    ]
    with pytest.raises(ValueError, match=r"over ranks \[0, 1\], but torch.distributed is not initialized"):
        torch.load(tmp_path / "0.pt", weights_only=False)
