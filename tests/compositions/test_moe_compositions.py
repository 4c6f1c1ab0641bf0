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
from rank_values import by_rank
from shard_arguments import shard_arguments
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trainings import ExpertBlock, Net, add_weights, assert_parity, drawn, recorded, train

from scale_check.recording import Recording
from scale_checkpoint import checkpoint_wrapper
from scale_core import clip_grad_norm_
from scale_core.comm.group import Group, GroupLike
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.state_dict import target_state_dict
from scale_fsdp import CPUOffloadPolicy, fully_shard
from scale_moe import Balance, MoE, TokenChoice, average_replicated_gradients
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe
from scale_snapshot import load_snapshot, save_snapshot

DIM, EXPERTS, STEPS = 6, 3, 4
Around = Callable[[nn.Module], nn.Module]


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.norm, self.moe = module.norm, module.moe
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x + self.moe(self.norm(x)), x, use_reentrant=self.use_reentrant)


def checkpointed(module: nn.Module, use_reentrant: bool) -> nn.Module:
    return Checkpointed(module, use_reentrant)


def expert_block(**options: Any) -> ExpertBlock:
    return ExpertBlock(DIM, 8, EXPERTS, TokenChoice(2), balance=Balance(0.05, 0.02), **options)


def net(around: Around | None = None, **options: Any) -> Net:
    def block() -> nn.Module:
        return expert_block(**options) if around is None else around(expert_block(**options))

    return Net(2, inputs=DIM, outputs=3, block=block)


def net_on(mesh: DeviceMesh, around: Around | None = None) -> Net:
    return net(around, process_group=mesh["expert"], batch_process_group=dist.group.WORLD)


def plain_net() -> Net:
    return net(process_group=Group(), batch_process_group=Group())


def loss_of_all(model: nn.Module, step: int) -> Tensor:
    """Of the tokens of all ranks."""
    (tokens,) = drawn(step, (4, 5, DIM))
    loss: Tensor = model(tokens.flatten(0, 1)).square().mean()
    return loss


def loss_of(model: nn.Module, step: int) -> Tensor:
    (tokens,) = drawn(step, (4, 5, DIM))
    loss: Tensor = model(tokens[dist.get_rank()]).square().mean()
    return loss


def optimizer_of(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, eps=1e-3)


def train_and_save(model: nn.Module, called: nn.Module, optimizer: Any, folder: Path) -> Recording:
    """Trains with clipped gradients, and saves a snapshot."""
    params = list(called.parameters())
    clip = (
        partial(optimizer.clip_grad_norm_, 0.5) if isinstance(optimizer, OSS) else partial(clip_grad_norm_, params, 0.5)
    )
    trained = train(called, optimizer, loss_of, range(STEPS), clip=clip)
    save_snapshot(folder, 1, sharded_state_dict(model, optimizer))
    return trained


def assert_as_one_process(trained: Recording, folder: Path, *, weights: bool = False) -> None:
    """Losses, norms, full state dicts and, through a snapshot that one process reads, weights and optimizer."""
    model = plain_net()
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.5)
    expected = train(model, optimizer_of(model.parameters()), loss_of_all, range(STEPS), clip=clip)
    if weights:
        add_weights(expected, model.state_dict())
    assert_parity(expected, by_rank(trained), rel=1e-6)

    alone = plain_net()
    fresh = optimizer_of(alone.parameters())
    read = load_snapshot(folder, partial(target_state_dict, alone, fresh), Group())
    load_sharded_state_dict(read.state, alone, fresh, copy=False)
    assert_parity(recorded([0.0], model.state_dict()), [recorded([0.0], alone.state_dict())], rel=1e-6)


def mesh_of(replicas: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replica", "expert"))


@pytest.mark.composition("scale-moe", "scale-fsdp")
@pytest.mark.composition("scale-checkpoint", "scale-moe")
@pytest.mark.parametrize("replicas, around", [(2, None), (1, checkpoint_wrapper)])
@pytest.mark.ranks(4, in_turn=True)
def test_sharded_experts_train_as_one_process(replicas: int, around: Around | None, tmp_path: Path) -> None:
    """Experts are sharded over their own axis; without replicas one of four ranks has none of three experts."""
    mesh = mesh_of(replicas)
    model = net_on(mesh, around)
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh["replica"])
        fully_shard(block)
    fully_shard(model)
    trained = train_and_save(model, model, optimizer_of(model.parameters()), tmp_path)
    shard = shard_of(model.blocks[0].moe.experts.down_proj)
    assert shard.shape == (EXPERTS, DIM, 8)
    assert [axis.group.size for axis in shard.axes] == [replicas, 4 // replicas]
    assert shard.name == "blocks.0.moe.experts.down_proj"
    add_weights(trained, model.state_dict())
    assert_as_one_process(trained, tmp_path, weights=True)


@pytest.mark.parametrize("replicas", [4, 2])
@pytest.mark.ranks(4, in_turn=True)
def test_experts_with_shards_on_the_host_train_as_one_process(replicas: int, tmp_path: Path) -> None:
    """Shards are copied to the device, which is the host under another name; four ranks have whole experts, or two."""
    mesh = mesh_of(replicas)
    model = net_on(mesh)
    settings = shard_arguments(offload_policy=CPUOffloadPolicy(), compute_device="cpu:0")
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh["replica"], **settings)
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    trained = train_and_save(model, model, optimizer_of(model.parameters()), tmp_path)
    assert_as_one_process(trained, tmp_path)


@pytest.mark.composition("scale-moe", "DistributedDataParallel")
@pytest.mark.ranks(4, in_turn=True)
def test_experts_beside_ddp_train_as_one_process(tmp_path: Path) -> None:
    mesh = mesh_of()
    model = net_on(mesh)
    average_replicated_gradients(model, mesh["expert"])
    optimizer = optimizer_of(model.parameters())
    called = DistributedDataParallel(model, process_group=mesh["replica"].get_group())
    assert_as_one_process(train_and_save(model, called, optimizer, tmp_path), tmp_path)


@pytest.mark.composition("scale-moe", "ShardedDataParallel")
@pytest.mark.composition("scale-moe", "torch.utils.checkpoint")
@pytest.mark.ranks(4, in_turn=True)
def test_experts_beside_oss_train_as_one_process(tmp_path: Path) -> None:
    mesh = mesh_of()
    replicas = mesh["replica"].get_group()
    model = net_on(mesh, partial(Checkpointed, use_reentrant=True))
    average_replicated_gradients(model, mesh["expert"])
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.02, eps=1e-3, process_group=replicas)
    called = ShardedDataParallel(model, optimizer, process_group=replicas)
    assert_as_one_process(train_and_save(model, called, optimizer, tmp_path), tmp_path)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
@pytest.mark.ranks(4, in_turn=True)
def test_divided_experts_are_not_averaged_over_all_ranks(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"blocks.0.moe.experts.gate_up_proj' is a shard .* its layer divides"):
        wrap(net_on(mesh_of()))


@pytest.mark.composition("scale-checkpoint", "scale-moe")
@pytest.mark.composition("scale-moe", "torch.utils.checkpoint")
@pytest.mark.ranks(4, in_turn=True)
def test_a_recomputed_layer_draws_the_same_noise() -> None:
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
    blocks = [expert_block(process_group=group, batch_process_group=group) for _ in range(2)]
    for block in blocks:
        block.moe.aux_loss_scale = 1 / 2  # The loss of two micro-batches is their mean.
    return nn.Sequential(blocks[0], nn.Linear(DIM, DIM), blocks[1], nn.Linear(DIM, 3)).double()


@pytest.mark.composition("scale-pipe", "scale-moe")
@pytest.mark.ranks(4, in_turn=True)
def test_experts_inside_stages_have_the_gradients_of_one_process() -> None:
    """Two stages, the layers of each on two ranks that divide its experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "expert"))
    options: Any = {"balance": [2, 2], "chunks": 2, "process_group": mesh["stage"]}
    pipe = DistributedPipe(stage_layers(mesh["expert"]), "1f1b", **options)
    plain = stage_layers(Group())
    parts = drawn(0, (4, 5, DIM))[0][:2]
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
            torch.testing.assert_close(part, whole[start : start + len(part)], rtol=1e-5, atol=1e-7, msg=name)
        else:
            dist.all_reduce(param.grad, group=mesh["expert"].get_group())
            torch.testing.assert_close(param.grad / 2, whole, rtol=1e-5, atol=1e-7, msg=name)
        compared += 1
    assert compared >= 7


@pytest.mark.ranks(4, in_turn=True)
def test_the_state_of_a_rank_without_experts_is_gathered() -> None:
    """One expert on an axis of two ranks: those of the second have empty pieces of empty pieces."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    torch.manual_seed(0)
    model = MoE(DIM, 8, 1, TokenChoice(1), process_group=mesh["expert"])
    fully_shard(model.experts, mesh["replica"])
    optimizer = optimizer_of(fully_shard(model).parameters())
    model(drawn(0, (4, 5, DIM))[0][dist.get_rank()].float()).square().sum().backward()
    optimizer.step()
    whole: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    for name, param in model.named_parameters():
        shard, own = shard_of(param), local_tensor(optimizer.state[param]["exp_avg"]).square().sum()
        dist.all_reduce(own)
        assert shard is not None and whole[name]["exp_avg"].shape == shard.shape
        torch.testing.assert_close(whole[name]["exp_avg"].square().sum(), own)
