"""scale-oss over scale-fsdp: optimizers that need full tensors, on a model of which no rank has any tensor whole."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_arguments import shard_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._pytree import tree_flatten_with_path
from trainings import Block, Loss, Net, mean_gradients, train_beside
from with_options import with_options

from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.testing import run_ranks
from scale_fsdp import full_optim_state_dict, fully_shard
from scale_oss import OSS, OSSOptions, split_by
from scale_snapshot import load_snapshot, save_snapshot

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.01, "t0": 1.0, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Adafactor": {"lr": 0.01},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "Muon": {"lr": 0.02},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"lr": 0.02, "momentum": 0.9},
}
OPTIMIZERS = {name: kwargs for name, kwargs in OPTIMIZERS.items() if hasattr(torch.optim, name)}
BY_MATRIX: type[torch.optim.Optimizer] = getattr(torch.optim, "Muon", torch.optim.Adafactor)  # torch has it from 2.9 on


class Words(Net):
    """An embedding that is the head, too, and a block that some steps leave out; prime sizes, which shards cut."""

    def __init__(self) -> None:
        super().__init__(2, words=11, tied=True, block=lambda: Block(7, 13, bias=False), width=7, seed=4)
        self.float()

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.embed(x)
        for block in self.blocks[: 1 if skip else 2]:
            h = block(h)
        out: Tensor = self.head(h)
        return out


HIDDEN = ["blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight"]


def shard(model: Words, mesh: Any = None, **kwargs: Any) -> Words:
    for block in model.blocks:
        fully_shard(block, mesh, **shard_arguments(**kwargs))
    return fully_shard(model, mesh, **shard_arguments(**kwargs))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(tokens, skip=step == 1).square().mean()
    return loss


def trained_by(optimizer: str, model: nn.Module) -> list[nn.Parameter]:
    """Muon takes matrices only; of the others, all are trained."""
    return [param for param in model.parameters() if optimizer != "Muon" or param.ndim == 2]


def step_beside_plain(name: str, copies: int) -> None:
    """Trains the sharded model by OSS and the plain one by the plain optimizer, to the bit; then compares states."""
    cls: type[Optimizer] = getattr(torch.optim, name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard")) if copies > 1 else None
    plain = Words()
    model = shard(copy.deepcopy(plain), mesh)
    trained = trained_by(name, model)
    ours = OSS(trained, cls, **with_options(OSSOptions, bucket_numel=60, **OPTIMIZERS[name]))
    theirs = cls(trained_by(name, plain), **OPTIMIZERS[name])
    # Both ways are gone: tensors that travel, and shards that are stepped on where they are.
    assert bool(ours.full_param_buckets) == (name in ("Adafactor", "Muon") and group_of().size > 1)
    schedules = [ExponentialLR(optimizer, 0.9) for optimizer in (ours, theirs)]

    def measure(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        norms = [model.clip_grad_norm_(1e6), ours.clip_grad_norm_(1e6)]
        assert len(trained) < len(list(plain.parameters())) or torch.equal(*norms)

    def change_rates(each: nn.Module, step: int) -> None:
        if step and each is model:
            for schedule in schedules:
                schedule.step()

    ours.register_step_pre_hook(measure)
    mean = mean_of_copies if copies > 1 else mean_gradients
    train_beside(plain, model, loss_of, (theirs, ours), before=change_rates, mean=mean)
    assert_equal_trees(ours.state_dict(all_ranks=True), theirs.state_dict())


def mean_of_copies(plain: nn.Module, loss_of: Loss, step: int, num_ranks: int) -> list[float]:
    """As hybrid sharding adds up: the mean of the means of two copies."""
    half, means = num_ranks // 2, []
    for first in (0, half):
        losses = mean_gradients(
            plain, lambda each, rank, step, first=first: loss_of(each, first + rank, step), step, half
        )
        means.append((losses, [param.grad for param in plain.parameters()]))
    for param, one, other in zip(plain.parameters(), means[0][1], means[1][1], strict=True):
        param.grad = None if one is None or other is None else (one + other) / 2
    return means[0][0] + means[1][0]


def assert_equal_trees(ours: Any, theirs: Any) -> None:
    """Compares nested dicts and lists of tensors and numbers, to the bit."""
    leaves, expected = (dict(tree_flatten_with_path(tree)[0]) for tree in (ours, theirs))
    assert leaves.keys() == expected.keys()
    for path, leaf in expected.items():
        assert torch.equal(leaves[path], leaf) if isinstance(leaf, Tensor) else leaves[path] == leaf, path


A_FEW = [name for name in ("Adafactor", "Muon", "AdamW") if name in OPTIMIZERS]


@pytest.mark.composition("OSS", "scale-fsdp")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.ranks(2, in_turn=True)
def test_each_optimizer_of_torch_is_the_plain_one_to_the_bit(name: str) -> None:
    step_beside_plain(name, copies=1)


@pytest.mark.parametrize("name", A_FEW)
@pytest.mark.ranks(3, in_turn=True)
def test_so_it_is_where_shards_are_uneven(name: str) -> None:
    step_beside_plain(name, copies=1)


@pytest.mark.parametrize("name", A_FEW)
def test_so_it_is_in_a_world_of_one(name: str) -> None:
    step_beside_plain(name, copies=1)


@pytest.mark.parametrize("name", ["Adafactor", "AdamW"])
@pytest.mark.ranks(4, in_turn=True)
def test_in_a_hybrid_mesh_each_copy_does_the_same(name: str) -> None:
    step_beside_plain(name, copies=2)


class SmallWeightsOnly(torch.optim.SGD):
    """Steps on the elements that were small when it was given them, whose norm it knows."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            small = (param.detach().abs() < 0.2).to(param.dtype)
            self.state[param].update(small=small, norm=param.detach().norm())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a loss
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    param.sub_(group["lr"] * param.grad * state["small"] / (1 + state["norm"]))


@pytest.mark.ranks(2, in_turn=True)
def test_an_optimizer_may_read_values_when_it_is_built() -> None:
    plain = Words()
    model = shard(copy.deepcopy(plain))
    oss = OSS(
        list(model.parameters())[:3], SmallWeightsOnly, options=OSSOptions(elementwise=False, bucket_numel=60), lr=0.1
    )
    reference = SmallWeightsOnly(list(plain.parameters())[:3], lr=0.1)
    for optimizer, net in ((oss, model), (reference, plain)):
        optimizer.add_param_group({"params": list(net.parameters())[3:]})
    full_params = [param for bucket in oss.full_param_buckets for param in bucket.optimizer_params]
    assert not any(param.untyped_storage().nbytes() for param in full_params)
    train_beside(plain, model, loss_of, (reference, oss), steps=2)


# What a training loop does with it.


def built(recipe: str) -> tuple[Words, Any]:
    model = shard(Words())
    if recipe == "split":
        return model, split_by(
            model, (BY_MATRIX, {"lr": 0.02}), (torch.optim.AdamW, {"lr": 0.01}), options=OSSOptions(bucket_numel=60)
        )
    return model, OSS(model.named_parameters(), torch.optim.Adafactor, lr=0.01, options=OSSOptions(bucket_numel=60))


def train(model: Words, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        loss_of(model, 0, 10 * step).backward()  # The same batch on every rank, so that the world's size is no matter.
        optimizer.step()
        optimizer.zero_grad()


def train_and_save(recipe: str, folder: Path) -> None:
    model, optimizer = built(recipe)
    train(model, optimizer, range(2))
    save_snapshot(folder, 2, sharded_state_dict(model, optimizer))


def train_on(recipe: str, folder: Path) -> None:
    straight, its = built(recipe)
    train(straight, its, range(4))
    model, optimizer = built(recipe)
    read = load_snapshot(folder, lambda saved: target_state_dict(model, optimizer, saved))
    load_sharded_state_dict(read.state, model, optimizer, copy=False)
    train(model, optimizer, range(2, 4))
    for mine, theirs in zip(model.state_dict().values(), straight.state_dict().values(), strict=True):
        # The mean of three equal gradients is rounded, that of two is not.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", ["adafactor", "split"])
def test_it_is_saved_in_pieces_and_trains_on_in_another_world(recipe: str, tmp_path: Path) -> None:
    run_ranks(train_and_save, 3, recipe, tmp_path)
    run_ranks(train_on, 2, recipe, tmp_path)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.ranks(2, in_turn=True)
def test_the_whole_state_loads_before_and_after_steps(cls: type[Optimizer]) -> None:
    """The full state, into the optimizer that has given it, and into a fresh one."""
    model = shard(Words())
    optimizer = OSS(model.parameters(), cls, lr=0.01)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict(all_ranks=True))
    for each in (optimizer, OSS(model.parameters(), cls, lr=0.01)):
        each.load_state_dict(state)
        assert_equal_trees(each.state_dict(all_ranks=True), state)


@pytest.mark.ranks(3, in_turn=True)
def test_matrices_and_others_train_by_their_own_optimizers() -> None:
    """Matrices to one optimizer, all else to the other, by the shapes that they have as wholes; clipped by one norm."""
    plain = Words()
    model = shard(copy.deepcopy(plain))
    ours = split_by(model, (BY_MATRIX, {"lr": 0.02}), (torch.optim.AdamW, {"lr": 0.01}))
    others = [name for name, _ in plain.named_parameters() if name not in HIDDEN]
    assert [group["param_names"] for group in ours.param_groups] == [HIDDEN, others]
    matrices = BY_MATRIX([plain.get_parameter(name) for name in HIDDEN], lr=0.02)
    rest = torch.optim.AdamW([plain.get_parameter(name) for name in others], lr=0.01)

    def step_both(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        torch.testing.assert_close(ours.clip_grad_norm_(1e6), expected, rtol=1e-6, atol=0)
        rest.step()

    matrices.register_step_pre_hook(step_both)
    train_beside(plain, model, loss_of, (matrices, ours))


@pytest.mark.ranks(2, in_turn=True)
def test_flat_parameters_are_stepped_on_or_refused() -> None:
    """An element-wise optimizer steps on flat parameters; others, and a gathering by numbers, are refused by name."""
    model = shard(Words(), flatten_parameters=True)
    with pytest.raises(ValueError, match=r"'.*flat_param_0' is one flat parameter .*flatten_parameters=False"):
        OSS(model.parameters(), torch.optim.Adafactor)
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, optimizer, range(2))
    with pytest.raises(ValueError, match=r"full_optim_state_dict\(model, optimizer\.optim\)"):
        optimizer.consolidate_state_dict()
    gathered = full_optim_state_dict(model, optimizer.optim, recipient_rank=None)
    pieces = sharded_state_dict(model, optimizer)
    for name, state in gathered["state"].items():
        piece = pieces[f"optim.{name}.exp_avg"]
        assert torch.equal(state["exp_avg"].reshape(-1)[piece.start : piece.stop], piece.tensor.reshape(-1))


@pytest.mark.simulation
@pytest.mark.parametrize("numel", [64 * 64, 4 * 64 * 64])
def test_a_step_takes_two_collectives_and_one_bucket(numel: int) -> None:
    """On rank 3 of 8: 32 matrices, of which each rank owns 4, in rounds of one or in one of all."""
    with simulate(rank=3, world_size=8) as simulation:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = OSS(
            model.parameters(),
            torch.optim.SGD,
            lr=0.1,
            momentum=0.9,
            options=OSSOptions(elementwise=False, bucket_numel=numel),
        )
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            before = simulation.current_bytes
            simulation.restart()
            optimizer.step()
        rounds = 4 * 64 * 64 // numel
        assert [call.op for call in simulation.collectives] == ["all_to_all"] * 2 * rounds
        # Seven eighths of its own pieces go to others: parameters and gradients out, and what it owns back.
        assert sum(call.bytes_sent for call in simulation.collectives) == 3 * (4 * 64 * 64) * 4 * 7 // 8
        assert simulation.peak_bytes - before <= 4 * numel * 4
        state = sum(entry["momentum_buffer"].numel() for entry in optimizer.optim.state.values())
        assert state == 4 * 64 * 64 and simulation.current_bytes == before


class NormalizedSGD(Optimizer):
    """Divides by one norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(self.param_groups[0]["lr"] / norm * param.grad)


def test_a_norm_over_all_tensors_goes_without_oss() -> None:
    model = fully_shard(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"OSS: NormalizedSGD updates each .*Use NormalizedSGD on the shards, without"):
        OSS(model.parameters(), NormalizedSGD)
    optimizer = NormalizedSGD(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    moved = torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.1), rtol=1e-3, atol=0)
