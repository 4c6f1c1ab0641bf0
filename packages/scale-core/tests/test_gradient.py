"""gradient.py: a rank's own gradients, held, packed and taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flat_by_hand import gathered, local_grad, make
from torch import Tensor, nn

from scale_core.comm.group import Group, group_of
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DtypePolicy
from scale_core.flat.gradient import GradState, SumState

pytestmark = pytest.mark.local_tensors


class HalfSquare(torch.autograd.Function):
    """Half the square of a weight, whose gradient is the weight's own memory."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # torch leaves the arguments open
        (weight,) = ctx.saved_tensors
        result: Tensor = weight.detach()
        return result


def one_pass(buffer: FlatBuffer, indices: Sequence[int], number: int) -> None:
    """Packs bfloat16 gradients as one pass of several brings them."""
    for index in indices:
        grad = local_grad(number, index, buffer.unsharded_params[index].shape).bfloat16()
        buffer.unsharded_params[index].grad = grad / (3 + number)
        buffer.gradient.accumulate(index, wide=True)


def summed(dtypes: DtypePolicy, passes: Sequence[Sequence[int]]) -> FlatBuffer:
    """A buffer after these passes, each of which has gone well and brought gradients of these parameters."""
    buffer = make(Group(), dtypes)
    gathered(buffer)
    for number, indices in enumerate(passes):
        one_pass(buffer, indices, number)
        buffer.gradient.commit_pass()
    return buffer


HALF = DtypePolicy(compute=torch.bfloat16, reduce=torch.bfloat16)


def states_of(buffer: FlatBuffer) -> tuple[list[GradState], SumState]:
    """Those of parameters 0 and 4, which are used, and of the sum."""
    gradient = buffer.gradient
    return [gradient._states[index] for index in (0, 4)], gradient._sum_state


def test_states_are_those_of_the_drawing() -> None:
    buffer = make(Group(), HALF)
    gradient = buffer.gradient
    gathered(buffer)
    assert states_of(buffer) == ([GradState.NONE] * 2, SumState.NONE)
    gradient.holds = True
    one_pass(buffer, [0], 0)
    assert states_of(buffer) == ([GradState.HELD, GradState.NONE], SumState.NONE)
    one_pass(buffer, [0], 0)
    assert states_of(buffer) == ([GradState.PACKED, GradState.NONE], SumState.NONE)
    gradient.commit_pass()
    assert states_of(buffer) == ([GradState.NONE] * 2, SumState.WAITING)
    one_pass(buffer, [0, 4, 4], 1)
    gradient.pack(wide=True)
    assert states_of(buffer) == ([GradState.PACKED] * 2, SumState.WAITING)
    one_pass(buffer, [0], 1)
    assert states_of(buffer) == ([GradState.PACKED_WITH_SUM, GradState.PACKED], SumState.WAITING)
    gradient.take(torch.device("cpu"))
    assert states_of(buffer) == ([GradState.NONE] * 2, SumState.TAKEN)
    gradient.rollback_pass()
    assert states_of(buffer) == ([GradState.NONE] * 2, SumState.WAITING)
    gradient.take(torch.device("cpu"))
    gradient.commit_pass()
    assert states_of(buffer) == ([GradState.NONE] * 2, SumState.NONE)


@pytest.mark.parametrize("dtypes", [HALF, DtypePolicy(compute=torch.bfloat16, reduce=torch.float32)])
def test_a_revoked_pass_leaves_the_sum_of_those_before_it(dtypes: DtypePolicy) -> None:
    good = [[0, 1, 4], [0, 2]]
    buffer, expected = summed(dtypes, good), summed(dtypes, good)
    one_pass(buffer, [0, 3, 4, 0], 7)
    assert buffer.gradient.flat is not None
    assert buffer.gradient.flat.dtype == torch.float32  # 0 has come twice, and the sum of both is to be exact enough.
    buffer.gradient.rollback_pass()
    assert (
        buffer.gradient.flat is None and buffer.gradient.has_grad() == [0, 1, 2, 4] and buffer.gradient.missing() == [3]
    )
    here = torch.device("cpu")
    assert torch.equal(buffer.gradient.take(here), expected.gradient.take(here))


@pytest.mark.parametrize("dtypes", [HALF, DtypePolicy(compute=torch.bfloat16, reduce=torch.float32)])
def test_the_sum_is_that_of_all_passes_in_the_wide_dtype(dtypes: DtypePolicy) -> None:
    buffer = summed(dtypes, [[0, 1], [1, 2]])
    one_pass(buffer, [1, 3], 2)
    assert buffer.gradient.flat is not None
    assert buffer.gradient.flat.dtype == torch.bfloat16  # Beside the sum, a pass takes no more than it computes in.
    flat = buffer.gradient.take(torch.device("cpu"))
    assert flat.dtype == torch.float32
    for index, numbers in enumerate([[0], [0, 1, 2], [1], [2], []]):
        entry = buffer.layout.entries[index]
        total = torch.zeros(entry.numel)
        for number in numbers:
            total += (local_grad(number, index, entry.shape).bfloat16() / (3 + number)).reshape(-1)
        assert torch.equal(flat.narrow(0, entry.offset, entry.numel), total)


def test_repeated_gradients_are_added_as_autograd_does() -> None:
    order = [[0, 1, 1], [1, 0, 1, 2, 1, 2], [0, 0, 1]]
    for settles_last in (False, True):
        buffer = summed(HALF, order[:2])
        one_pass(buffer, order[2], 2)
        if settles_last:
            buffer.gradient.commit_pass()
        flat = buffer.gradient.take(torch.device("cpu"))
        for index, entry in enumerate(buffer.layout.entries):
            total = torch.zeros(entry.numel)
            for number, indices in enumerate(order):
                for _ in range(indices.count(index)):
                    total += (local_grad(number, index, entry.shape).bfloat16() / (3 + number)).reshape(-1)
            assert torch.equal(flat.narrow(0, entry.offset, entry.numel), total)


def test_a_sum_is_taken_once_and_comes_back_if_revoked() -> None:
    here = torch.device("cpu")
    buffer = summed(HALF, [[0, 4]])
    first = buffer.gradient.take(here)
    assert first.any() and not buffer.gradient and buffer.gradient.has_grad() == []
    assert not buffer.gradient.take(here).any()  # What comes late in a pass comes without the sum.
    buffer.gradient.rollback_pass()
    assert buffer.gradient and torch.equal(buffer.gradient.take(here), first)
    buffer.gradient.commit_pass()  # The pass that took it has gone well.
    assert not buffer.gradient and buffer.gradient.accumulated is None


def test_what_is_withheld_is_zero_until_the_pass_is_revoked() -> None:
    here = torch.device("cpu")
    buffer = summed(HALF, [[0, 4]])
    one_pass(buffer, [1], 1)
    buffer.gradient.use_zeros()
    assert not buffer.gradient.take(here).any()
    buffer.gradient.rollback_pass()
    assert buffer.gradient.has_grad() == [0, 4] and buffer.gradient.take(here).any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulate", [False, True])
def test_held_gradients_become_the_flat_gradient_when_packed(accumulate: bool) -> None:
    """What is held takes no flat memory until it is packed; what comes twice, or to a flat gradient, is added."""
    group = group_of()
    held, packed = (make(group, DtypePolicy(compute=torch.bfloat16, reduce=torch.bfloat16)) for _ in range(2))
    assert not held.gradient.holds  # It is small.
    held.gradient.holds = True
    for twice in (False, True):
        for buffer in (held, packed):
            gathered(buffer)
            for index in (0, 4, 0) if twice else (1, 2, 3):
                buffer.unsharded_params[index].grad = local_grad(
                    group.rank, index, buffer.unsharded_params[index].shape
                ).bfloat16()
                if buffer is packed:
                    buffer.gradient.accumulate(index, wide=accumulate)
                    continue
                buffer.gradient.accumulate(index, wide=accumulate)
                assert buffer.unsharded_params[index].grad is None and buffer.has_gradient
                assert (buffer.gradient.flat is None) == (not twice)
            buffer.release()
        assert held.gradient.missing() == packed.gradient.missing() == ([] if twice else [0, 4])
        held.gradient.pack(wide=accumulate)
        assert held.gradient.flat is not None and packed.gradient.flat is not None
        assert held.gradient.flat.dtype == packed.gradient.flat.dtype
    for buffer in (held, packed):
        buffer.reduce(tag=1 << 22)
        buffer.commit()
        assert not buffer.has_gradient
    for mine, expected in zip(held.sharded_params, packed.sharded_params, strict=True):
        assert mine.grad is not None and expected.grad is not None and torch.equal(mine.grad, expected.grad)


@pytest.mark.ranks(2)
def test_a_single_gradient_of_full_size_is_taken_over() -> None:
    """One parameter that fills its buffer: autograd's own gradient becomes the flat one."""
    group = group_of()
    buffer = make(group, params=[nn.Parameter(torch.ones(4, 3))])
    gathered(buffer)
    (buffer.unsharded_params[0] * 2).sum().backward()
    grad = buffer.unsharded_params[0].grad
    assert grad is not None
    buffer.gradient.accumulate(0)
    assert buffer.gradient.flat is not None
    taken = buffer.gradient.flat.data_ptr() == grad.data_ptr()
    del grad
    buffer.release()
    buffer.reduce()
    buffer.commit()
    assert buffer.sharded_params[0].grad is not None and bool((buffer.sharded_params[0].grad == 2).all())
    assert taken


@pytest.mark.ranks(2)
def test_a_gradient_that_is_the_weight_outlives_the_full_buffer() -> None:
    group = group_of()
    weight = torch.arange(12.0).view(4, 3)
    buffer = make(group, params=[nn.Parameter(weight)])
    gathered(buffer)
    HalfSquare.apply(buffer.unsharded_params[0]).backward()
    buffer.gradient.accumulate(0)
    buffer.release()
    buffer.reduce()
    buffer.commit()
    grad, shard = buffer.sharded_params[0].grad, buffer.sharded_params[0]
    assert grad is not None and torch.equal(grad, shard) and grad.data_ptr() != shard.data_ptr()


def test_a_gradient_with_a_gradient_is_refused_by_name() -> None:
    buffer = make(Group())
    buffer.unsharded_params[0].grad = (
        torch.ones(5, 3, requires_grad=True) * 2
    )  # As backward(create_graph=True) leaves it.
    with pytest.raises(RuntimeError, match=r"'weight' has a gradient of its own.*without create_graph=True"):
        buffer.gradient.accumulate(0)


def test_a_sparse_gradient_is_packed_densely() -> None:
    buffer = make(Group(), params=[nn.Parameter(torch.ones(4, 3))])
    gathered(buffer)
    nn.functional.embedding(torch.tensor([1, 1]), buffer.unsharded_params[0], sparse=True).sum().backward()
    buffer.gradient.accumulate(0)
    buffer.reduce()
    buffer.commit()
    assert buffer.sharded_params[0].grad is not None and buffer.sharded_params[0].grad.sum(dim=1).tolist() == [
        0,
        6,
        0,
        0,
    ]


def test_what_was_not_used_is_zero_and_named_until_it_is_taken() -> None:
    buffer = make(Group())
    gathered(buffer)
    (buffer.unsharded_params[0].sum() + buffer.unsharded_params[4].sum()).backward()
    assert not buffer.gradient
    for index in (0, 4, 1):
        buffer.gradient.accumulate(index)  # Of 1 there is none.
    assert buffer.gradient and buffer.gradient.has_grad() == [0, 4] and buffer.gradient.missing() == [1, 2, 3]
    flat = buffer.gradient.take(torch.device("cpu"))
    used = sum(buffer.layout.entries[index].numel for index in (0, 4))
    assert flat.sum() == used and flat.numel() == buffer.layout.full_numel
    assert not buffer.gradient and buffer.gradient.has_grad() == []
    assert not buffer.gradient.take(torch.device("cpu")).any()


def test_what_is_dropped_is_gone_wherever_it_stood() -> None:
    buffer = make(Group())
    gathered(buffer)
    (buffer.unsharded_params[0].sum() + buffer.unsharded_params[4].sum()).backward()
    buffer.gradient.accumulate(0)
    buffer.gradient.commit_pass()
    buffer.gradient.accumulate(0)
    buffer.gradient.drop()
    assert not buffer.gradient and buffer.unsharded_params[4].grad is None and buffer.gradient.accumulated is None
