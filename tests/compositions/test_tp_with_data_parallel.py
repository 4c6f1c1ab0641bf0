"""scale-tp in two axes with scale-fsdp and scale-oss: layers are divided along one, shards stand along the other.

Two ranks divide each layer, and two such pairs average their gradients. The reference is the plain model on one
process, with the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from rank_values import by_rank
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from trainings import add_weights, assert_parity, train
from with_options import with_options

import scale_tp
from scale_check.recording import Recording
from scale_core import grad_norm
from scale_core.comm.group import Group
from scale_core.shard import shard_of
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.dcp import dcp_target
from scale_fsdp import ShardOptions, fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_tp import LayerOptions, megatron

DIM, HIDDEN, WORDS, LENGTH = 5, 7, 11, 3
STEPS = 4


class Block(nn.Module):
    def __init__(self, divided: bool, sequence_parallel: bool) -> None:
        super().__init__()
        options: Any = {"sequence_parallel": sequence_parallel} if divided else {}
        self.norm = (scale_tp.ParallelLayerNorm if divided and sequence_parallel else nn.LayerNorm)(DIM)
        if divided:
            self.up: nn.Module = scale_tp.ColumnParallelLinear(
                DIM, HIDDEN, **with_options(LayerOptions, gather_output=False, **options)
            )
            self.down: nn.Module = scale_tp.RowParallelLinear(
                HIDDEN, DIM, **with_options(LayerOptions, input_is_parallel=True, **options)
            )
        else:
            self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model of torch's layers, or of those of scale-tp under the same names; its head is its embedding."""

    def __init__(self, divided: bool, sequence_parallel: bool = False) -> None:
        super().__init__()
        options: Any = {"sequence_parallel": sequence_parallel} if divided else {}
        self.embed = (
            scale_tp.VocabParallelEmbedding(WORDS, DIM, **with_options(LayerOptions, **options))
            if divided
            else nn.Embedding(WORDS, DIM)
        )
        self.blocks = nn.ModuleList(Block(divided, sequence_parallel) for _ in range(2))
        if divided:
            self.head: nn.Module = scale_tp.ColumnParallelLinear(
                DIM, WORDS, **with_options(LayerOptions, bias=False, **options)
            )
        else:
            self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_model() -> Net:
    torch.manual_seed(0)
    model = Net(divided=False)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.7, 0.7)
    return model.double()


def divided_model(sequence_parallel: bool) -> Net:
    model = Net(divided=True, sequence_parallel=sequence_parallel).double()
    model.load_state_dict(plain_model().state_dict())
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (4, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, eps=1e-3)


def train_plain() -> Recording:
    model = plain_model()
    clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()], 0.5)

    def of_step(model: nn.Module, step: int) -> Tensor:
        return loss_of(model, batches()[step])

    return train(model, optimizer_of(model.parameters()), of_step, range(STEPS), clip=clip, state=model.state_dict)


def assert_as_plain(trained: Recording) -> None:
    """Both pairs of ranks divide a model, and have one batch each: losses of ranks are those of two of four."""
    scale_tp.destroy_model_parallel()
    assert_parity(train_plain(), by_rank(trained), rel=1e-6)


def train_divided(model: nn.Module, optimizer: Any, clip: Callable[[], Tensor]) -> Recording:
    def of_step(model: nn.Module, step: int) -> Tensor:
        return loss_of(model, batches()[step].split(2)[megatron.get_data_parallel_rank()])

    return train(model, optimizer, of_step, range(STEPS), clip=clip)


def read_by_a_plain_model(model: nn.Module, optimizer: Any, folder: str) -> dict[str, Tensor]:
    """The weights that a plain model reads from a checkpoint of this one, which has all states of an optimizer."""
    dcp.save(sharded_state_dict(model, optimizer), checkpoint_id=folder)
    alone = plain_model()
    fresh = optimizer_of(alone.parameters())
    target = dcp_target(folder, alone, fresh)
    dcp.load(target, checkpoint_id=folder)
    load_sharded_state_dict(target, alone, fresh, copy=False)
    assert len(fresh.state) == len(list(alone.parameters()))
    assert all(state["exp_avg"].shape == param.shape for param, state in fresh.state.items())
    return alone.state_dict()


@pytest.mark.composition("scale-tp", "scale-fsdp")
@pytest.mark.parametrize("by_block, sequence_parallel", [(False, False), (True, True)])
@pytest.mark.ranks(4, in_turn=True)
def test_layers_divided_along_one_axis_train_in_units(by_block: bool, sequence_parallel: bool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    scale_tp.initialize_model_parallel(2)
    model = divided_model(sequence_parallel)
    group = megatron.get_data_parallel_group()
    for block in model.blocks if by_block else ():
        fully_shard(block, mesh=group)
    fully_shard(model, mesh=group)
    optimizer = optimizer_of(model.parameters())
    trained = train_divided(model, optimizer, lambda: model.clip_grad_norm_(0.5))
    shard = shard_of(model.get_parameter("blocks.0.down.weight"))
    assert shard.shape == (DIM, HIDDEN)
    assert [axis.group.size for axis in shard.axes] == [2, 2]
    add_weights(trained, read_by_a_plain_model(model, optimizer, folder))
    compare_whole_over_both_axes(model, folder)
    assert_as_plain(trained)


@pytest.mark.composition("scale-tp", "ShardedDataParallel")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(4, in_turn=True)
def test_layers_divided_along_one_axis_train_in_sharded_ddp(sequence_parallel: bool, tmp_path: Path) -> None:
    scale_tp.initialize_model_parallel(2)
    model = divided_model(sequence_parallel)
    group = megatron.get_data_parallel_group()
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.05, eps=1e-3, process_group=group)
    wrapped = ShardedDataParallel(model, optimizer, process_group=group)
    trained = train_divided(wrapped, optimizer, lambda: optimizer.clip_grad_norm_(0.5))
    add_weights(trained, read_by_a_plain_model(model, optimizer, str(tmp_path)))
    assert_as_plain(trained)


def compare_whole_over_both_axes(model: nn.Module, folder: str) -> None:
    """`state_dict()` is that of the plain model, and each rank takes its piece of it again."""
    expected = plain_model()
    target = dcp_target(folder, expected)
    dcp.load(target, checkpoint_id=folder)
    load_sharded_state_dict(target, expected)
    asked = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for state in (model.state_dict(), scale_tp.full_state_dict(model), asked):
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(value, state[name]) for name, value in expected.state_dict().items())
    part = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(expected.state_dict())
    assert all(torch.equal(param, part[name]) for name, param in model.named_parameters())
    with pytest.raises(ValueError, match=r"is sharded along another axis: call model.load_state_dict"):
        scale_tp.load_full_state_dict(model, expected.state_dict())


@pytest.mark.ranks(4)
def test_a_divided_layer_is_built_on_meta_as_it_is_built_whole() -> None:
    """Unit by unit, each layer gets its part of what it has when it is built as a whole from the same seed."""
    scale_tp.initialize_model_parallel(2)
    torch.manual_seed(3)
    expected = Block(True, False)
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Block(True, False)
    fully_shard(model, mesh=megatron.get_data_parallel_group())
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert len(shard_of(model.up.weight).axes) == 2


@pytest.mark.ranks(4)
def test_flat_parameters_of_divided_layers_are_refused() -> None:
    scale_tp.initialize_model_parallel(2)
    with pytest.raises(ValueError, match=r"is divided between ranks by its layer.*leave flatten_parameters out"):
        fully_shard(
            divided_model(False), mesh=megatron.get_data_parallel_group(), options=ShardOptions(flatten_parameters=True)
        )


class Attending(nn.Module):
    """A block whose attention goes over all of a sequence of which a rank has a part."""

    def __init__(self, divided: bool) -> None:
        super().__init__()
        options: Any = {"attend": scale_tp.ring_attention} if divided else {"process_group": Group()}
        self.attention = scale_tp.ParallelAttention(6, 3, 1, 2, **with_options(LayerOptions, causal=True, **options))
        self.head = scale_tp.ColumnParallelLinear(6, 5, **({"process_group": Group()} if not divided else {}))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(x))


@pytest.mark.ranks(4, in_turn=True)
def test_each_element_counts_once_beside_a_context_axis() -> None:
    """Two ranks divide the layers, two the sequence; shards stand along the context axis, and norms over both."""
    scale_tp.initialize_model_parallel(2, context_parallel_size=2)
    x, target = (torch.randn(2, 8, size, generator=torch.Generator().manual_seed(size)) for size in (6, 5))
    torch.manual_seed(5)
    plain = Attending(False)
    torch.manual_seed(5)
    model = fully_shard(Attending(True), mesh=megatron.get_data_context_parallel_group())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05, eps=1e-3) for each in (plain, model)]
    ranks = megatron.get_data_context_parallel_world_size()
    part, wanted = (scale_tp.split_sequence(tensor) for tensor in (x, target))
    for _ in range(STEPS):
        losses = []
        for each, given, to_be, share in ((plain, x, target, 1), (model, part, wanted, ranks)):
            loss = (each(given) - to_be).square().sum() / (target.numel() / share)
            loss.backward()
            losses.append(loss.detach() / share)
        dist.all_reduce(losses[1], group=megatron.get_data_context_parallel_group())
        torch.testing.assert_close(losses[1], losses[0])
        for norm_type in (2.0, math.inf):
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
            torch.testing.assert_close(model.clip_grad_norm_(0.5, norm_type).float(), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    scale_tp.destroy_model_parallel()


@pytest.mark.ranks(4, in_turn=True)
def test_each_element_counts_once_in_torchs_own_ddp() -> None:
    """DistributedDataParallel along the data axis; the norm is scale-core's."""
    scale_tp.initialize_model_parallel(2)
    model = divided_model(True)
    group = megatron.get_data_parallel_group()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    loss_of(wrapped, batches()[0].split(2)[megatron.get_data_parallel_rank()]).backward()
    plain = plain_model()
    loss_of(plain, batches()[0]).backward()
    grads = [param.grad for param in plain.parameters()]
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    torch.testing.assert_close(grad_norm(model.parameters()), expected, rtol=1e-6, atol=0, check_dtype=False)
    scale_tp.destroy_model_parallel()


@pytest.mark.ranks(4, in_turn=True)
def test_wrappers_over_the_ranks_of_a_layer_are_refused() -> None:
    """Who would take the parts of one rank for those of all is refused, and has changed nothing."""
    scale_tp.initialize_model_parallel(2)
    model = divided_model(False)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for group in (megatron.get_tensor_model_parallel_group(), None):
        for wrap, who in (
            (lambda group=group: nn.parallel.DistributedDataParallel(model, process_group=group), "Distributed"),
            (lambda group=group: fully_shard(model, mesh=group), "fully_shard"),
            (lambda group=group: OSS(model.parameters(), torch.optim.SGD, lr=0.1, process_group=group), "OSS"),
        ):
            with pytest.raises(
                ValueError, match=rf"^{who}.* is a shard \[.*as ranks that hold the same: give it those"
            ):
                wrap()
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    scale_tp.destroy_model_parallel()
