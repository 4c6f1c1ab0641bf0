"""scale-tp beside the techniques that spread a model over the other ranks: two axes, and each element once.

Four ranks are two replicas of a model that two ranks divide, or two stages that two ranks divide each. Whatever else
spreads the model, three steps with clipped gradients equal plain PyTorch.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from scale_adascale import AdaScale
from scale_checkpoint import checkpoint_wrapper
from scale_core import clip_grad_norm_, grad_norm
from scale_core.comm.group import Group, group_of
from scale_core.snapshot import load_snapshot, save_snapshot
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe, split
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Attention()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Linear(3, 6), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    shape = (4, 5)
    return (torch.randn(*shape, size, generator=generator, dtype=torch.float64) for size in (3, 2))  # type: ignore[return-value]


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    x, target = batch_of(step, replica)
    return (model(x) - target).square().mean()


def plain(optimizer_class: type[torch.optim.Optimizer] = SGD) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What two replicas come to, on one process: the state, and the norms of the gradients before they were clipped.

    Of each step there are two, [sum of squares' root, largest magnitude].
    """
    model, norms = Net().double(), []
    optimizer = optimizer_class(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(2):
            (loss_of(model, step, replica) / 2).backward()
        largest = nn.utils.clip_grad_norm_(model.parameters(), math.inf, math.inf)
        norms.append(torch.stack([nn.utils.clip_grad_norm_(model.parameters(), CLIP), largest]))
        optimizer.step()
    return model.state_dict(), norms


def spread(kind: str, data: Group, tensor: Group) -> tuple[nn.Module, Net, Any]:
    """What is called, the model itself and its optimizer."""
    model = Net().double()
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


def clip(optimizer: Any, model: nn.Module) -> Tensor:
    """The norms of a step, as `plain` has them."""
    if isinstance(optimizer, OSS):
        largest = optimizer.clip_grad_norm_(math.inf, math.inf)
        return torch.stack([optimizer.clip_grad_norm_(CLIP), largest])
    largest = grad_norm(list(model.parameters()), math.inf)
    return torch.stack([clip_grad_norm_(list(model.parameters()), CLIP), largest])


KINDS = ("ddp", "ddp sequence", "fsdp", "fsdp sequence checkpointed", "sharded ddp", "sharded ddp sequence")


def _two_axes(folder: str) -> None:
    expected, norms = plain()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = group_of(mesh["data"]), group_of(mesh["tensor"])
    for kind in KINDS:
        called, model, optimizer = spread(kind, data, tensor)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(called, step, data.rank).backward()
            norm = clip(optimizer, model)
            torch.testing.assert_close(
                norm.double(), norms[step], rtol=1e-6, atol=0, msg=lambda text, kind=kind: f"{kind}: norm {text}"
            )
            optimizer.step()
        if isinstance(optimizer, OSS):  # A state of a layer waits for its parameters.
            (bucket,) = optimizer.buckets
            assert bucket.is_gathering
            model.blocks[0].get_submodule("up").state_dict()
            assert not bucket.is_gathering
        state = full_state_dict(model)
        assert list(state) == list(expected), kind
        for name, whole in expected.items():
            torch.testing.assert_close(
                state[name], whole, rtol=0, atol=1e-7, msg=lambda text, kind=kind, name=name: f"{kind} {name}: {text}"
            )
        if kind in ("fsdp", "ddp"):
            save_snapshot(f"{folder}/{kind}", STEPS, sharded_state_dict(model, optimizer), group_of())


def _read(folder: str) -> None:
    expected, _ = plain()
    for kind in ("fsdp", "ddp"):
        model = Net().double()
        if group_of().size > 1:
            parallelize(model, PLAN, group_of())
        optimizer = SGD(model.parameters(), lr=LR)
        loaded = load_snapshot(
            f"{folder}/{kind}", lambda saved, m=model, o=optimizer: target_state_dict(m, o, saved), group_of()
        )
        load_sharded_state_dict(loaded.state, model, optimizer, copy=False)
        for name, whole in full_state_dict(model).items():
            torch.testing.assert_close(whole, expected[name], rtol=0, atol=1e-7)


@pytest.mark.composition("scale-tp", "scale-fsdp")
@pytest.mark.composition("scale-tp", "ShardedDataParallel")
@pytest.mark.composition("scale-tp", "DistributedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-tp", "scale-fsdp")
def test_two_axes_train_as_one_process_and_their_snapshots_are_read_at_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_two_axes, 4, str(tmp_path))
    run_ranks(_read, 3, str(tmp_path))
    run_ranks(_read, 1, str(tmp_path))


def _compare_whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, axes: tuple[Group, Group]) -> None:
    """By torch's functions: whole on rank 0 as on one process after one step, and back into another model's."""
    asked = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = [get_optimizer_state_dict(model, optimizer, options=asked)]
    alone = Net().double()
    plain_optimizer = torch.optim.AdamW(alone.parameters(), lr=LR)
    for replica in range(2):
        (loss_of(alone, 0, replica) / 2).backward()
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


def _state_of_rank_0() -> str:
    """One rank's shard of the optimizer's state is given to all: of those that hold other elements, some share none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = group_of(mesh["data"]), group_of(mesh["tensor"])
    called, model, _ = spread("fsdp", data, tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss_of(called, 0, data.rank).backward()
    optimizer.step()
    _compare_whole_state(model, optimizer, (data, tensor))
    states = [optimizer.state_dict()]
    torch.distributed.broadcast_object_list(states)
    with pytest.raises(ValueError, match="is the shard of rank 0 of 4") as error:
        optimizer.load_state_dict(states[0])
    return str(error.value)


def test_the_optimizers_state_of_one_rank_is_refused_on_all_ranks_of_two_axes() -> None:
    first, *others = run_ranks(_state_of_rank_0, 4)
    assert "It fits this rank, but not all others" in first
    assert all("this rank holds other elements" in message for message in others)


def _stages() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
    for sequence_parallel in (False, True):
        _stages_train(mesh, sequence_parallel)


def _stages_train(mesh: DeviceMesh, sequence_parallel: bool) -> None:
    expected, norms = plain()
    model = Net().double()
    parallelize(model, PLAN, mesh["tensor"], sequence_parallel=sequence_parallel)
    pipe = DistributedPipe(split(model, ["blocks.1"]), "1f1b", chunks=2, process_group=mesh["stage"])
    optimizer = SGD(pipe.parameters(), lr=LR)
    for step in range(STEPS):
        x, target = (torch.cat(parts) for parts in zip(batch_of(step, 0), batch_of(step, 1), strict=True))
        optimizer.zero_grad()
        pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
        params = list(pipe.parameters())
        # Over the stages and, in each, over the ranks that divide it.
        torch.testing.assert_close(clip_grad_norm_(params, CLIP), norms[step][0], rtol=1e-6, atol=0, check_dtype=False)
        optimizer.step()
    for name, param in model.named_parameters():
        if any(param is mine for mine in pipe.parameters()):
            module, _, attribute = name.rpartition(".")
            owner = model.get_submodule(module)
            whole = owner.full_parameter(attribute) if hasattr(owner, "full_parameter") else param.detach()
            torch.testing.assert_close(whole, expected[name], rtol=0, atol=1e-7)


@pytest.mark.composition("scale-pipe", "scale-tp")
def test_stages_of_a_pipeline_may_be_divided() -> None:
    run_ranks(_stages, 4)


def _gains() -> None:
    """The gain of AdaScale is that of one process: its squares are summed over both axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data = group_of(mesh["data"])
    gains = []
    for tensor in (Group(), group_of(mesh["tensor"])):
        model = Net().double()
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.*.(norm|attention.*)": "replicate"}
        parallelize(model, plan, tensor)
        called = DistributedDataParallel(model, process_group=data.process_group)
        optimizer = AdaScale(SGD(model.parameters(), lr=0.01), process_group=data.process_group)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(called, step, data.rank).backward()
            optimizer.step()
            found.append(optimizer.gain())
        gains.append(found)
    assert gains[1] == pytest.approx(gains[0], rel=1e-6)


@pytest.mark.composition("scale-adascale", "scale-tp")
def test_the_gain_of_adascale_is_that_of_the_whole_model() -> None:
    run_ranks(_gains, 4)


def test_parallel_attention_is_a_unit_like_any_other() -> None:
    model = nn.Sequential(ParallelAttention(6, 3, 1, 2, dtype=torch.float64))
    expected = model(torch.ones(1, 2, 6, dtype=torch.float64))
    fully_shard(model)
    assert torch.equal(model(torch.ones(1, 2, 6, dtype=torch.float64)), expected)


def edited_between_backward_and_forward() -> list[float]:
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
    whole = full_state_dict(model)
    return [float((whole[name] - param.detach()).abs().max()) for name, param in plain.named_parameters()]


def test_edits_under_two_axes_are_those_of_one_process() -> None:
    for differences in run_ranks(edited_between_backward_and_forward, 4):
        assert max(differences) < 1e-12
