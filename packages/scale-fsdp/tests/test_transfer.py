"""A sharded model is copied and pickled as a plain one is: the copy is equal, shares nothing and trains by itself."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_beside import noise
from fsdp_cases import Case, Net, batch, differing_weights, loss_of, shard
from torch import Tensor, nn

from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from scale_fsdp.runtime.unit import unit_of, units_in


def saved_by_torch(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved_by_torch}

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
    model = Net(case.model)
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


def unlike(one: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yields what a copy has otherwise than its original, without a communication."""
    ours, theirs = list(one.named_parameters()), list(other.named_parameters())
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        yield "names"
    for (name, mine), (_, its) in zip(ours, theirs, strict=True):
        if shard_of(mine) != shard_of(its) or shard_of(mine) is None:
            yield f"{name}: {shard_of(mine)} and {shard_of(its)}"
        if (mine.dtype, mine.requires_grad, type(mine)) != (its.dtype, its.requires_grad, type(its)):
            yield f"{name}: dtype, requires_grad or type"
    if [type(module) for module in one.modules()] != [type(module) for module in other.modules()]:
        yield "classes"
    if storages(one) & storages(other):
        yield "memory is shared"
    for mine, its in zip(units_in(one), units_in(other), strict=True):
        for name, value in vars(mine).items():
            if name in OF_PASSES or not isinstance(value, bool | int | str | None):
                continue
            if getattr(its, name) != value:
                yield f"unit {mine.name}: {name} is {getattr(its, name)!r} in place of {value!r}"
        prefetched = [[each.name for each in unit.prefetch.get("forward", ())] for unit in (mine, its)]
        if prefetched[0] != prefetched[1]:
            yield f"unit {mine.name}: what it fetches"
    if set(units_in(one)) & set(units_in(other)) or any(unit_of(unit.module) is not unit for unit in units_in(other)):
        yield "units are shared"


def each_way() -> list[str]:
    wrong = []
    for name, case in CASES.items():
        for way, copied in COPIES.items():
            model = built(case)
            optimizer = adam(model)
            fresh = copied(model)
            wrong += [
                f"{name}, {way}, fresh: {line}" for line in (*unlike(model, fresh), *differing_weights(model, fresh))
            ]
            fresh_optimizer = adam(fresh)
            if [step(model, optimizer, n) for n in range(2)] != [step(fresh, fresh_optimizer, n) for n in range(2)]:
                wrong.append(f"{name}, {way}: a fresh copy has other losses")
            later = copied(model)
            before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
            wrong += [
                f"{name}, {way}, later: {line}" for line in (*unlike(model, later), *differing_weights(later, fresh))
            ]
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, later)]
            if step(model, optimizers[0], 5) != step(later, optimizers[1], 5):
                wrong.append(f"{name}, {way}: a later copy has another loss")
            wrong += [f"{name}, {way}, end: {line}" for line in differing_weights(model, later)]
            wrong += [f"{name}, {way}: the other copy has changed" for _ in differing_weights(fresh, before)]
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_a_copy_is_equal_shares_nothing_and_trains_by_itself(world):
    assert not any(run_ranks(each_way, world))


def with_optimizer() -> list[str]:
    wrong = []
    for copied in COPIES.values():
        for model_first in (True, False):
            for flatten in (True, False):
                model = built(Case(flatten=flatten))
                optimizer = adam(model)
                step(model, optimizer, 0)
                if model_first:
                    its_model, its_optimizer = copied((model, optimizer))
                else:
                    its_optimizer, its_model = copied((optimizer, model))
                ours = [step(model, optimizer, n) for n in range(1, 4)]
                theirs = [step(its_model, its_optimizer, n) for n in range(1, 4)]
                wrong += [] if ours == theirs else [f"model first {model_first}, flat {flatten}: {ours} and {theirs}"]
                wrong += differing_weights(model, its_model)
    return wrong


@pytest.mark.parametrize("world", [1, 3])
def test_a_model_and_its_optimizer_are_copied_as_a_pair(world):
    assert not any(run_ranks(with_optimizer, world))


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


def coder() -> nn.Module:
    model = fully_shard(Coder(), reshard_after_forward=1)
    register_fsdp_forward_method(model, "encode")
    return model


def settings() -> list[str]:
    """What the user has set on units goes along."""
    wrong = []
    model = built(Case())
    model.set_reshard_after_forward(False).set_reshard_after_backward(False, recurse=False)
    model.set_requires_gradient_sync(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    for copied in COPIES.values():
        wrong += list(unlike(model, copied(model)))
    return wrong


def methods_hooks_and_guards() -> list[str]:
    wrong = settings()
    for way, copied in COPIES.items():
        model = coder()
        model(noise(2, 5, 3)).sum().backward()
        its = copied(model)
        if not torch.equal(its.norm.running_mean, model.norm.running_mean):
            wrong.append(f"{way}: buffers")
        for x in (noise(2, 5, 3, seed=1), noise(2, 5, 3, seed=2)):
            if not torch.equal(model.encode(x), its.encode(x)) or not torch.equal(model(x), its(x)):
                wrong.append(f"{way}: other outputs")
            its.encode(x).sum().backward()
        if its.rnn.weight_ih_l0 is not its.rnn._flat_weights[0] or its.encode._module is not its:
            wrong.append(f"{way}: modules inside the copy are those of the original")
        own = its.rnn.weight_ih_l0
        called = []
        its.register_forward_pre_hook(lambda *_: called.append(1))  # noqa: B023
        its(noise(2, 5, 3))
        if not called or own is not its.rnn.weight_ih_l0:
            wrong.append(f"{way}: a hook that was added to the copy")
        with pytest.raises(RuntimeError, match="a Linear of the root unit was called outside of the unit's forward"):
            its.head(noise(2, 4))
        its.head.weight = nn.Parameter(torch.ones(3, 4))
        with pytest.raises(RuntimeError, match=r"another tensor stands in the place of 'head.weight', by an assign"):
            its(noise(2, 5, 3))
        outer = fully_shard(nn.Sequential(its, nn.Linear(3, 3)))
        outer(noise(2, 5, 3)).sum().backward()
        if unit_of(its).name != "0" or "0.head.weight" not in outer.state_dict():
            wrong.append(f"{way}: a copy as a unit inside another")
    return wrong


def test_methods_guards_and_hooks_of_a_copy_are_its_own():
    assert not any(run_ranks(methods_hooks_and_guards, 2))


def refused() -> list[str]:
    messages = []
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
    return messages


def test_a_model_in_use_and_a_part_of_a_unit_are_not_copied():
    for messages in run_ranks(refused, 2):
        assert len(messages) == 1
        assert messages[0].startswith("deepcopy and pickle: the parameters of the root unit are in use")


def write(folder: str) -> list[float]:
    model = built(Case(wrapper=True))
    optimizer = adam(model)
    step(model, optimizer, 0)
    torch.save((model, optimizer), f"{folder}/{group_of().rank}.pt")
    return [step(model, optimizer, n) for n in range(1, 3)]


def read(folder: str) -> list[float]:
    rank = group_of().rank
    with pytest.raises(
        ValueError, match=rf"rank {1 - rank}'s shard of 2, and this is rank {rank}: save a file on each"
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
