"""flat.py: one buffer, its three verbs, and the memory that each state takes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scale_core.backward import on_local_grads
from scale_core.flat import Dtypes, FlatBuffer, Groups, State, live_buffers
from scale_core.group import Group, group_of
from scale_core.layout import FlatLayout
from scale_core.shard import Held, shard_of
from scale_core.testing import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {"weight": (5, 3), "bias": (5,), "scale": (), "empty": (0, 2), "prime": (7,)}


def whole_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES.values()]


def make(
    group: Group, dtypes: Dtypes | None = None, *, flatten: bool = False, params: Sequence[Tensor] | None = None
) -> FlatBuffer:
    params = params or whole_params()
    names = list(SHAPES)[: len(params)]
    layout = FlatLayout.plan(names, [tuple(param.shape) for param in params], group.size)
    return FlatBuffer(names, params, layout, group, dtypes or Dtypes(), flatten)


def state_of(buffer: FlatBuffer) -> State:
    return buffer.state


def gathered(buffer: FlatBuffer) -> list[Tensor]:
    buffer.gather(tag=1 << 21)
    buffer.wait_gathered()
    return [whole.detach() for whole in buffer.wholes]


def local_grad(rank: int, index: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * rank + index))


def backward(buffer: FlatBuffer, used: Sequence[int], rank: int, *, accumulate: bool = False) -> None:
    """Gives every used whole the gradient that `rank` has for it, by autograd."""
    gathered(buffer)
    for i in used:
        (buffer.wholes[i].float() * local_grad(rank, i, buffer.wholes[i].shape)).sum().backward()
    for index in used:
        buffer.gradient.pack(index, accumulate=accumulate)
        assert buffer.wholes[index].grad is None
    buffer.release()


def pieces_of(buffer: FlatBuffer, wholes: Sequence[Tensor]) -> list[Tensor]:
    return [
        whole.reshape(-1)[span.start : span.stop].view(span.shape)
        for whole, span in zip(wholes, buffer.spans, strict=True)
    ]


def average(world: int, index: int, shape: tuple[int, ...]) -> Tensor:
    total = local_grad(0, index, shape)
    for rank in range(1, world):
        total = total + local_grad(rank, index, shape)
    return total / world


def gather_and_release() -> None:
    group, params = group_of(), whole_params()
    buffer = make(group, params=params)
    storage = buffer.full.untyped_storage()
    for _ in range(2):
        assert state_of(buffer) is State.SHARDED
        if group.size > 1:
            assert storage.nbytes() == 0
        for whole, param in zip(gathered(buffer), params, strict=True):
            assert torch.equal(whole, param) and whole.untyped_storage()._cdata == storage._cdata
        assert state_of(buffer) is State.GATHERED
        buffer.gather()  # Nothing to do.
        buffer.release()
    buffer.gather(tag=1 << 21)
    buffer.release()  # Also where it is still on its way.
    assert buffer.state is State.SHARDED
    for piece, expected in zip(buffer.exposed, pieces_of(buffer, params), strict=True):
        assert torch.equal(piece, expected)
    for whole, param in zip(buffer.gather_whole(), params, strict=True):
        assert torch.equal(whole, param)


def marks() -> None:
    group = group_of()
    buffer = make(group)
    buffer.rename([f"block.{name}" for name in SHAPES], unit="block")
    for name, span, param in zip(SHAPES, buffer.spans, buffer.exposed, strict=True):
        shard = shard_of(param)
        assert shard is not None
        assert (shard.name, shard.unit, shard.shape) == (f"block.{name}", "block", SHAPES[name])
        assert (shard.start, shard.stop) == (span.start, span.stop) and param.numel() == span.numel
        assert [(axis.group, axis.held) for axis in shard.axes] == [(group, Held.SHARD)]
    flat = make(group, flatten=True)
    (param,) = flat.exposed
    shard = shard_of(param)
    assert shard is not None and shard.name == "flat_param"
    assert shard.shape == (flat.layout.full_numel,) and shard.stop - shard.start == param.numel()
    assert param.data_ptr() == flat.shard.data_ptr()


def reductions(used_by_rank: dict[int, list[int]], reduce_dtype: torch.dtype | None) -> None:
    """Parameters that some ranks have not used count as zeros there; what nobody used is zero."""
    group = group_of()
    buffer = make(group, Dtypes(reduce=reduce_dtype))
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
        for index, (param, span) in enumerate(zip(buffer.exposed, buffer.spans, strict=True)):
            total = torch.zeros(SHAPES[list(SHAPES)[index]])
            for rank in range(group.size):
                if index in used_by_rank.get(rank, [0, 1, 2, 3, 4]):
                    total = total + local_grad(rank, index, total.shape).to(wire).float()
            expected = step * (total / group.size).reshape(-1)[span.start : span.stop].view(span.shape)
            assert param.grad is not None and param.grad.dtype == torch.float32
            assert torch.equal(param.grad, expected), (index, param.grad, expected)


def accumulation() -> None:
    """Micro-batches are summed in a dtype that is wide enough, and sent once."""
    group = group_of()
    buffer = make(group, Dtypes(compute=torch.bfloat16, reduce=torch.bfloat16))
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
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in buffer.exposed)


def half_precision() -> None:
    group, params = group_of(), whole_params()
    buffer = make(group, Dtypes(compute=torch.bfloat16), params=params)
    for whole, param in zip(gathered(buffer), params, strict=True):
        assert whole.dtype == torch.bfloat16 and torch.equal(whole, param.bfloat16())
    buffer.release()
    assert buffer.full.untyped_storage().nbytes() == 0
    assert buffer.shard.dtype == torch.float32
    for whole, param in zip(buffer.gather_whole(), params, strict=True):
        assert torch.equal(whole, param)


def half_precision_parameters_reduced_in_fp32() -> None:
    group, params = group_of(), whole_params(torch.bfloat16)
    buffer = make(group, Dtypes(reduce=torch.float32), params=params)
    backward(buffer, [0, 1, 2, 3, 4], group.rank)
    buffer.reduce()
    buffer.commit()
    for index, (param, span) in enumerate(zip(buffer.exposed, buffer.spans, strict=True)):
        total = sum(local_grad(rank, index, params[index].shape).bfloat16().float() for rank in range(group.size))
        assert isinstance(total, Tensor) and param.grad is not None
        expected = (total / group.size).bfloat16().reshape(-1)[span.start : span.stop].view(span.shape)
        assert torch.equal(param.grad, expected)  # Added up in fp32, rounded once.


def late_gradients() -> None:
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
    for param, expected in zip(buffer.exposed, pieces_of(buffer, wholes), strict=True):
        assert param.grad is not None and torch.equal(param.grad, expected)


def flat_parameter() -> None:
    group = group_of()
    buffer = make(group, flatten=True)
    backward(buffer, [0, 2], group.rank)
    buffer.reduce()
    buffer.commit()
    (param,) = buffer.exposed
    assert param.grad is not None and param.grad.shape == param.shape == (buffer.layout.shard_numel,)
    torch.optim.SGD([param], lr=1.0).step()
    for index, (whole, before) in enumerate(zip(gathered(buffer), whole_params(), strict=True)):
        step = average(group.size, index, before.shape) if index in (0, 2) else 0
        assert torch.equal(whole, before.detach() - step)
    buffer.release()


def staleness() -> list[str]:
    """Whatever writes to a shard while its full buffer is gathered is noticed."""
    group, unnoticed = group_of(), []
    optimizers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=1.0),
        "Adam": lambda params: torch.optim.Adam(params),
        "foreach": lambda params: torch.optim.Adam(params, foreach=True),
        "fused": lambda params: torch.optim.Adam(params, fused=True),
    }
    for flatten in (False, True):
        for name, build in optimizers.items():
            buffer = make(group, flatten=flatten)
            optimizer = build(buffer.exposed)
            backward(buffer, [0, 1, 2, 3, 4], group.rank)
            buffer.reduce()
            buffer.commit()
            gathered(buffer)
            assert not buffer.is_stale()
            optimizer.step()
            if not buffer.is_stale():
                unnoticed.append(f"{name} flatten={flatten}")
            buffer.release()
            assert not buffer.is_stale()
    buffer = make(group)
    gathered(buffer)
    buffer.load(4, torch.zeros(7))
    if not buffer.is_stale():
        unnoticed.append("load")
    buffer.release()
    return unnoticed


def discarded() -> None:
    """After an error that all ranks have, the buffer is as before it and the group still works.

    Gradients that waited stay, and those of the pass that failed go.
    """
    group, params = group_of(), whole_params()
    buffer = make(group, params=params)
    backward(buffer, [0], group.rank)
    buffer.commit()
    backward(buffer, [0, 1], group.rank)
    buffer.gather(tag=1 << 21)
    buffer.discard()
    assert buffer.state is State.SHARDED and buffer.has_gradient and buffer.gradient.given() == [0]
    buffer.gradient.drop()
    assert not buffer.has_gradient
    if group.size > 1:
        assert buffer.full.untyped_storage().nbytes() == 0
    for whole, param in zip(gathered(buffer), params, strict=True):
        assert torch.equal(whole, param)
    (buffer.wholes[1] * 2).sum().backward()
    buffer.gradient.pack(1)
    buffer.reduce(tag=1 << 22)
    buffer.discard()
    assert buffer.exposed[1].grad is None
    backward(buffer, [0, 1, 2, 3, 4], group.rank)
    buffer.reduce(tag=1 << 22)
    buffer.commit()
    wholes = [average(group.size, i, shape) for i, shape in enumerate(SHAPES.values())]
    for param, expected in zip(buffer.exposed, pieces_of(buffer, wholes), strict=True):
        assert param.grad is not None and torch.equal(param.grad, expected)
    dist.barrier()


def local_gradients_are_reported() -> None:
    group, heard = group_of(), []
    buffer = make(group)

    def listen(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        heard.append(([id(param) for param in params], [grad.clone() for grad in grads]))

    handle = on_local_grads(listen)
    backward(buffer, [0, 4], group.rank)
    buffer.reduce()
    handle.remove()
    buffer.commit()
    ((params, grads),) = heard
    assert params == [id(buffer.exposed[0]), id(buffer.exposed[4])]
    assert torch.equal(grads[0], local_grad(group.rank, 0, (5, 3)))
    assert torch.equal(grads[1], local_grad(group.rank, 4, (7,)))


def mixed_trainable() -> None:
    group, params = group_of(), whole_params()
    params[1].requires_grad_(False)
    buffer = make(group, params=params)
    assert [whole.requires_grad for whole in buffer.wholes] == [True, False, True, True, True]
    backward(buffer, [0, 2, 3, 4], group.rank)
    assert buffer.gradient.missing() == []
    buffer.reduce()
    buffer.commit()
    assert buffer.exposed[1].grad is None and buffer.exposed[0].grad is not None
    buffer.exposed[1].requires_grad_(True)
    buffer.follow_trainable()
    assert buffer.wholes[1].requires_grad and buffer.trains


def everything_small() -> None:
    """More ranks than elements, and nothing at all."""
    group = group_of()
    for params in ([nn.Parameter(torch.tensor(3.0))], [nn.Parameter(torch.empty(0, 4))]):
        buffer = make(group, params=params)
        assert torch.equal(gathered(buffer)[0], params[0].detach())
        (buffer.wholes[0] * 2).sum().backward()
        buffer.gradient.pack(0)
        buffer.reduce()
        buffer.commit()
        grad = buffer.exposed[0].grad
        assert grad is not None and grad.shape == buffer.exposed[0].shape
        buffer.release()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_gathered_buffer_holds_all_parameters_and_a_released_one_no_memory(num_ranks: int) -> None:
    run_ranks(gather_and_release, num_ranks)


def test_exposed_parameters_say_what_they_are_pieces_of() -> None:
    run_ranks(marks, 2)


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_gradients_are_averaged_and_what_a_rank_has_not_used_counts_as_zeros(reduce_dtype: torch.dtype | None) -> None:
    run_ranks(reductions, 3, {1: [0, 2], 2: []}, reduce_dtype)


def test_what_nobody_used_gets_zeros() -> None:
    run_ranks(reductions, 2, {0: [1], 1: [1, 4]}, None)


def test_micro_batches_are_summed_in_a_wide_dtype() -> None:
    run_ranks(accumulation, 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_computing_dtype_is_that_of_the_full_buffer_only(num_ranks: int) -> None:
    run_ranks(half_precision, num_ranks)


def test_half_precision_parameters_can_be_reduced_in_fp32() -> None:
    run_ranks(half_precision_parameters_reduced_in_fp32, 3)


def test_a_late_gradient_is_added_by_the_next_reduction() -> None:
    run_ranks(late_gradients, 2)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_one_flat_parameter_can_stand_for_all(num_ranks: int) -> None:
    run_ranks(flat_parameter, num_ranks)


def test_a_shard_that_is_written_to_makes_the_gathered_buffer_stale() -> None:
    assert run_ranks(staleness, 2) == [[], []]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_after_a_discard_everything_works_again(num_ranks: int) -> None:
    run_ranks(discarded, num_ranks)


def test_local_gradients_are_reported_whole_and_unreduced() -> None:
    run_ranks(local_gradients_are_reported, 2)


def test_frozen_parameters_among_trained_ones_get_no_gradient() -> None:
    run_ranks(mixed_trainable, 2)


def test_fewer_elements_than_ranks_and_none_at_all() -> None:
    run_ranks(everything_small, 3)


def test_a_world_of_one_computes_with_the_shard_itself() -> None:
    buffer = make(Group())
    assert buffer.is_aliased and buffer.wholes[0].data_ptr() == buffer.exposed[0].data_ptr()


def test_every_flat_tensor_that_lives_is_listed() -> None:
    buffer = make(Group(), Dtypes(compute=torch.bfloat16))

    def kinds() -> list[str]:
        mine = {buffer.shard.data_ptr(), buffer.full.data_ptr()} | (
            {buffer.gradient.flat.data_ptr()} if buffer.gradient.flat is not None else set()
        )
        return sorted(kind for kind, tensor in live_buffers() if tensor.data_ptr() in mine)

    assert kinds() == ["shard"]
    gathered(buffer)
    assert kinds() == ["gathered", "shard"]
    buffer.wholes[0].sum().backward()
    buffer.gradient.pack(0)
    assert kinds() == ["gathered", "gradient", "shard"]


def test_parameters_that_are_not_contiguous_are_taken_in_row_major_order() -> None:
    param = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    buffer = make(Group(), params=[param])
    assert torch.equal(gathered(buffer)[0], param.detach())


def rehoused() -> None:
    group = group_of()
    for flatten in (False, True):
        params = whole_params()
        buffer = make(group, params=params, flatten=flatten)
        buffer.exposed[0].requires_grad_(False)
        gathered(buffer)
        kept, version = list(buffer.exposed), buffer.version
        buffer.rehouse(buffer.shard.to(torch.float64))
        assert state_of(buffer) is State.SHARDED
        assert buffer.version > version
        assert all(now is then for now, then in zip(buffer.exposed, kept, strict=True))
        assert not buffer.exposed[0].requires_grad
        assert buffer.dtype == buffer.compute_dtype == buffer.exposed[0].dtype == torch.float64
        assert all(torch.equal(a, b.double()) for a, b in zip(gathered(buffer), params, strict=True))
        with torch.no_grad():
            buffer.exposed[-1].add_(1.0)  # It has a version counter of its own now.
        assert buffer.is_stale()
        shard = shard_of(buffer.exposed[0])
        assert shard is not None
        layout = FlatLayout.plan(list(SHAPES), list(SHAPES.values()), 1)
        buffer.rehouse(torch.ones(layout.shard_numel), layout=layout, groups=Groups(Group()))
        assert buffer.is_aliased
        assert [tuple(w.shape) for w in gathered(buffer)] == list(SHAPES.values())
        assert shard_of(buffer.exposed[0]) != shard


def test_a_buffer_moves_into_another_shard_and_its_parameters_stay_the_same_objects() -> None:
    run_ranks(rehoused, 2)


def test_a_buffer_on_meta_has_shapes_and_gets_values_by_moving() -> None:
    params = [nn.Parameter(param.detach().to("meta")) for param in whole_params()]
    buffer = make(Group(), params=params)
    assert buffer.is_meta
    assert all(whole.is_meta for whole in buffer.gather_whole())
    before = list(buffer.exposed)
    buffer.rehouse(torch.zeros(buffer.layout.shard_numel))
    assert not buffer.is_meta
    assert not any(now is then for now, then in zip(buffer.exposed, before, strict=True))  # torch can't do that.
    for index, param in enumerate(whole_params()):
        buffer.load(index, param)
    assert all(torch.equal(a, b) for a, b in zip(gathered(buffer), whole_params(), strict=True))


def copied() -> None:
    for flatten in (False, True):
        params = whole_params()
        buffer = make(group_of(), Dtypes(compute=torch.bfloat16), params=params, flatten=flatten)
        gathered(buffer)
        for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
            assert state_of(other) is State.SHARDED
            assert [shard_of(param) for param in other.exposed] == [shard_of(param) for param in buffer.exposed]
            assert all(param.untyped_storage() is other.shard.untyped_storage() for param in other.exposed)
            with torch.no_grad():
                other.exposed[0].zero_()
            wholes = gathered(buffer)
            assert all(torch.equal(a, b.bfloat16()) for a, b in zip(wholes, params, strict=True))
            assert not torch.equal(gathered(other)[0], wholes[0])


def test_a_copy_of_a_buffer_holds_the_same_and_shares_nothing() -> None:
    run_ranks(copied, 2)


def test_what_was_reduced_stands_aside_and_is_handed_out_once_to_some_or_at_last_to_all() -> None:
    for flatten in (False, True):
        buffer = make(Group(), flatten=flatten)
        for used in (range(5), (1, 4)):
            backward(buffer, used, rank=0)
            buffer.reduce()
            buffer.wait_reduced()
        first = buffer.set_aside()
        assert [param for param, _ in first] == list(buffer.exposed) * 2 and buffer.set_aside() == []
        assert all(param.grad is None for param in buffer.exposed)
        buffer.hand_out({buffer.exposed[0]})
        assert [param.grad is not None for param in buffer.exposed] == [True] + [False] * (len(buffer.exposed) - 1)
        handed_out = copy.deepcopy(buffer.exposed[0].grad)
        buffer.commit()
        assert torch.equal(buffer.exposed[0].grad, handed_out)  # type: ignore[arg-type]
        if not flatten:
            assert buffer.exposed[1].grad is first[1][1], "the very tensor that was told of"
            assert torch.equal(buffer.exposed[1].grad, 2 * local_grad(0, 1, (5,)))
            assert torch.equal(buffer.exposed[4].grad, 2 * local_grad(0, 4, (7,)))  # type: ignore[arg-type]
        buffer.commit()
        buffer.set_aside()
        buffer.discard()
        assert torch.equal(buffer.exposed[0].grad, handed_out)  # type: ignore[arg-type]


def test_what_stands_aside_is_dropped_with_the_pass() -> None:
    buffer = make(Group())
    backward(buffer, range(5), rank=0)
    buffer.reduce()
    assert len(buffer.set_aside()) == 5
    buffer.discard()
    buffer.commit()
    assert all(param.grad is None for param in buffer.exposed)
