"""Experts on an axis of their own, beside replicas of them: two ranks divide the experts, two have the same ones.

Four ranks have tokens of their own. The reference is the same model on one process, with the tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from scale_checkpoint import checkpoint_wrapper
from scale_core import clip_grad_norm_, shard_of
from scale_core.comm.group import Group, GroupLike
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.snapshot import load_snapshot, save_snapshot
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.state_dict import target_state_dict
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_moe import Balance, MoE, TokenChoice, average_replicated_gradients
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe

DIM, EXPERTS, STEPS = 6, 3, 4
Around = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE(DIM, 8, EXPERTS, TokenChoice(2), balance=Balance(0.05, 0.02), **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    def __init__(self, around: Around | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(DIM, 3)
        if around is not None:
            self.blocks = nn.ModuleList(map(around, self.blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, DIM, generator=generator) for _ in range(STEPS)]


def optimizer_of(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, eps=1e-3)


def one_process() -> tuple[list[float], list[float], Net]:
    model = Net(process_group=Group(), batch_process_group=Group())
    return *train(model, optimizer_of(model.parameters()), alone=True), model


def train(
    model: nn.Module, optimizer: Any, clip: Callable[[], Tensor] | None = None, *, alone: bool = False
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    clip = clip or partial(clip_grad_norm_, list(model.parameters()), 0.5)
    for batch in batches():
        optimizer.zero_grad()
        x = batch.flatten(0, 1) if alone else batch[dist.get_rank()]
        loss = model(x).square().mean()
        loss.backward()
        norms.append(clip().item())
        optimizer.step()
        if not alone:
            dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / (1 if alone else 4))
    return losses, norms


def compare(found: tuple[list[float], list[float]], model: nn.Module, optimizer: Any, folder: str) -> None:
    """Losses, norms, full state dicts and, through a snapshot that one process reads, weights and optimizer."""
    losses, norms, expected = one_process()
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1] == pytest.approx(norms, rel=1e-5)
    save_snapshot(folder, 1, sharded_state_dict(model, optimizer))
    alone = Net(process_group=Group(), batch_process_group=Group())
    fresh = optimizer_of(alone.parameters())
    read = load_snapshot(folder, partial(target_state_dict, alone, fresh), Group())
    load_sharded_state_dict(read.state, alone, fresh, copy=False)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


def mesh_of(replicas: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replica", "expert"))


def experts_sharded_over_their_own_axis(folder: str) -> None:
    """Two ranks with each expert; and no replicas, where one of four ranks has none of three experts."""
    around: dict[int, Around | None] = {2: None, 1: checkpoint_wrapper}
    for replicas, wrap in around.items():
        mesh = mesh_of(replicas)
        model = Net(wrap, process_group=mesh["expert"], batch_process_group=dist.group.WORLD)
        for block in model.blocks:
            fully_shard(block.moe.experts, mesh["replica"])
            fully_shard(block)
        fully_shard(model)
        optimizer = optimizer_of(model.parameters())
        found = train(model, optimizer)
        shard = shard_of(model.blocks[0].moe.experts.down_proj)
        assert shard.shape == (EXPERTS, DIM, 8)
        assert [axis.group.size for axis in shard.axes] == [replicas, 4 // replicas]
        assert shard.name == "blocks.0.moe.experts.down_proj"
        compare(found, model, optimizer, f"{folder}/{replicas}")
        state = model.state_dict()
        expected = one_process()[2].state_dict()
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)


def wrappers_that_average_over_one_group(folder: str) -> None:
    mesh = mesh_of()
    replicas = mesh["replica"].get_group()
    options: Any = {"process_group": mesh["expert"], "batch_process_group": dist.group.WORLD}
    model = Net(**options)
    average_replicated_gradients(model, mesh["expert"])
    optimizer: Any = optimizer_of(model.parameters())
    wrapped: nn.Module = DistributedDataParallel(model, process_group=replicas)
    compare(train(wrapped, optimizer), model, optimizer, f"{folder}/ddp")
    model = Net(partial(checkpointed, use_reentrant=True), **options)
    average_replicated_gradients(model, mesh["expert"])
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.02, eps=1e-3, process_group=replicas)
    wrapped = ShardedDataParallel(model, optimizer, process_group=replicas)
    found = train(wrapped, optimizer, lambda: optimizer.clip_grad_norm_(0.5))
    compare(found, model, optimizer, f"{folder}/oss")
    for wrap in (DistributedDataParallel, lambda each: fully_shard(each)):
        with pytest.raises(ValueError, match=r"blocks.0.moe.experts.gate_up_proj' is a shard .* its layer divides"):
            wrap(Net(**options))


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.norm, self.moe = module.norm, module.moe
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x + self.moe(self.norm(x)), x, use_reentrant=self.use_reentrant)


def checkpointed(module: nn.Module, use_reentrant: bool) -> nn.Module:
    return Checkpointed(module, use_reentrant)


def noise_is_replayed() -> None:
    """A recomputed forward draws the same noise, and so sends the same rows; loads count once."""
    rule = TokenChoice(1, normalize=False, jitter=0.3, noisy=True)
    x = torch.randn(7, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))

    def gradients(wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        layer = MoE(DIM, 8, 5, rule, balance=Balance(bias_update_rate=0.1))
        torch.manual_seed(3 + dist.get_rank())
        given = x.clone().requires_grad_()
        wrap(layer)(given).square().sum().backward()
        assert int(layer._load.sum()) == 7
        return [given.grad, *(param.grad for param in layer.parameters())]

    expected = gradients(lambda layer: layer)
    for wrap in (
        checkpoint_wrapper,
        lambda layer: partial(checkpoint, layer, use_reentrant=False),
        lambda layer: partial(checkpoint, layer, use_reentrant=True),
    ):
        for one, other in zip(expected, gradients(wrap), strict=True):
            assert torch.equal(one, other)


def stage_layers(group: GroupLike) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(process_group=group, batch_process_group=group) for _ in range(2)]
    for block in blocks:
        block.moe.aux_loss_scale = 1 / 2  # The loss of two micro-batches is their mean.
    return nn.Sequential(blocks[0], nn.Linear(DIM, DIM), blocks[1], nn.Linear(DIM, 3))


def inside_stages() -> None:
    """Two stages, the layers of each on two ranks that divide its experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "expert"))
    options: Any = {"balance": [2, 2], "chunks": 2, "process_group": mesh["stage"]}
    pipe = DistributedPipe(stage_layers(mesh["expert"]), "1f1b", **options)
    plain = stage_layers(Group())
    parts = batches()[0][:2]
    mine = parts[mesh["expert"].get_local_rank()][:4]
    pipe.step(mine, target=mine[:, :3], loss_fn=F.mse_loss)
    for first in (0, 2):
        chunk = torch.cat([part[first : first + 2] for part in parts])
        (F.mse_loss(plain(chunk), chunk[:, :3]) / 2).backward()
    compared = 0
    for name, param in pipe.named_parameters():
        shard, whole = shard_of(param), plain.get_parameter(name).grad
        assert whole is not None and param.grad is not None
        if "experts" in name:
            assert shard is not None
            start = shard.start // whole[0].numel()
            part = local_tensor(param.grad)
            torch.testing.assert_close(part, whole[start : start + len(part)], rtol=1e-4, atol=1e-5, msg=name)
        else:
            dist.all_reduce(param.grad, group=mesh["expert"].get_group())
            torch.testing.assert_close(param.grad / 2, whole, rtol=1e-4, atol=1e-5, msg=name)
        compared += 1
    assert compared >= 7


def optimizer_state_where_ranks_have_no_expert() -> None:
    """One expert on an axis of two ranks: those of the second have empty pieces of empty pieces."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    torch.manual_seed(0)
    model = MoE(DIM, 8, 1, TokenChoice(1), process_group=mesh["expert"])
    fully_shard(model.experts, mesh["replica"])
    optimizer = optimizer_of(fully_shard(model).parameters())
    model(batches()[0][dist.get_rank()]).square().sum().backward()
    optimizer.step()
    whole: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    for name, param in model.named_parameters():
        shard, own = shard_of(param), local_tensor(optimizer.state[param]["exp_avg"]).square().sum()
        dist.all_reduce(own)
        assert shard is not None and whole[name]["exp_avg"].shape == shard.shape
        torch.testing.assert_close(whole[name]["exp_avg"].square().sum(), own)


def four_ranks(folder: str) -> None:
    optimizer_state_where_ranks_have_no_expert()
    experts_sharded_over_their_own_axis(f"{folder}/fsdp")
    wrappers_that_average_over_one_group(f"{folder}/ddp")
    noise_is_replayed()
    inside_stages()


@pytest.mark.composition("scale-moe", "scale-fsdp")
@pytest.mark.composition("scale-moe", "DistributedDataParallel")
@pytest.mark.composition("scale-moe", "ShardedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-moe")
@pytest.mark.composition("scale-moe", "torch.utils.checkpoint")
@pytest.mark.composition("scale-pipe", "scale-moe")
def test_experts_beside_replicas_train_as_one_process_does(tmp_path: Path) -> None:
    run_ranks(four_ranks, 4, str(tmp_path))
