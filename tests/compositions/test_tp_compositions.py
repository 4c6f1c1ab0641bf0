"""scale-tp beside the techniques that spread a model over the other ranks: two axes, and each element once.

Four ranks are two replicas of a model that two ranks divide, or two stages that two ranks divide each. Whatever else
spreads the model, three steps with clipped gradients equal plain PyTorch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from trainings import Net, assert_parity, drawn, mean_gradients, recorded

from scale_check.recording import Recording
from scale_checkpoint import checkpoint_wrapper
from scale_core import clip_grad_norm_, grad_norm
from scale_core.comm.group import Group, group_of
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe, split
from scale_snapshot import load_snapshot, save_snapshot
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import Plan
from scale_tp.layers.attention import ParallelAttention
from scale_tp.state_dict import full_state_dict

PLAN: Plan = {
    "blocks.*.attention.(query|key|value)": "colwise",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.norm": "replicate",
}
STEPS, LR, CLIP = 3, 0.1, 0.5


class Attention(nn.Module):
    """Three heads that share one key-value head; divided between two ranks, these have copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 3, 1, 2
        self.query, self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.output = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, 2).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        y: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Attention()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def net() -> Net:
    return Net(2, block=Layer)


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    x, target = drawn(10 * step + replica, (4, 5, 3), (4, 5, 2))
    return x, target


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, target = batch_of(step, rank)
    loss: Tensor = (model(x) - target).square().mean()
    return loss


def norms_of(params: Iterable[Tensor]) -> list[float]:
    """The largest gradient and the root of the sum of squares, by which is clipped."""
    params = list(params)
    return [float(grad_norm(params, math.inf)), float(clip_grad_norm_(params, CLIP))]


def expected_training() -> tuple[Recording, Net]:
    """Of two replicas on one process: losses, norms before gradients were clipped, and weights."""
    model, norms, losses = net(), [], []
    optimizer = SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        losses.append(sum(mean_gradients(model, loss_of, step, 2)) / 2)
        largest = nn.utils.clip_grad_norm_(model.parameters(), math.inf, math.inf)
        norms.append([float(largest), float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))])
        optimizer.step()
    return recorded(losses, model.state_dict(), norms=norms), model


def spread(kind: str, data: Group, tensor: Group) -> tuple[nn.Module, Net, Any]:
    """What is called, the model itself and its optimizer."""
    model = net()
    parallelize(model, PLAN, tensor, sequence_parallel="sequence" in kind)
    if "checkpointed" in kind:
        for block in model.blocks:
            checkpoint_wrapper(block)
    group = data.process_group
    if kind.startswith("fsdp"):
        for block in model.blocks:
            fully_shard(block, group)
        fully_shard(model, group)
        return model, model, SGD(model.parameters(), lr=LR)
    if kind.startswith("sharded ddp"):
        optimizer = OSS(model.parameters(), SGD, group, lr=LR)
        return ShardedDataParallel(model, optimizer), model, optimizer
    return DistributedDataParallel(model, process_group=group), model, SGD(model.parameters(), lr=LR)


def two_axes() -> tuple[Group, Group]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return group_of(mesh["data"]), group_of(mesh["tensor"])


def train_on_two_axes(kind: str, folder: str) -> Recording:
    data, tensor = two_axes()
    called, model, optimizer = spread(kind, data, tensor)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(called, data.rank, step)
        loss.backward()
        losses.append(loss.item())
        if isinstance(optimizer, OSS):
            norms.append([float(optimizer.clip_grad_norm_(*each)) for each in ((math.inf, math.inf), (CLIP, 2.0))])
        else:
            norms.append(norms_of(model.parameters()))
        optimizer.step()
    if isinstance(optimizer, OSS):  # A state of a layer waits for its parameters.
        (bucket,) = optimizer.buckets
        assert bucket.is_gathering
        model.blocks[0].get_submodule("up").state_dict()
        assert not bucket.is_gathering
    save_snapshot(folder, STEPS, sharded_state_dict(model, optimizer), group_of())
    return recorded(losses, full_state_dict(model), norms=norms)


def read_snapshot(folder: Path, group: Group) -> Recording:
    model = net()
    if group.size > 1:
        parallelize(model, PLAN, group)
    optimizer = SGD(model.parameters(), lr=LR)
    loaded = load_snapshot(folder, lambda saved: target_state_dict(model, optimizer, saved), group)
    load_sharded_state_dict(loaded.state, model, optimizer, copy=False)
    return recorded([0.0], full_state_dict(model))


@pytest.mark.composition("scale-tp", "scale-fsdp")
@pytest.mark.composition("scale-tp", "ShardedDataParallel")
@pytest.mark.composition("scale-tp", "DistributedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-tp", "scale-fsdp")
@pytest.mark.parametrize(
    "kind", ["ddp", "ddp sequence", "fsdp", "fsdp sequence checkpointed", "sharded ddp", "sharded ddp sequence"]
)
@pytest.mark.ranks(4, in_turn=True)
def test_two_axes_train_as_one_process(kind: str, tmp_path: Path) -> None:
    """What they save is read by one rank, and by three that divide the layers."""
    expected, model = expected_training()
    assert_parity(expected, by_rank(train_on_two_axes(kind, str(tmp_path))), rel=1e-7, norm_rel=1e-6)
    three = dist.new_group([0, 1, 2])
    if kind in ("fsdp", "ddp") and dist.get_rank() < 3:
        for group in (Group(), group_of(three)):
            read = read_snapshot(tmp_path, group)
            assert_parity(recorded([0.0], model.state_dict()), [read], rel=1e-7)


@pytest.mark.composition("scale-pipe", "scale-tp")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(4, in_turn=True)
def test_stages_of_a_pipeline_may_be_divided(sequence_parallel: bool) -> None:
    """Each of two stages on two ranks that divide its layers; norms are over the stages and over the ranks of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
    model = net()
    parallelize(model, PLAN, mesh["tensor"], sequence_parallel=sequence_parallel)
    pipe = DistributedPipe(split(model, ["blocks.1"]), "1f1b", chunks=2, process_group=mesh["stage"])
    optimizer, losses, norms = SGD(pipe.parameters(), lr=LR), [], []
    for step in range(STEPS):
        x, target = (torch.cat(parts) for parts in zip(batch_of(step, 0), batch_of(step, 1), strict=True))
        optimizer.zero_grad()
        losses.append(pipe.step(x, target=target, loss_fn=nn.functional.mse_loss).item())
        norms.append(norms_of(pipe.parameters()))
        optimizer.step()
    state, held = {}, set(pipe.parameters())
    for name, param in model.named_parameters():
        if param in held:
            module, _, attribute = name.rpartition(".")
            owner: Any = model.get_submodule(module)
            state[name] = owner.full_parameter(attribute) if hasattr(owner, "full_parameter") else param
    of_ranks = by_rank(recorded(losses, state, norms=norms))
    assert_parity(expected_training()[0], of_ranks, rel=1e-7, norm_rel=1e-6, in_parts=True)


def compare_whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, axes: tuple[Group, Group]) -> None:
    """By torch's functions: whole on rank 0 as on one process after one step, and back into another model's."""
    asked = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = [get_optimizer_state_dict(model, optimizer, options=asked)]
    alone = net()
    plain_optimizer = torch.optim.AdamW(alone.parameters(), lr=LR)
    mean_gradients(alone, loss_of, 0, 2)
    plain_optimizer.step()
    expected = get_optimizer_state_dict(alone, plain_optimizer)["state"]
    if torch.distributed.get_rank():
        assert whole == [{}]
    else:
        torch.testing.assert_close(whole[0]["state"], expected, rtol=1e-9, atol=1e-12)
    torch.distributed.broadcast_object_list(whole)
    _, other, _ = spread("fsdp", *axes)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.7)
    set_optimizer_state_dict(other, fresh, whole[0], options=StateDictOptions(full_state_dict=True))
    for mine, its in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[its].items():
            assert torch.equal(fresh.state[mine][key], value), key


@pytest.mark.ranks(4, in_turn=True)
def test_the_optimizers_state_of_one_rank_is_refused_on_all() -> None:
    """One rank's shard of the optimizer's state is given to all: of those that hold other elements, some share none."""
    data, tensor = two_axes()
    called, model, _ = spread("fsdp", data, tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss_of(called, data.rank, 0).backward()
    optimizer.step()
    compare_whole_state(model, optimizer, (data, tensor))
    states = [optimizer.state_dict()]
    dist.broadcast_object_list(states)
    with pytest.raises(ValueError, match="is the shard of rank 0 of 4") as error:
        optimizer.load_state_dict(states[0])
    words = "this rank holds other elements" if dist.get_rank() else "It fits this rank, but not all others"
    assert words in str(error.value)


def test_parallel_attention_is_a_unit_like_any_other() -> None:
    model = nn.Sequential(ParallelAttention(6, 3, 1, 2, dtype=torch.float64))
    expected = model(torch.ones(1, 2, 6, dtype=torch.float64))
    fully_shard(model)
    assert torch.equal(model(torch.ones(1, 2, 6, dtype=torch.float64)), expected)


@pytest.mark.ranks(4, in_turn=True)
def test_edits_under_two_axes_are_those_of_one_process() -> None:
    """Gradients are edited before the step and parameters after it; both are parts of divided parameters."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize(model, {"0": "colwise_gather_output", "2": "colwise_gather_output"}, mesh["tensor"])
    optimizer = OSS(model.parameters(), SGD, mesh["data"].get_group(), lr=0.1, momentum=0.5)
    wrapped, reference = ShardedDataParallel(model, optimizer), SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(3, 4, generator=generator).double() for _ in range(2)]
        wrapped(batches[mesh["data"].get_local_rank()]).square().mean().backward()
        (torch.stack([plain(batch).square().mean() for batch in batches]).mean()).backward()
        for params, each in ((list(model.parameters()), optimizer), (list(plain.parameters()), reference)):
            for param in params:
                assert param.grad is not None and param.grad.shape == param.shape
                param.grad.mul_(0.5)
                param.grad = param.grad * 2 + param.grad.abs()
            each.step()
            with torch.no_grad():
                for param in params:
                    param.clamp_(-0.4, 0.4)
            each.zero_grad()
    expected = recorded([0.0], plain.state_dict())
    assert_parity(expected, [recorded([0.0], full_state_dict(model))], rel=1e-12)
