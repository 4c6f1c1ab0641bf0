"""local_sgd.py: ranks train on their own, and outer steps are those of the papers, to the bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import scale_snapshot
from scale_check.exact import gather_values
from scale_check.simulate import simulate
from scale_core.comm.group import Group, group_of
from scale_core.errors import ContractError
from scale_core.shard import register_stages
from scale_core.testing import run_ranks
from scale_oss import LocalSGD, LocalSGDOptions, OuterStep

BUILDS: dict[str, Callable[..., LocalSGD]] = {
    "average": LocalSGD,
    "slowmo": LocalSGD.slowmo,
    "diloco": LocalSGD.diloco,
}


class Net(nn.Module):
    """Odd shapes, a scalar, a transposed and a frozen parameter, and a buffer that ranks change in their own way."""

    running: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.outer = nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.across = nn.Parameter(torch.randn(5, 3, dtype=dtype).t())
        self.frozen = nn.Parameter(torch.randn(2, dtype=dtype), requires_grad=False)
        self.register_buffer("running", torch.zeros((), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        self.running += x.detach().mean()
        hidden: Tensor = self.outer(self.inner(x).tanh()) * self.scale + x @ self.across.t()
        return hidden


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


INNER = {"adamw": adamw, "momentum": momentum}


def run(model: nn.Module, optimizer: Optimizer, steps: Sequence[int], rank: int, scheduler: Any = None) -> None:
    for step in steps:
        dtype = next(model.parameters()).dtype
        model(batch(step, rank, dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def halves(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


class Reference:
    """All ranks in one process, by the papers' algorithms on full parameters."""

    def __init__(self, world: int, way: str, inner: str, inner_state: str, dtype: torch.dtype = torch.float32) -> None:
        self.way, self.inner_state = way, inner_state
        self.models = [Net(dtype) for _ in range(world)]
        self.optimizers = [INNER[inner](model) for model in self.models]
        self.schedulers = [halves(optimizer) for optimizer in self.optimizers]
        wide = torch.promote_types(dtype, torch.float32)
        self.slow = [param.detach().clone().to(wide) for param in self.trained(0)]
        self.momenta = [torch.zeros_like(slow) for slow in self.slow]

    def trained(self, rank: int) -> list[nn.Parameter]:
        return [param for param in self.models[rank].parameters() if param.requires_grad]

    def outer_step(self, lr: float) -> None:
        everyones = list(zip(*(self.trained(rank) for rank in range(len(self.models))), strict=True))
        for number, params in enumerate(everyones):
            mean = average([param.detach() for param in params])
            slow, u = self.slow[number], self.momenta[number]
            if self.way == "average":
                slow.copy_(mean)
            elif self.way == "slowmo":
                u.mul_(0.5).add_((slow - mean) / lr)
                slow.sub_(u * (1.0 * lr))
            else:
                d = slow - mean
                u.mul_(0.9).add_(d)
                slow.sub_((d + u * 0.9) * 0.7)
            for param in params:
                param.detach().copy_(slow)
            if self.inner_state == "reset":
                for optimizer, param in zip(self.optimizers, params, strict=True):
                    optimizer.state.pop(param, None)
            if self.inner_state == "average":
                owners = zip(self.optimizers, params, strict=True)
                states = [optimizer.state.get(param, {}) for optimizer, param in owners]
                for key, value in states[0].items():
                    if value.shape == params[0].shape and key != "step":
                        mean = average([state[key] for state in states])
                        for state in states:
                            state[key].copy_(mean)
        for model in self.models:
            model.running.copy_(self.models[0].running)

    def train(self, num_syncs: int, every: int) -> None:
        for sync in range(num_syncs):
            for step in range(sync * every, (sync + 1) * every):
                for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                    run(model, optimizer, [step], rank)
                if step == (sync + 1) * every - 1:
                    self.outer_step(self.optimizers[0].param_groups[0]["lr"])
                for scheduler in self.schedulers:
                    scheduler.step()


def average(values: Sequence[Tensor]) -> Tensor:
    total = values[0].to(torch.promote_types(values[0].dtype, torch.float32), copy=True)
    for value in values[1:]:
        total += value
    return total / len(values)


def as_the_papers_say(
    way: str, inner: str, inner_state: str, bucket_numel: int, dtype: torch.dtype = torch.float32
) -> None:
    rank, every, num_syncs = group_of().rank, 4, 3
    model = Net(dtype)
    with torch.no_grad():  # The first rank's values count.
        model.inner.weight.add_(rank)
    optimizer = INNER[inner](model)
    options = LocalSGDOptions(inner_state=inner_state, bucket_numel=bucket_numel)  # type: ignore[arg-type]
    local = BUILDS[way](model, optimizer, sync_every=every, options=options)
    scheduler = halves(optimizer)
    run(model, optimizer, range(num_syncs * every), rank, scheduler)
    assert (local.num_syncs, local.steps_since_sync) == (num_syncs, 0)
    reference = Reference(group_of().size, way, inner, inner_state, dtype)
    reference.train(num_syncs, every)
    for (name, ours), theirs in zip(trained(model).items(), reference.trained(rank), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.equal(model.running, reference.models[rank].running)
    run(model, optimizer, [99], rank)  # Ranks differ between outer steps, as the reference's do.
    run(reference.models[rank], reference.optimizers[rank], [99], rank)
    for (name, ours), theirs in zip(trained(model).items(), reference.trained(rank), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.ranks("world", in_turn=True)
@pytest.mark.parametrize("way", BUILDS)
@pytest.mark.parametrize(
    ("world", "inner", "inner_state", "bucket_numel"),
    [(2, "adamw", "maintain", 1_000), (3, "momentum", "reset", 1), (2, "momentum", "average", 30)],
)
def test_outer_steps_are_those_of_the_papers(
    way: str, world: int, inner: str, inner_state: str, bucket_numel: int
) -> None:
    assert group_of().size == world
    as_the_papers_say(way, inner, inner_state, bucket_numel)


@pytest.mark.ranks(2)
def test_half_precision_is_averaged_and_kept_in_fp32() -> None:
    as_the_papers_say("diloco", "momentum", "maintain", 1_000, torch.bfloat16)


@pytest.mark.ranks(1)
def test_one_rank_that_averages_trains_as_without() -> None:
    """One rank with the plain average is the plain optimizer."""
    plain, model = Net(), Net()
    optimizer = adamw(model)
    LocalSGD(model, optimizer, sync_every=2)
    run(model, optimizer, range(5), 0)
    run(plain, adamw(plain), range(5), 0)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.simulation
def test_only_outer_steps_send_anything() -> None:
    with simulate(rank=1, world_size=4) as simulation:
        model = Net()
        optimizer = adamw(model)
        LocalSGD.diloco(model, optimizer, sync_every=3)
        sent = [sum(simulation.bytes_sent.values())]
        for step in range(6):
            run(model, optimizer, [step], 0)
            sent.append(sum(simulation.bytes_sent.values()))
    assert sum(param.numel() for param in trained(model).values()) == 79
    outer = 2 * (4 - 1) * 80 * 4 // 4 + 4  # 2 (W-1)/W of the parameters' bytes, 79 filled up to 80; and the buffer.
    assert [after - before for before, after in itertools.pairwise(sent)] == [0, 0, outer, 0, 0, outer]


def saved(folder: str, way: str, resumes: bool) -> list[Tensor]:
    rank = group_of().rank
    model = Net()
    optimizer = adamw(model)
    local = BUILDS[way](model, optimizer, sync_every=3)
    objects = {"model": model, "optimizer": optimizer, "local_sgd": local}
    if resumes:
        scale_snapshot.load(folder, objects)
    else:
        run(model, optimizer, range(3), rank)
        scale_snapshot.save(folder, 3, objects)
    run(model, optimizer, range(3, 7), rank)
    with pytest.raises(RuntimeError, match="1 steps after the last outer step of 3"):
        scale_snapshot.save(folder, 7, objects)
    return [param.detach() for param in model.parameters()]


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("way", BUILDS)
def test_a_snapshot_goes_on_with_each_ranks_inner_state(tmp_path: Path, way: str) -> None:
    first, again = (saved(str(tmp_path / way), way, resumes) for resumes in (False, True))
    assert all(torch.equal(*pair) for pair in zip(again, first, strict=True))
    weights = gather_values(first[0])
    assert not torch.equal(weights[0], weights[1])


def on_three(folder: str) -> None:
    """The outer state at another number of ranks; the inner one as the user says."""
    model = Net()
    optimizer = adamw(model)
    local = LocalSGD.diloco(model, optimizer, sync_every=3)
    with pytest.raises(Exception, match=r"saved by 2 ranks.*PerRank\(optimizer, resize="):
        scale_snapshot.load(folder, {"model": model, "optimizer": optimizer, "local_sgd": local})
    of_any = scale_snapshot.PerRank(optimizer, resize=lambda states, rank, size: states[rank % len(states)])
    scale_snapshot.load(folder, {"model": model, "optimizer": of_any, "local_sgd": local})
    group = group_of()
    whole = {key: torch.zeros(tuple(value.shape)) for key, value in local.state_dict().items() if key != "num_syncs"}
    for key, value in local.state_dict().items():
        if key != "num_syncs":
            whole[key].view(-1)[value.start : value.stop] = value.tensor.reshape(-1)
            dist.all_reduce(whole[key])
    reference = Reference(2, "diloco", "adamw", "maintain")
    for rank, (other, its) in enumerate(zip(reference.models, reference.optimizers, strict=True)):
        run(other, its, range(3), rank)
    reference.outer_step(0.02)
    names = list(trained(model))
    for name, slow, u in zip(names, reference.slow, reference.momenta, strict=True):
        assert torch.equal(whole[f"slow.{name}"], slow), name
        assert torch.equal(whole[f"momentum.{name}"], u), name
    assert group.size == 3 and local.num_syncs == 1


def test_the_outer_state_is_loaded_at_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path), "diloco", False)
    run_ranks(on_three, 3, str(tmp_path))


@pytest.mark.ranks(2)
def test_weights_loaded_later_are_no_outer_gradient() -> None:
    """Values that are written to the model after LocalSGD was built are where the next outer step starts from."""
    model, other = Net(), Net()
    optimizer = momentum(model)
    local = LocalSGD.diloco(model, optimizer, sync_every=1)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(3)
    model.load_state_dict(other.state_dict())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert local.num_syncs == 1
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.composition("LocalSGD", "DistributedDataParallel")
@pytest.mark.ranks(4)
def test_data_parallel_inside_of_nodes() -> None:
    """Two nodes of two ranks, DistributedDataParallel in each: as two ranks with twice the batch, within rounding."""
    world = group_of()
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    node, place = world.rank // 2, world.rank % 2
    model = Net(torch.float64)
    wrapped = DistributedDataParallel(model, process_group=nodes[node])
    optimizer = momentum(model)
    LocalSGD.slowmo(wrapped, optimizer, sync_every=2, process_group=across[place])
    reference = Reference(2, "slowmo", "momentum", "maintain", torch.float64)
    for step in range(4):
        wrapped(batch(step, world.rank, torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, (other, its) in enumerate(zip(reference.models, reference.optimizers, strict=True)):
            both = torch.cat([batch(step, 2 * rank + half, torch.float64) for half in range(2)])
            other(both).square().mean().backward()
            its.step()
            its.zero_grad()
        if step % 2:
            reference.outer_step(0.05)
    for ours, theirs in zip(trained(model).values(), reference.trained(node), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_ranks_that_have_taken_other_numbers_of_steps_hear_of_it() -> None:
    model = Net()
    optimizer = momentum(model)
    local = LocalSGD(model, optimizer, sync_every=10)
    run(model, optimizer, range(1 + group_of().rank), 0)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ContractError, match="1 steps after outer step 0"):
        local.sync()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "expected sync_every to be an integer of at least 1, got 0"),
        ({"sync_every": 2.5}, "expected sync_every to be an integer of at least 1, got 2.5"),
    ],
)
def test_numbers_of_steps_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=message):
        LocalSGD(model, adamw(model), **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (OuterStep, {"lr": 0.0}, "expected lr above 0"),
        (OuterStep, {"momentum": 1.0}, "expected momentum from 0 to below 1, got 1.0"),
        (OuterStep, {"nesterov": True}, "expected momentum above 0, got 0"),
        (
            LocalSGDOptions,
            {"inner_state": "drop"},
            "expected inner_state to be one of 'maintain', 'reset', 'average', got 'drop'",
        ),
        (LocalSGDOptions, {"bucket_numel": 0}, "expected bucket_numel"),
    ],
)
def test_options_that_make_no_sense_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


class Pipeline:
    """A pipeline over two ranks, with this one's stage."""

    def __init__(self, stage: nn.Module) -> None:
        self.group, self.named_parameters = Group(0, 2, None, "fake", (0, 1)), stage.named_parameters


def test_stages_of_a_pipeline_are_not_averaged() -> None:
    stage = nn.Linear(2, 2)
    pipeline = Pipeline(stage)
    register_stages(cast(Any, pipeline))
    with pytest.raises(ValueError, match=r"^LocalSGD: 'weight' is a parameter of a pipeline's stage"):
        LocalSGD(stage, SGD(stage.parameters(), lr=0.1), sync_every=2, process_group=pipeline.group)


def test_parameters_that_are_not_the_models_are_refused() -> None:
    model, other = Net(), Net()
    with pytest.raises(ValueError, match=r"6 parameters that are none of the model's, the first of shape \(\)"):
        LocalSGD(model, adamw(other), sync_every=4)


def test_a_group_that_is_added_later_is_refused_before_it_trains() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = SGD(model[0].parameters(), lr=0.1)
    LocalSGD(model, optimizer, sync_every=2)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameters in group 1 that LocalSGD does not know"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
