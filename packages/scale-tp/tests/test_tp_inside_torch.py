"""Layers inside what torch has: checkpointing, compilation, autocast, gradients of gradients, simulated ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from with_options import with_options

import scale_tp
from scale_core import compat
from scale_core.comm.group import Group, group_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp import LayerOptions, megatron


class Block(nn.Module):
    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"process_group": group, "sequence_parallel": sequence_parallel}
        self.norm = scale_tp.ParallelLayerNorm(5, process_group=group) if sequence_parallel else nn.LayerNorm(5)
        self.up = scale_tp.ColumnParallelLinear(5, 7, **with_options(LayerOptions, gather_output=False, **options))
        self.down = scale_tp.RowParallelLinear(7, 5, **with_options(LayerOptions, input_is_parallel=True, **options))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def gradients(block: Block, call: Any, x: Tensor, params: Iterable[Tensor] | None = None) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters; those of the block unless given."""
    part = megatron.scatter_to_sequence_parallel_region(x, block.up.group) if block.up.sequence_parallel else x
    part = part.detach().requires_grad_()
    output = call(part)
    of = [part, *(block.parameters() if params is None else params)]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), of)]


@pytest.mark.ranks(2)
def test_inputs_and_layers_without_elements_pass() -> None:
    """Batches, sequences and layers without elements, on some ranks or on all."""
    group = group_of()
    for sequence_parallel in (False, True):
        block = Block(group, sequence_parallel)
        for shape in ((0, 3, 5), (2, 1, 5)):
            output, grad, *_ = gradients(block, block, torch.ones(shape))
            assert output.shape == grad.shape
    for kind in (scale_tp.ColumnParallelLinear, scale_tp.RowParallelLinear):
        assert kind(0, 3, process_group=group)(torch.zeros(2, 0)).shape == (2, 3)
        assert kind(3, 0, process_group=group)(torch.zeros(2, 3)).shape == (2, 0)
        assert kind(3, 1, process_group=group)(torch.ones(3)).shape == (1,)


@pytest.mark.ranks(2)
def test_a_row_layer_has_gradients_of_gradients() -> None:
    group = group_of()
    layer = scale_tp.RowParallelLinear(4, 3, process_group=group, dtype=torch.float64)
    weight = layer.get_master_weight().requires_grad_()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    y = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    (first,) = torch.autograd.grad(F.linear(y, weight, layer.bias.detach()).square().sum(), y, create_graph=True)
    first.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(local_tensor(layer.weight.grad), layer.split.take(weight.grad, group.rank, 1))


# torch.compile looks at the gradient of every tensor that comes into a graph, and torch warns of that.
@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_divided_block_is_the_same_inside_what_torch_has(sequence_parallel: bool) -> None:
    group = group_of()
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    block = Block(group, sequence_parallel)
    expected = gradients(block, block, x)
    compiled = torch.compile(block, backend="eager")
    for call in (lambda part, block=block: checkpoint(block, part, use_reentrant=False), compiled):
        for one, other in zip(gradients(block, call, x), expected, strict=True):
            assert torch.equal(one, other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(block, block.up, x, block.up.parameters())
    assert found[0].dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in found[1:])
    with torch.inference_mode():
        part = megatron.scatter_to_sequence_parallel_region(x, group) if sequence_parallel else x
        assert torch.equal(block(part), expected[0])


@pytest.mark.simulation
def test_one_process_plays_one_rank_of_many() -> None:
    with compat.fake_default_group(1, 8):
        group = group_of()
        block = Block(group, sequence_parallel=True)
        part = megatron.scatter_to_sequence_parallel_region(torch.ones(2, 16, 5), group)
        output = block(part)
        output.sum().backward()
        assert output.shape == (2, 2, 5)
        assert local_tensor(block.up.weight.grad).shape == (1, 5)
        logits = scale_tp.ColumnParallelLinear(5, 32, gather_output=False, process_group=group)(torch.ones(2, 16, 5))
        loss = scale_tp.vocab_parallel_cross_entropy(logits, torch.zeros(2, 16, dtype=torch.long), process_group=group)
        assert loss.shape == (2, 16)
        assert scale_tp.VocabParallelEmbedding(11, 5, process_group=group)(torch.tensor([3, 10])).shape == (2, 5)
