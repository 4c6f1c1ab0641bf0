"""reduction.py: what a rank has computed, what all ranks make of it, and when an optimizer sees it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from flat_by_hand import SHAPES, average, backward, local_grad, make, pieces_of, whole_params
from torch import Tensor

from scale_core.comm.group import Group, group_of
from scale_core.flat.config import DtypePolicy
from scale_core.hooks.gradients import lacks_autograd_hooks, register_local_grad_hook
from scale_core.uneven_inputs import join

pytestmark = pytest.mark.local_tensors


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize(
    "num_ranks, used_by_rank, reduce_dtype",
    [
        (3, {1: [0, 2], 2: []}, None),
        (3, {1: [0, 2], 2: []}, torch.bfloat16),
        (2, {0: [1], 1: [1, 4]}, None),
    ],
)
def test_gradients_are_averaged_and_unused_ones_are_zeros(
    num_ranks: int, used_by_rank: dict[int, list[int]], reduce_dtype: torch.dtype | None
) -> None:
    """Parameters that some ranks have not used count as zeros there; what nobody used is zero."""
    group = group_of()
    buffer = make(group, DtypePolicy(reduce=reduce_dtype))
    used = used_by_rank.get(group.rank, [0, 1, 2, 3, 4])
    for step in (1, 2):
        backward(buffer, used, group.rank)
        assert buffer.has_gradient == bool(used)
        assert buffer.gradient.missing() == [i for i in range(5) if i not in used]
        buffer.reduce(tag=1 << 22)
        assert not buffer.has_gradient and buffer.gradient.missing() == list(range(5))
        buffer.wait_reduced()
        buffer.wait_reduced()  # Nothing to do.
        buffer.commit()
        wire = reduce_dtype or torch.float32
        for index, (param, span) in enumerate(zip(buffer.sharded_params, buffer.spans, strict=True)):
            total = torch.zeros(SHAPES[list(SHAPES)[index]])
            for rank in range(group.size):
                if index in used_by_rank.get(rank, [0, 1, 2, 3, 4]):
                    total = total + local_grad(rank, index, total.shape).to(wire).float()
            expected = step * (total / group.size).reshape(-1)[span.start : span.stop].view(span.shape)
            assert param.grad is not None and param.grad.dtype == torch.float32
            assert torch.equal(param.grad, expected), (index, param.grad, expected)


@pytest.mark.ranks(2, in_turn=True)
def test_the_gradient_of_a_rank_without_data_counts_nothing() -> None:
    """Rank 0 has one batch and rank 1 two, the second of which alone counts; then samples are what counts."""
    group = group_of()
    buffer = make(group)
    for sizes in ([[1], [1, 1]], [[2], [6, 3]]):
        for number, _ in enumerate(join([[0] * size for size in sizes[group.rank]], samples=len)):
            backward(buffer, [0, 1, 2, 3, 4], group.rank)
            buffer.reduce(tag=1 << 22)
            buffer.wait_reduced()
            buffer.commit()
            share = [0.0, 1.0] if number else [size[0] / sum(each[0] for each in sizes) for size in sizes]
            for index, (param, span) in enumerate(zip(buffer.sharded_params, buffer.spans, strict=True)):
                mean = sum(share[rank] * local_grad(rank, index, SHAPES[list(SHAPES)[index]]) for rank in range(2))
                assert isinstance(mean, Tensor) and param.grad is not None
                expected = mean.reshape(-1)[span.start : span.stop].view(span.shape)
                torch.testing.assert_close(param.grad, expected, rtol=1e-6, atol=1e-7)
                param.grad = None


@pytest.mark.ranks(2, in_turn=True)
def test_each_backward_pass_is_reported_alone() -> None:
    """Of passes whose gradients are summed, those that are not reduced are told of when they have gone well."""
    group = group_of()
    heard: list[list[Tensor]] = []

    def listen(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        heard.append([grad.clone() for grad in grads])

    for flatten in (False, True):
        buffer = make(group, flatten=flatten)
        assert all(lacks_autograd_hooks(param) for param in buffer.sharded_params)
        handle = register_local_grad_hook(listen)
        backward(buffer, [0, 4], group.rank, accumulate=True)
        buffer.commit()
        backward(buffer, [], group.rank, accumulate=True)
        buffer.commit()  # Nothing new, so nobody is told.
        backward(buffer, [0], group.rank)
        buffer.reduce()
        handle.remove()
        buffer.commit()
        first, last = heard
        heard.clear()
        one, other = local_grad(group.rank, 0, (5, 3)), local_grad(group.rank, 4, (7,))
        if flatten:
            for found, grads in ((first, {0: one, 4: other}), (last, {0: one})):
                expected = torch.zeros(buffer.layout.full_numel)
                for index, grad in grads.items():
                    expected[buffer.layout.entries[index].offset :][: grad.numel()] = grad.reshape(-1)
                assert len(found) == 1 and torch.equal(found[0], expected)
        else:
            assert [grad.tolist() for grad in first] == [one.tolist(), other.tolist()]
            assert [grad.tolist() for grad in last] == [one.tolist()]
        assert not lacks_autograd_hooks(torch.nn.Parameter(torch.ones(2)))


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.fault(74, techniques=("fsdp",))
def test_micro_batches_are_summed_in_a_wide_dtype() -> None:
    """Micro-batches are summed in a dtype that is wide enough, and sent once."""
    group = group_of()
    buffer = make(group, DtypePolicy(compute=torch.bfloat16, reduce=torch.bfloat16))
    rounded = [local_grad(group.rank, i, tuple(shape)).bfloat16() for i, shape in enumerate(SHAPES.values())]
    for last in (False, False, True):
        backward(buffer, [0, 1, 2, 3, 4], group.rank, accumulate=not last)
        assert buffer.gradient.flat is not None and buffer.gradient.flat.dtype == torch.float32
    assert buffer.gradient.flat is not None
    for index, grad in enumerate(rounded):
        entry = buffer.layout.entries[index]
        held = buffer.gradient.flat.narrow(0, entry.offset, entry.numel).view(entry.shape)
        assert torch.equal(held, grad.float() + grad.float() + grad.float())
    buffer.reduce()
    buffer.commit()
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in buffer.sharded_params)


@pytest.mark.ranks(3, in_turn=True)
@pytest.mark.fault(74, techniques=("fsdp",))
def test_half_precision_parameters_can_be_reduced_in_fp32() -> None:
    group, params = group_of(), whole_params(torch.bfloat16)
    buffer = make(group, DtypePolicy(reduce=torch.float32), params=params)
    backward(buffer, [0, 1, 2, 3, 4], group.rank)
    buffer.reduce()
    buffer.commit()
    for index, (param, span) in enumerate(zip(buffer.sharded_params, buffer.spans, strict=True)):
        total = sum(local_grad(rank, index, params[index].shape).bfloat16().float() for rank in range(group.size))
        assert isinstance(total, Tensor) and param.grad is not None
        expected = (total / group.size).bfloat16().reshape(-1)[span.start : span.stop].view(span.shape)
        assert torch.equal(param.grad, expected)  # Added up in fp32, rounded once.


@pytest.mark.ranks(2, in_turn=True)
def test_a_late_gradient_is_added_by_the_next_reduction() -> None:
    """A gradient that comes while its buffer is being reduced goes into the next reduction, and adds."""
    group = group_of()
    buffer = make(group)
    backward(buffer, [0], group.rank)
    buffer.reduce(tag=1 << 22)
    backward(buffer, [1], group.rank)
    assert buffer.has_gradient
    buffer.commit()
    buffer.reduce(tag=1 << 22)
    buffer.commit()
    wholes = [average(group.size, i, shape) if i < 2 else torch.zeros(shape) for i, shape in enumerate(SHAPES.values())]
    for param, expected in zip(buffer.sharded_params, pieces_of(buffer, wholes), strict=True):
        assert param.grad is not None and torch.equal(param.grad, expected)


@pytest.mark.ranks(2, in_turn=True)
def test_local_gradients_are_reported_whole_and_unreduced() -> None:
    group, heard = group_of(), []
    buffer = make(group)

    def listen(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        heard.append(([id(param) for param in params], [grad.clone() for grad in grads]))

    handle = register_local_grad_hook(listen)
    backward(buffer, [0, 4], group.rank)
    buffer.reduce()
    handle.remove()
    buffer.commit()
    ((params, grads),) = heard
    assert params == [id(buffer.sharded_params[0]), id(buffer.sharded_params[4])]
    assert torch.equal(grads[0], local_grad(group.rank, 0, (5, 3)))
    assert torch.equal(grads[1], local_grad(group.rank, 4, (7,)))


def test_a_reduction_stands_aside_and_is_handed_out_once() -> None:
    for flatten in (False, True):
        buffer = make(Group(), flatten=flatten)
        for used in (range(5), (1, 4)):
            backward(buffer, used, rank=0)
            buffer.reduce()
            buffer.wait_reduced()
        first = buffer.wait_results()
        assert [param for param, _ in first] == list(buffer.sharded_params) * 2 and buffer.wait_results() == []
        assert all(param.grad is None for param in buffer.sharded_params)
        buffer.publish_grads({buffer.sharded_params[0]})
        assert [param.grad is not None for param in buffer.sharded_params] == [True] + [False] * (
            len(buffer.sharded_params) - 1
        )
        handed_out = copy.deepcopy(buffer.sharded_params[0].grad)
        buffer.commit()
        assert torch.equal(buffer.sharded_params[0].grad, handed_out)  # type: ignore[arg-type]
        if not flatten:
            assert buffer.sharded_params[1].grad is first[1][1], "the very tensor that was told of"
            assert torch.equal(buffer.sharded_params[1].grad, 2 * local_grad(0, 1, (5,)))
            assert torch.equal(buffer.sharded_params[4].grad, 2 * local_grad(0, 4, (7,)))  # type: ignore[arg-type]
        buffer.commit()
        buffer.wait_results()
        buffer.discard()
        assert torch.equal(buffer.sharded_params[0].grad, handed_out)  # type: ignore[arg-type]


def test_what_stands_aside_is_dropped_with_the_pass() -> None:
    buffer = make(Group())
    backward(buffer, range(5), rank=0)
    buffer.reduce()
    assert len(buffer.wait_results()) == 5
    buffer.discard()
    buffer.commit()
    assert all(param.grad is None for param in buffer.sharded_params)
