"""chained_optimizer.py: two optimizers as one, beside the plain ones and DDP."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from oss_cases import Shards, give_gradients, model_of, plain_params
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_oss import OSS, OSSOptions, ShardedDataParallel, SplitOptimizer, split_by
from scale_snapshot import load_snapshot, save_snapshot

MATRIX: tuple[type[torch.optim.Optimizer], dict[str, Any]] = (
    getattr(torch.optim, "Muon", torch.optim.Adafactor),  # torch has it from 2.9 on
    {"lr": 0.02},
)
OTHER = (torch.optim.AdamW, {"lr": 0.01})
STEPS = 3


class Net(nn.Module):
    """Two embeddings, of which one is tied to a head; matrices, vectors, a scalar and a tensor of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tokens, self.places = nn.Embedding(11, 6), nn.Embedding(4, 6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6, bias=False)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.tensor(1.2))
        self.mix = nn.Parameter(torch.randn(2, 6, 6) / 6)
        self.head, self.value = nn.Linear(6, 11, bias=False), nn.Linear(6, 3)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.tokens(x) + self.places.weight)
        h = h + self.down(torch.tanh(self.up(h)))
        h = torch.einsum("bti,kij->btj", h, self.mix) * self.scale
        return torch.cat([self.head(h), self.value(h)], dim=-1)


HIDDEN = ["up.weight", "down.weight"]  # what is left for Muon where "value" goes to the other


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))


class Pair:
    """What split_by stands for: two plain optimizers, used one after the other."""

    def __init__(self, params: Mapping[str, nn.Parameter], hidden: Iterable[str] = HIDDEN) -> None:
        chosen = set(hidden)
        matrices = [(name, param) for name, param in params.items() if name in chosen]
        others = [(name, param) for name, param in params.items() if name not in chosen]
        self.matrix, self.other = MATRIX[0](matrices, **MATRIX[1]), OTHER[0](others, **OTHER[1])
        self.both = (self.matrix, self.other)

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"matrix": self.matrix.state_dict(), "other": self.other.state_dict()}


def split(model: nn.Module) -> SplitOptimizer:
    return split_by(model, MATRIX, OTHER, other_names=["value"], options=OSSOptions(bucket_numel=60))


@pytest.mark.parametrize("way", ["split", "Adafactor"])
@pytest.mark.ranks(0, 2)
def test_it_trains_as_plain_optimizers_beside_ddp(way: str) -> None:
    """Two optimizers as one, and one that needs full tensors of three dimensions; the others: oss_transparency."""
    for wrapper in (DistributedDataParallel, ShardedDataParallel) if group_of().size > 1 else (None,):
        theirs = Net()
        mine = copy.deepcopy(theirs)
        plain: Any
        ours: Any
        if way == "split":
            plain, ours = Pair(dict(theirs.named_parameters())), split(mine)
        else:
            plain = torch.optim.Adafactor(theirs.parameters(), lr=0.01)
            ours = OSS(mine.parameters(), torch.optim.Adafactor, options=OSSOptions(bucket_numel=60), lr=0.01)
        models: list[nn.Module] = [theirs, mine]
        if wrapper is not None:
            optimizers = [getattr(ours, "optimizers", ours)] if wrapper is ShardedDataParallel else []
            models = [DistributedDataParallel(theirs), wrapper(mine, *optimizers)]
        for step in range(STEPS):
            for model, optimizer in zip(models, (plain, ours), strict=True):
                model(batch(step, group_of().rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ours.wait()
        assert_equal(mine, theirs, f"{way}, {wrapper}")


@pytest.mark.ranks(2)
def test_wait_waits_for_the_parameters_of_both_optimizers() -> None:
    model = Net()
    optimizer = split(model)
    wrapped = ShardedDataParallel(model, optimizer.optimizers)
    wrapped(batch(0, group_of().rank)).square().mean().backward()
    optimizer.step()
    gathering = [[bucket.is_gathering for bucket in each.buckets] for each in optimizer.optimizers]
    assert all(map(any, gathering)), gathering
    optimizer.wait()
    assert not any(bucket.is_gathering for each in optimizer.optimizers for bucket in each.buckets)


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_those_that_can_not_be_sharded_are_refused_by_name(name: str) -> None:
    cls = getattr(torch.optim, name)
    for build in (lambda: OSS(Net().parameters(), cls), lambda: split_by(Net(), MATRIX, (cls, {}))):
        with pytest.raises(ValueError, match=f"OSS can't shard {name}: "):
            build()


# The two as one.


@pytest.mark.ranks(3)
def test_it_is_one_optimizer_over_shards() -> None:
    """Shards of a matrix may have one dimension: the full shapes count. Scheduler, clipping, closure, state."""
    theirs = {name: nn.Parameter(param.detach().clone()) for name, param in plain_params(dtype=torch.float64).items()}
    hidden = ["up", "down"]
    plain = Pair(theirs, hidden)
    shards = Shards(theirs)
    model = model_of(shards.params)
    ours = split_by(model, MATRIX, OTHER, other_names=["^embed$"], options=OSSOptions(bucket_numel=60))
    assert [group["param_names"] for group in ours.param_groups] == [hidden, [n for n in theirs if n not in hidden]]
    schedules = [ExponentialLR(each, 0.7) for each in (*plain.both, ours)]
    for step in range(STEPS):
        for params in (theirs, shards.params):
            give_gradients(params.values(), step)
        norm = torch.nn.utils.get_total_norm([param.grad for param in theirs.values()])
        assert torch.allclose(ours.clip_grad_norm_(1e6), norm, rtol=1e-12)
        plain.step()
        assert ours.step(lambda: 7) == 7
        for schedule in schedules:
            schedule.step()
        assert_equal(shards.wholes(), {n: p.detach() for n, p in theirs.items()}, f"step {step}")
    ours.zero_grad()
    assert all(param.grad is None for param in shards.params.values())
    assert_equal([g["lr"] for g in ours.param_groups], [g["lr"] for e in plain.both for g in e.param_groups])
    assert_equal(ours.state_dict(all_ranks=True), plain.state_dict(), "state")
    fresh = split_by(model, MATRIX, OTHER, other_names=["^embed$"])
    fresh.load_state_dict(plain.state_dict())
    assert_equal(fresh.state_dict(all_ranks=True), plain.state_dict(), "loaded")
    bad = copy.deepcopy(plain.state_dict())
    bad["matrix"]["param_groups"][0]["lr"] = 5.0
    bad["other"]["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="group 0 has"):
        fresh.load_state_dict(bad)
    assert fresh.param_groups[0]["lr"] != 5.0
    with pytest.raises(TypeError, match=r"\{'matrix': muon\.state_dict\(\), 'other': adamw\.state_dict\(\)\}"):
        fresh.load_state_dict(plain.other.state_dict())


@pytest.mark.ranks(3)
def test_shards_of_both_go_through_a_snapshot(tmp_path: Path) -> None:
    shards = Shards(plain_params())
    model = model_of(shards.params)
    ours, fresh = split_by(model, MATRIX, OTHER), split_by(model, MATRIX, OTHER)
    give_gradients(shards.params.values(), 0)
    ours.step()
    save_snapshot(tmp_path, 0, sharded_state_dict(model, ours))
    read = load_snapshot(tmp_path, lambda saved: target_state_dict(model, fresh, saved))
    load_sharded_state_dict(read.state, model, fresh)
    assert_equal(fresh.state_dict(all_ranks=True), ours.state_dict(all_ranks=True))


def test_tied_and_named_parameters_go_to_the_other_optimizer() -> None:
    matrices = [name for name, _ in Net().named_parameters() if name in (*HIDDEN, "value.weight")]
    assert split_by(Net(), MATRIX, OTHER).param_groups[0]["param_names"] == matrices
    assert split(Net()).param_groups[0]["param_names"] == HIDDEN


def test_a_group_that_is_added_goes_where_its_parameters_belong() -> None:
    model = Net()
    optimizer = split(model)
    model.late = nn.Linear(6, 6)
    optimizer.add_param_group({"params": model.late.parameters(), "lr": 0.5})
    added = [(group["param_names"], group["lr"]) for group in optimizer.param_groups if group["lr"] == 0.5]
    assert added == [(["late.weight"], 0.5), (["late.bias"], 0.5)]
    assert [group["lr"] for group in optimizer.other.optim.param_groups] == [0.01, 0.5]
    with pytest.raises(ValueError, match=r"parameter 0 .* is in a group already"):
        optimizer.add_param_group({"params": model.late.weight})
    with pytest.raises(ValueError, match=r"parameter 0 .* is none of the model's"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_scaler_steps_it_and_skips_a_step_of_both() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    optimizer, scaler = split(model), ShardedGradScaler(init_scale=8.0)
    scaler.scale(model(batch(0, 0)).sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_equal(dict(model.state_dict()), dict(before))
    optimizer.zero_grad()
    scaler.scale(model(batch(0, 0)).sum()).backward()
    scaler.step(optimizer)
    assert all(not torch.equal(model.state_dict()[name], before[name]) for name in (*HIDDEN, "tokens.weight"))


def test_what_it_can_not_tell_apart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no parameter's name has 'lm_head' in it; they are scale, mix"):
        split_by(Net(), MATRIX, OTHER, other_names=["lm_head"])
    with pytest.raises(ValueError, match=r"no parameter for 'matrix'. Use one optimizer, OSS\(.*AdamW"):
        split_by(nn.LayerNorm(3), MATRIX, OTHER)
    with pytest.raises(ValueError, match=r"no parameter for 'other'. Use one optimizer"):
        split_by(nn.Linear(3, 3, bias=False), MATRIX, OTHER)
    shards = Shards(plain_params(), group_of(), flatten=True)
    flat = model_of(shards.params)
    with pytest.raises(ValueError, match=r"'embed' is one flat parameter that holds .*flatten_parameters=False"):
        split_by(flat, MATRIX, OTHER)
