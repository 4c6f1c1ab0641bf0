"""Techniques that take their ranks from one `ParallelDims`: three clipped steps on four ranks equal one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from rank_values import by_rank
from torch import Tensor, nn
from trainings import Block, Net, assert_parity, drawn, train

from scale_adascale import AdaScale
from scale_check.recording import Recording
from scale_core import ParallelDims, clip_grad_norm_, group_of
from scale_core.comm.group import Group
from scale_core.shard import shard_of
from scale_fsdp import full_state_dict, fully_shard
from scale_moe import Balance, MoE, average_replicated_gradients
from scale_oss import OSS, LocalSGD, ShardedDataParallel
from scale_pipe import DistributedPipe
from scale_tp import initialize_model_parallel, parallelize
from scale_tp.megatron import get_tensor_model_parallel_ranks

PLAN = {"blocks.*.norm": "replicate", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
BATCH = 8


class ExpertBlock(nn.Module):
    """A residual block of experts, whose load balancing loss looks at the tokens of all ranks."""

    def __init__(self, dims: ParallelDims | Group) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        options: Any = {"batch_process_group": dims} if isinstance(dims, Group) else {}
        self.moe = MoE(6, 10, num_experts=3, balance=Balance(aux_loss_coef=0.1), process_group=dims, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.norm(x))
        return y


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch_of(step: int, dims: ParallelDims | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this rank's part of the batch of a step."""
    inputs, targets = drawn(step, (BATCH, 3), (BATCH, 2))
    if dims is None:
        return inputs, targets
    batch = group_of(dims, "batch")
    return inputs.chunk(batch.size)[batch.rank], targets.chunk(batch.size)[batch.rank]


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dims: ParallelDims | None = None,
    state: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Recording:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        inputs, targets = batch_of(step, dims)
        return mean_square(model(inputs), targets)

    clip = partial(clip_grad_norm_, list(model.parameters()), 0.5)
    return train(model, optimizer, loss_of, range(3), clip=clip, state=state)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


def assert_as_one_process(recording: Recording, block: Callable[[], nn.Module] = Block, *, weights: bool) -> None:
    """Where other ranks have the full weights, losses and norms alone are compared."""
    model = Net(block=block)
    expected = trained(model, adamw(model), state=model.state_dict if weights else None)
    assert_parity(expected, by_rank(recording))


@pytest.mark.composition("scale-tp", "scale-fsdp", "scale-adascale")
@pytest.mark.ranks(4, in_turn=True)
def test_divided_layers_are_sharded_and_measured() -> None:
    dims, model = ParallelDims(tp=2), Net()
    parallelize(model, PLAN, dims)
    for block in model.blocks:
        fully_shard(block, dims)
    fully_shard(model, dims)
    optimizer = AdaScale(adamw(model), scale=1.0, process_group=dims, model_parallel_group=dims)
    assert_as_one_process(trained(model, optimizer, dims, partial(full_state_dict, model)), weights=True)
    optimizer.unhook()


@pytest.mark.composition("scale-moe", "scale-fsdp")
@pytest.mark.parametrize("dp_replicate", [1, 2])
@pytest.mark.ranks(4, in_turn=True)
def test_experts_are_sharded_over_the_ranks_that_have_the_same(dp_replicate: int) -> None:
    dims = ParallelDims(ep=2, dp_replicate=dp_replicate)
    model = Net(block=partial(ExpertBlock, dims))
    for block in model.blocks:
        fully_shard(block.moe.experts, dims)
        fully_shard(block, dims)
    fully_shard(model, dims)
    ranks = {name: {axis.group.ranks for axis in shard_of(param).axes} for name, param in model.named_parameters()}
    same_experts, copies = group_of(dims, "efsdp").ranks, group_of(dims, "fsdp").ranks
    for name, groups in ranks.items():
        assert (same_experts if ".experts." in name else copies) in groups, (name, groups)
    recording = trained(model, adamw(model), dims, partial(full_state_dict, model))
    assert_as_one_process(recording, partial(ExpertBlock, Group()), weights=True)


@pytest.mark.composition("scale-moe", "ShardedDataParallel")
@pytest.mark.ranks(4, in_turn=True)
def test_experts_train_beside_an_optimizer_in_shards() -> None:
    dims = ParallelDims(ep=2)
    model = Net(block=partial(ExpertBlock, dims))
    average_replicated_gradients(model, dims)
    optimizer = OSS(model.parameters(), torch.optim.AdamW, dims, lr=0.02, eps=1e-3)
    recording = trained(ShardedDataParallel(model, optimizer, dims), optimizer, dims)
    assert_as_one_process(recording, partial(ExpertBlock, Group()), weights=False)


@pytest.mark.composition("scale-pipe", "scale-fsdp")
@pytest.mark.ranks(4, in_turn=True)
def test_stages_are_sharded() -> None:
    dims, model = ParallelDims(pp=2), Net()
    layers = nn.Sequential(model.embed, *model.blocks, model.head)
    pipe = DistributedPipe(layers, "1f1b", balance=[3, 3], chunks=2, process_group=dims)
    for stage in pipe.stages.values():
        fully_shard(stage, dims)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.02, eps=1e-3)

    def loss_of(model: Any, step: int) -> Tensor:
        inputs, targets = batch_of(step, dims)
        loss: Tensor = pipe.step(inputs, target=targets, loss_fn=mean_square)
        return loss

    recording = train(pipe, optimizer, loss_of, range(3), clip=partial(pipe.clip_grad_norm_, 0.5))
    assert_as_one_process(recording, weights=False)


@pytest.mark.ranks(4, in_turn=True)
def test_a_unit_of_experts_and_other_parameters_is_refused() -> None:
    dims = ParallelDims(ep=2)
    block = ExpertBlock(dims)
    with pytest.raises(ValueError, match=r"Shard the experts first, .* fully_shard\(block\.moe\.experts, dims\)"):
        fully_shard(block, dims)
    fully_shard(block, dims, ignored_params=set(block.moe.experts.parameters()))


@pytest.mark.ranks(4)
def test_layers_without_a_group_take_the_described_ranks() -> None:
    dims = ParallelDims(tp=2)
    with pytest.raises(ValueError, match="leave the other arguments out"):
        initialize_model_parallel(dims, 2)
    initialize_model_parallel(dims)
    assert tuple(get_tensor_model_parallel_ranks()) == group_of(dims, "tp").ranks


@pytest.mark.ranks(4, in_turn=True)
def test_local_sgd_needs_replicas() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"expected ranks along dp_replicate.*write ParallelDims\(dp_replicate="):
        LocalSGD(model, optimizer, sync_every=2, process_group=ParallelDims())
    local = LocalSGD(model, optimizer, sync_every=2, process_group=ParallelDims(dp_replicate=4))
    assert local.group.size == 4
