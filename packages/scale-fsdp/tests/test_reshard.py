"""A model that lives is sharded over other ranks, or in another way, and training goes on as if it never had been."""

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import differing_weights
from state_cases import Differences
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scale_core.shard import shard_of
from scale_core.testing import run_ranks
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
        fully_shard(module, **kwargs)
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


def differences(model: nn.Module, ema: ShardedEMA, plain: Plain, title: str) -> Iterator[str]:
    for line in differing_weights(model, plain.model):
        yield f"{title}: {line}"
    with ema.swapped():
        for line in differing_weights(model, plain.average.module):
            yield f"{title}, average: {line}"
    if not torch.equal(model.scale, plain.model.scale):
        yield f"{title}: buffer"
    counts = [len(list(each.parameters())) for each in (model, plain.model)]
    if counts[0] != counts[1] and isinstance(model.embed.weight, nn.Parameter):  # No part of a flat one.
        yield f"{title}: tie"


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

    def differences(self, title: str) -> Iterator[str]:
        yield from differences(self.model, self.ema, self.plain, title)
        pairs = (self.model, self.optimizer), (self.plain.model, self.plain.optimizer)
        ours, theirs = (full_optim_state_dict(*pair, recipient_rank=None) for pair in pairs)  # Before any forward.
        found = Differences()
        found.compare(f"{title}, optimizer", ours["state"], theirs["state"])
        yield from found.found


def three_two_four_and_back() -> list[str]:
    rank, wrong = dist.get_rank(), []
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
            wrong += life.differences(f"{title}, 3 to 2")
            optimizer.param_groups[0]["lr"] = 0.02  # Those that join come to know of it.
        elif not all(param.is_meta for param in model.parameters()) or optimizer.state:
            wrong.append(f"{title}: a rank that has left still has something")
        life.plain.optimizer.param_groups[0]["lr"] = 0.02
        life.train(2, four, optimizer=optimizer)
        wrong += life.differences(f"{title}, 2 to 4")
        life.train(4, "same", optimizer=[optimizer], reshard_after_forward=2)
        wrong += life.differences(f"{title}, parts of two ranks")
        life.train(4, mesh, optimizer=optimizer, reshard_after_forward=True)
        wrong += life.differences(f"{title}, hybrid")
        life.train(4, None, optimizer=optimizer)
        life.train(4)
        wrong += life.differences(f"{title}, end")
        if rank < 2 and any(now is not then for now, then in zip(model.parameters(), kept, strict=True)):
            wrong.append(f"{title}: the parameters are other objects")
        if any(shard_of(param) is None or shard_of(param).axes[0].group.size != 4 for param in model.parameters()):
            wrong.append(f"{title}: what is a piece of what")
        wrong += differing_weights(copy.deepcopy(model), model)
    return wrong


def test_three_ranks_become_two_and_four_and_hybrid_and_train_on_as_one_process_does():
    assert not any(run_ranks(three_two_four_and_back, 4))


def from_one_to_two() -> list[str]:
    """A world of one, of which each rank has its own: rank 0's is what counts."""
    rank, wrong = dist.get_rank(), []
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
    wrong += differing_weights(model, plain.model)
    for step in range(2):
        plain.backward(step, 2)
        plain.step()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrong + differing_weights(model, plain.model)


def test_models_of_one_rank_each_become_one_of_all():
    assert not any(run_ranks(from_one_to_two, 2))


def refused() -> list[str]:
    rank, messages = dist.get_rank(), []
    two = dist.new_group([0, 1])
    model = sharded(built())
    optimizer = adam(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()

    def fails(error: type[Exception], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error) as caught:
            reshard_to(*args, **kwargs)
        messages.append(str(caught.value))

    with model.no_sync():
        loss_of(model, 1).backward()
    fails(RuntimeError, model, two)
    model.zero_grad()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with model.summon_full_params():
        fails(RuntimeError, model, two)
    fails(RuntimeError, nn.Linear(2, 2), two)
    fails(RuntimeError, model, "other")
    fails(RuntimeError, model, None, reshard_after_forward=2)
    fails(ValueError, model, two if rank != 1 else None)
    fails(ValueError, model, None, reshard_after_forward=rank == 0)
    flat = sharded(built(), flatten_parameters=True)
    fails(ValueError, model if rank else flat, two)
    fails(ValueError, model, two, optimizer=optimizer if rank else [])
    fails(ValueError, model, two, ema=ShardedEMA(model) if rank else None)
    offload = OffloadOptimizer(torch.optim.Adam, model.parameters(), host_fraction=0.5)
    fails(RuntimeError, model, None, optimizer=offload)
    optimizer.state[model.down.weight]["rows"] = torch.ones(2, 3)
    fails(RuntimeError, model, two, optimizer=optimizer)
    del optimizer.state[model.down.weight]["rows"]
    if rank == 2:
        optimizer.state[model.embed.weight]["step"] += 1
    fails(ValueError, model, two, optimizer=optimizer)
    with torch.device("meta"):
        on_meta = Model()
    fails(ValueError, sharded(on_meta, init=False), two)
    ranks = dist.new_group([1, 2])
    if rank:
        fails(ValueError, model, ranks, union_process_group=ranks)
    assert not differing_weights(model, before)
    loss_of(model, 2).backward()
    return messages


EXPECTED = [
    "the root unit is between a forward and its backward, or inside no_sync(), or has gradients that wait",
    "reshard_to: the parameters of the root unit are in use",
    "no module in this Linear is sharded: call fully_shard(model) first",
    "process_group: expected a group, a mesh, None or 'same', got 'other'",
    "reshard_after_forward=2: 3 ranks do not divide into groups of 2",
    "rank 0 means the ranks [0, 1] in 1 copies, but a group was passed by ranks [0, 1]",
    "rank 1 has reshard_after_forward=False, others True",
    "rank 1 has another model than the others: 'root: flatten=False",
    "the optimizers of rank 1 have other parameters",
    "rank 1 and others differ in whether there is an average, or of which dtype: pass ema= on all",
    "OffloadOptimizer has divided its state by the present shards",
    "the optimizer keeps a rows of shape (2, 3) for its part",
    "rank 2 has other gradients, optimizer state or averages than the others: step all ranks alike",
    "no rank has values: every one of them came with a model on the meta device",
    "shares the model with ranks [0, 1, 2], of which only [1, 2] are here with values",
]


def test_what_does_not_fit_is_refused_on_all_ranks_and_nothing_changes():
    for rank, messages in enumerate(run_ranks(refused, 3)):
        expected = EXPECTED if rank else EXPECTED[:-1]
        for message, part in zip(messages, expected, strict=True):
            if "rank 1 means" in message:  # Where the ranks differ, the first that does is named.
                part = part.replace("rank 0 means the ranks [0, 1]", "rank 1 means the ranks [0, 1, 2]")
            assert part in message


WIDTH, BLOCKS = 128, 3


def living_bytes() -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in gc.get_objects() if _has_memory(t)}
    return sum(storages.values())


def _has_memory(thing: object) -> bool:
    return type(thing) in (Tensor, nn.Parameter) and not thing.is_meta


def peak() -> tuple[int, int, int]:
    """Returns what lived at most, before and after, beside what was there before anything."""
    rank = dist.get_rank()
    two = dist.new_group([0, 1])
    base = living_bytes()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    for module in (*model, model):
        fully_shard(module)
    optimizer = adam(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del module
    for unit in units_in(model):
        unit.release()
    before, most = living_bytes() - base, [0]
    plain_cut = live._cut_shard

    def cut(*args: Any) -> Tensor:
        shard = plain_cut(*args)
        most[0] = max(most[0], living_bytes() - base)
        return shard

    live._cut_shard = cut
    try:
        reshard_to(model, two, optimizer=optimizer)
    finally:
        live._cut_shard = plain_cut
    after = living_bytes() - base
    return before, most[0], after if rank < 2 else 0


def test_on_the_way_there_is_no_more_than_a_unit_beside_the_shards():
    unit = (WIDTH * WIDTH + WIDTH) * 4
    for before, most, after in run_ranks(peak, 3):
        # Rank 2 leaves, and cuts nothing. All of it would be four times the parameters.
        assert most <= max(before, after) + 2 * unit < 4 * BLOCKS * unit
