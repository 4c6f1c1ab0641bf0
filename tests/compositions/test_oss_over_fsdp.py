"""scale-oss over scale-fsdp: optimizers that need full tensors, on a model of which no rank has any tensor whole."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from scale_core.comm.group import group_of
from scale_core.simulate import simulate
from scale_core.snapshot import load_snapshot, save_snapshot
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.testing import run_ranks
from scale_fsdp import full_optim_state_dict, fully_shard
from scale_oss import OSS, split_by

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
STEPS = 3


class Block(nn.Module):
    """Prime sizes, so that shards end inside of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 13), nn.Linear(13, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return h


class Net(nn.Module):
    """An embedding that is the head, too; and a block that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        h = self.embed(x)
        for block in self.blocks[: 1 if skip else 2]:
            h = block(h)
        out: Tensor = self.head(h)
        return out


HIDDEN = ["blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight"]


def shard(model: Net, mesh: Any = None, **kwargs: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, mesh, **kwargs)
    return fully_shard(model, mesh, **kwargs)


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))
    total: Tensor = model(tokens, skip=step == 1).square().mean()
    return total


def give_mean_gradients(plain: nn.Module, step: int, copies: int = 1) -> None:
    """Each rank's gradient alone, summed in rank order, divided by their number; the mean of the copies' means."""
    world = group_of().size // copies
    means: list[list[Tensor | None]] = []
    for copy_number in range(copies):
        summed: list[Tensor | None] = [None for _ in plain.parameters()]
        for rank in range(world):
            plain.zero_grad()
            loss(plain, step, copy_number * world + rank).backward()
            for index, param in enumerate(plain.parameters()):
                if param.grad is not None:
                    before = summed[index]
                    summed[index] = param.grad if before is None else before + param.grad
        means.append([None if total is None else total / world for total in summed])
    for param, *parts in zip(plain.parameters(), *means, strict=True):
        param.grad = None if parts[0] is None else sum(parts[1:], parts[0]) / copies


def differing(mine: Any, theirs: Any, where: str) -> list[str]:
    if isinstance(theirs, Tensor):
        return [] if torch.equal(mine, theirs) else [f"{where}: off by {(mine - theirs).abs().max().item():.3g}"]
    if isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return [f"{where}: {list(mine)} instead of {list(theirs)}"]
        return [line for key in theirs for line in differing(mine[key], theirs[key], f"{where}.{key}")]
    if isinstance(theirs, list):
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [line for place, (a, b) in pairs for line in differing(a, b, f"{where}.{place}")]
    return [] if mine == theirs else [f"{where}: {mine} instead of {theirs}"]


def in_order(plain: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    return [plain.get_parameter(name) for name in names]


def beside_plain(name: str, mesh: Any = None, copies: int = 1, **kwargs: Any) -> list[str]:
    """Trains the sharded model by OSS and the plain one by the plain optimizer, to the bit; then compares states."""
    cls: type[Optimizer] = getattr(torch.optim, name)
    plain = Net()
    model = shard(copy.deepcopy(plain), mesh, **kwargs)
    # Muon takes matrices only; of the others, all are trained.
    wanted = [n for n, p in plain.named_parameters() if name != "Muon" or p.ndim == 2]
    ours = OSS(in_order(model, wanted), cls, bucket_numel=60, **OPTIMIZERS[name])
    theirs = cls(in_order(plain, wanted), **OPTIMIZERS[name])
    # Both ways are gone: tensors that travel, and shards that are stepped on where they are.
    assert bool(ours.full_param_buckets) == (name in ("Adafactor", "Muon") and group_of().size > 1)
    schedules = [ExponentialLR(optimizer, 0.9) for optimizer in (ours, theirs)]
    wrong: list[str] = []
    for step in range(STEPS):
        loss(model, step, group_of().rank).backward()
        give_mean_gradients(plain, step, copies)
        norms = [model.clip_grad_norm_(1e6), ours.clip_grad_norm_(1e6)]
        if len(wanted) == len(list(plain.parameters())):
            assert torch.equal(*norms)
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            optimizer.step()
            schedule.step()
        for each in (model, plain):
            each.zero_grad()
        wrong += differing(dict(model.state_dict()), dict(plain.state_dict()), f"{name}, step {step}")
    wrong += differing(ours.state_dict(all_ranks=True), theirs.state_dict(), f"{name}, state")
    return wrong


def these_optimizers(names: list[str]) -> list[str]:
    return [line for name in names for line in beside_plain(name)]


def in_a_hybrid_mesh() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
    return [line for name in ("Adafactor", "AdamW") for line in beside_plain(name, mesh, copies=2)]


A_FEW = [name for name in ("Adafactor", "Muon", "AdamW") if name in OPTIMIZERS]


@pytest.mark.composition("OSS", "scale-fsdp")
def test_every_optimizer_of_torch_is_the_plain_one_to_the_bit() -> None:
    assert run_ranks(these_optimizers, 2, list(OPTIMIZERS)) == [[], []]


def test_so_it_is_where_shards_are_uneven_and_in_a_world_of_one() -> None:
    assert run_ranks(these_optimizers, 3, A_FEW) == [[]] * 3
    assert these_optimizers(A_FEW) == []


def test_in_a_hybrid_mesh_each_copy_does_the_same() -> None:
    assert run_ranks(in_a_hybrid_mesh, 4) == [[]] * 4


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


def values_are_read_when_an_optimizer_is_built() -> list[str]:
    plain = Net()
    model = shard(copy.deepcopy(plain))
    oss = OSS(list(model.parameters())[:3], SmallWeightsOnly, elementwise=False, bucket_numel=60, lr=0.1)
    reference = SmallWeightsOnly(list(plain.parameters())[:3], lr=0.1)
    for optimizer, net in ((oss, model), (reference, plain)):
        optimizer.add_param_group({"params": list(net.parameters())[3:]})
    full_params = [param for bucket in oss.full_param_buckets for param in bucket.optimizer_params]
    assert not any(param.untyped_storage().nbytes() for param in full_params)
    for step in range(2):
        loss(model, step, group_of().rank).backward()
        give_mean_gradients(plain, step)
        for optimizer in (oss, reference):
            optimizer.step()
            optimizer.zero_grad()
    return differing(dict(model.state_dict()), dict(plain.state_dict()), "after two steps")


def test_an_optimizer_may_read_values_when_it_is_built() -> None:
    assert run_ranks(values_are_read_when_an_optimizer_is_built, 2) == [[], []]


# What a training loop does with it.


def built(recipe: str) -> tuple[Net, Any]:
    model = shard(Net())
    if recipe == "split":
        return model, split_by(model, (BY_MATRIX, {"lr": 0.02}), (torch.optim.AdamW, {"lr": 0.01}), bucket_numel=60)
    return model, OSS(model.named_parameters(), torch.optim.Adafactor, lr=0.01, bucket_numel=60)


def train(model: Net, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        loss(model, 10 * step, 0).backward()  # The same batch on every rank, so that the world's size is no matter.
        optimizer.step()
        optimizer.zero_grad()


def straight_and_saved(folder: Path) -> None:
    for recipe in ("adafactor", "split"):
        model, optimizer = built(recipe)
        train(model, optimizer, range(2))
        save_snapshot(folder / recipe, 2, sharded_state_dict(model, optimizer))


def gone_on(folder: Path) -> list[str]:
    wrong = []
    for recipe in ("adafactor", "split"):
        straight, its = built(recipe)
        train(straight, its, range(4))
        model, optimizer = built(recipe)
        read = load_snapshot(folder / recipe, lambda saved, m=model, o=optimizer: target_state_dict(m, o, saved))
        load_sharded_state_dict(read.state, model, optimizer, copy=False)
        train(model, optimizer, range(2, 4))
        distance = max(
            (mine - theirs).abs().max().item()
            for mine, theirs in zip(model.state_dict().values(), straight.state_dict().values(), strict=True)
        )
        if distance > 1e-6:  # The mean of three equal gradients is rounded, that of two is not.
            wrong.append(f"{recipe}: off by {distance}")
    return wrong


def test_it_is_saved_in_pieces_and_trains_on_at_another_world_size(tmp_path: Path) -> None:
    run_ranks(straight_and_saved, 3, tmp_path)
    assert run_ranks(gone_on, 2, tmp_path) == [[], []]


def loaded_after_steps() -> list[str]:
    """The full state, into the optimizer that has given it, and into a fresh one: both train on alike."""
    wrong = []
    for cls in (torch.optim.AdamW, torch.optim.Adafactor):
        model = shard(Net())
        optimizer = OSS(model.parameters(), cls, lr=0.01)
        train(model, optimizer, range(2))
        state = copy.deepcopy(optimizer.state_dict(all_ranks=True))
        fresh = OSS(model.parameters(), cls, lr=0.01)
        for by in (optimizer, fresh):
            by.load_state_dict(state)
            wrong += differing(by.state_dict(all_ranks=True), state, cls.__name__)
    return wrong


def test_the_whole_state_loads_before_and_after_steps() -> None:
    assert run_ranks(loaded_after_steps, 2) == [[], []]


def split_beside_plain() -> list[str]:
    """Matrices to one optimizer, all else to the other, by the shapes that they have as wholes; clipped by one norm."""
    plain = Net()
    model = shard(copy.deepcopy(plain))
    ours = split_by(model, (BY_MATRIX, {"lr": 0.02}), (torch.optim.AdamW, {"lr": 0.01}))
    others = [name for name, _ in plain.named_parameters() if name not in HIDDEN]
    assert [group["param_names"] for group in ours.param_groups] == [HIDDEN, others]
    theirs = [
        BY_MATRIX(in_order(plain, HIDDEN), lr=0.02),
        torch.optim.AdamW(in_order(plain, others), lr=0.01),
    ]
    wrong = []
    for step in range(STEPS):
        loss(model, step, group_of().rank).backward()
        give_mean_gradients(plain, step)
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        assert torch.allclose(ours.clip_grad_norm_(1e6), expected, rtol=1e-6)
        for optimizer in (ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        wrong += differing(dict(model.state_dict()), dict(plain.state_dict()), f"step {step}")
    return wrong


def test_matrices_and_others_train_by_their_own_optimizers_to_the_bit() -> None:
    assert run_ranks(split_beside_plain, 3) == [[]] * 3


def flat_parameters() -> None:
    """An element-wise optimizer steps on flat parameters; others, and a gathering by numbers, are refused by name."""
    model = shard(Net(), flatten_parameters=True)
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


def test_flat_parameters_are_stepped_on_where_they_are_or_refused() -> None:
    run_ranks(flat_parameters, 2)


@pytest.mark.simulation
@pytest.mark.parametrize("numel", [64 * 64, 4 * 64 * 64])
def test_a_step_takes_two_collectives_and_the_memory_of_one_bucket(numel: int) -> None:
    """On rank 3 of 8: 32 matrices, of which each rank owns 4, in rounds of one or in one of all."""
    with simulate(rank=3, world_size=8) as simulation:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = OSS(
            model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, elementwise=False, bucket_numel=numel
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
