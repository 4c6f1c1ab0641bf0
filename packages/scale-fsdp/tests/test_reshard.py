"""A model that lives is sharded over other ranks, or in another way, and training goes on as if it never had been."""

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_arguments import shard_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scale_check.exact import assert_equal
from scale_core.shard import shard_of
from scale_fsdp import (
    FullyShardedDataParallel,
    OffloadOptimizer,
    ShardedEMA,
    full_optim_state_dict,
    fully_shard,
    reshard_to,
)
from scale_fsdp.reshard import reshard as live
from scale_fsdp.runtime.unit import units_in

DIM, VOCABULARY = 6, 11


class Model(nn.Module):
    """Tied, with a frozen parameter, statistics, a buffer that no checkpoint has, and prime sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, DIM), nn.BatchNorm1d(DIM)
        self.up, self.down = nn.Linear(DIM, 13), nn.Linear(13, DIM, bias=False)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.head.weight = self.embed.weight
        self.up.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((DIM,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.embed(x)) * self.scale
        logits: Tensor = self.head(hidden + self.down(self.up(hidden).relu()))
        return logits


def built() -> Model:
    torch.manual_seed(3)
    return Model()


def sharded(model: nn.Module, **kwargs: Any) -> nn.Module:
    for module in (model.embed, model.up, model):
        fully_shard(module, **shard_arguments(**kwargs))
    return model


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, amsgrad=True)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The same on every rank: then the sum over the ranks is the only thing that their number changes."""
    x = torch.randint(VOCABULARY, (7,), generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


class Plain:
    """The model on one process that all of it must equal, at any number of ranks."""

    def __init__(self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.model = built()
        self.optimizer = make(self.model.parameters())
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def backward(self, step: int, world: int) -> None:
        loss_of(self.model, step).backward()
        for param in self.model.parameters():
            if param.grad is not None:
                total = param.grad.clone()
                for _ in range(world - 1):
                    total += param.grad
                param.grad = total / world

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)


def assert_same(model: nn.Module, ema: ShardedEMA, plain: Plain, title: str) -> None:
    assert_equal(model, plain.model, title)
    with ema.swapped():
        assert_equal(model, plain.average.module, f"{title}, average")
    assert torch.equal(model.scale, plain.model.scale), title
    counts = [len(list(each.parameters())) for each in (model, plain.model)]
    assert counts[0] == counts[1] or not isinstance(model.embed.weight, nn.Parameter), title  # A part of a flat one.


CASES: list[tuple[Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], dict[str, Any]]] = [
    (adam, {}),
    (sgd, {"flatten_parameters": True}),
    (adam, {"atom": "element", "reshard_after_forward": False}),
]


class Life:
    """A model beside the plain one, on a rank that may have no part in it."""

    def __init__(self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], model: nn.Module) -> None:
        self.plain, self.model = Plain(make), model
        self.optimizer, self.ema = make(model.parameters()), ShardedEMA(model, 0.9)
        self.number = 0

    def train(self, world: int, process_group: Any = None, **kwargs: Any) -> None:
        """Two steps; a new group comes between a backward and its optimizer step."""
        for half in range(2):
            self.plain.backward(self.number, world)
            if dist.get_rank() < world:
                loss_of(self.model, self.number).backward()
            if half and kwargs:
                reshard_to(self.model, process_group, ema=self.ema, **kwargs)
            self.plain.step()
            if not next(self.model.parameters()).is_meta:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.ema.update()
            self.number += 1

    def assert_as_plain(self, title: str) -> None:
        assert_same(self.model, self.ema, self.plain, title)
        pairs = (self.model, self.optimizer), (self.plain.model, self.plain.optimizer)
        ours, theirs = (full_optim_state_dict(*pair, recipient_rank=None) for pair in pairs)  # Before any forward.
        assert_equal(ours["state"], theirs["state"], f"{title}, optimizer")


@pytest.mark.ranks(4)
def test_three_ranks_become_two_then_four_then_hybrid():
    rank = dist.get_rank()
    three, two, four = dist.new_group([0, 1, 2]), dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
    for make, kwargs in CASES:
        title = f"{make.__name__}, {kwargs}"
        if rank < 3:
            model = sharded(built(), mesh=three, **kwargs)
        else:
            with torch.device("meta"):
                model = Model()
            sharded(model, mesh=four, init=False, **kwargs)
        life = Life(make, model)
        optimizer, kept = life.optimizer, list(model.parameters())
        life.train(3, two, optimizer=optimizer)
        if rank < 2:
            life.assert_as_plain(f"{title}, 3 to 2")
            optimizer.param_groups[0]["lr"] = 0.02  # Those that join come to know of it.
        else:  # A rank that has left has nothing.
            assert all(param.is_meta for param in model.parameters()) and not optimizer.state, title
        life.plain.optimizer.param_groups[0]["lr"] = 0.02
        life.train(2, four, optimizer=optimizer)
        life.assert_as_plain(f"{title}, 2 to 4")
        life.train(4, "same", optimizer=[optimizer], reshard_after_forward=2)
        life.assert_as_plain(f"{title}, parts of two ranks")
        life.train(4, mesh, optimizer=optimizer, reshard_after_forward=True)
        life.assert_as_plain(f"{title}, hybrid")
        life.train(4, None, optimizer=optimizer)
        life.train(4)
        life.assert_as_plain(f"{title}, end")
        if rank < 2:
            assert all(now is then for now, then in zip(model.parameters(), kept, strict=True)), title
        assert all(shard_of(param).axes[0].group.size == 4 for param in model.parameters()), title
        assert_equal(copy.deepcopy(model), model)


@pytest.mark.ranks(2)
def test_models_of_one_rank_each_become_one_of_all():
    """A world of one, of which each rank has its own: rank 0's is what counts."""
    rank = dist.get_rank()
    alone = dist.new_group([rank], use_local_synchronization=True)
    plain = Plain(adam)
    model = built()
    if rank:
        for param in model.parameters():
            param.data.add_(1.0)
    fully_shard(model.up, alone)
    model = FullyShardedDataParallel(model, alone)
    optimizer = adam(model.parameters())
    reshard_to(model, None, optimizer=optimizer)
    assert_equal(model, plain.model)
    for step in range(2):
        plain.backward(step, 2)
        plain.step()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, plain.model)


@pytest.mark.ranks(3)
def test_what_does_not_fit_is_refused_on_all_ranks():
    rank = dist.get_rank()
    two = dist.new_group([0, 1])
    model = sharded(built())
    optimizer = adam(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()

    def refused(text: str, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            reshard_to(model, *args, **kwargs)
        assert text in str(caught.value), caught.value

    with model.no_sync():
        loss_of(model, 1).backward()
    waits = "the root unit is between a forward and its backward, or inside no_sync(), or has gradients that wait"
    refused(waits, model, two)
    model.zero_grad()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with model.summon_full_params():
        refused("reshard_to: the parameters of the root unit are in use", model, two)
    refused("no module in this Linear is sharded: call fully_shard(model) first", nn.Linear(2, 2), two)
    refused("process_group: expected a group, a mesh, None or 'same', got 'other'", model, "other")
    parts = "reshard_after_forward=2: 3 ranks do not divide into groups of 2"
    refused(parts, model, None, reshard_after_forward=2)
    means = r"rank (0|1) passed a group of the ranks \[0, 1(, 2)?\]"  # The first that differs from oneself.
    with pytest.raises(ValueError, match=rf"{means} in 1 replicas, but ranks \[0, 1\] passed one"):
        reshard_to(model, two if rank != 1 else None)
    differs = "rank 1 has reshard_after_forward=False, others True"
    refused(differs, model, None, reshard_after_forward=rank == 0)
    flat = sharded(built(), flatten_parameters=True)
    refused("rank 1 has another model than the others: 'root: flatten=False", model if rank else flat, two)
    others = "the optimizers of rank 1 have different parameters"
    refused(others, model, two, optimizer=optimizer if rank else [])
    average = "rank 1 and others differ in whether there is an average, or of which dtype: pass ema= on all"
    refused(average, model, two, ema=ShardedEMA(model) if rank else None)
    offload = OffloadOptimizer(torch.optim.Adam, model.parameters(), host_fraction=0.5)
    refused("OffloadOptimizer has divided its state by the present shards", model, None, optimizer=offload)
    optimizer.state[model.down.weight]["rows"] = torch.ones(2, 3)
    refused("the optimizer state 'rows' of ", model, two, optimizer=optimizer)
    del optimizer.state[model.down.weight]["rows"]
    if rank == 2:
        optimizer.state[model.embed.weight]["step"] += 1
    state = "rank 2 has other gradients, optimizer state or averages than the others: take the same steps on all ranks"
    refused(state, model, two, optimizer=optimizer)
    with torch.device("meta"):
        on_meta = Model()
    nothing = "no rank has values: every one of them came with a model on the meta device"
    refused(nothing, sharded(on_meta, init=False), two)
    ranks = dist.new_group([1, 2])
    if rank:
        missing = "shares the model with ranks [0, 1, 2], but only [1, 2] called with values"
        refused(missing, model, ranks, union_process_group=ranks)
    assert_equal(model, before)
    loss_of(model, 2).backward()


def living_bytes() -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in gc.get_objects() if _has_memory(t)}
    return sum(storages.values())


def _has_memory(thing: object) -> bool:
    return type(thing) in (Tensor, nn.Parameter) and not thing.is_meta


@pytest.mark.ranks(3)
def test_resharding_holds_no_more_than_a_unit_and_the_shards():
    width, blocks = 128, 3
    unit_bytes = (width * width + width) * 4
    two = dist.new_group([0, 1])
    base = living_bytes()
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
    for module in (*model, model):
        fully_shard(module)
    optimizer = adam(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del module
    for unit in units_in(model):
        unit.release()
    before, most = living_bytes() - base, 0
    plain_cut = live._cut_shard

    def cut(*args: Any) -> Tensor:
        nonlocal most
        shard = plain_cut(*args)
        most = max(most, living_bytes() - base)
        return shard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "_cut_shard", cut)
        reshard_to(model, two, optimizer=optimizer)
    after = living_bytes() - base if dist.get_rank() < 2 else 0  # Rank 2 leaves, and cuts nothing.
    # All of it would be four times the parameters.
    assert most <= max(before, after) + 2 * unit_bytes < 4 * blocks * unit_bytes
