"""quantized_collectives.py: what ranks receive is what one process computes, at the stated bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_core.optim.error_feedback import ErrorFeedback, loss_scale, set_loss_scale
from scale_fsdp.transports import quantized_collectives
from scale_fsdp.transports.blocks import BlockFormat, dequantize, quantize
from scale_fsdp.transports.quantized_collectives import (
    QuantizedMean,
    all_gather_quantized,
    all_reduce_quantized,
    new_messages,
    reduce_scatter_quantized,
)

NAMES: tuple[Any, ...] = ("int8", "float8_e4m3", "int4")
TAG = 1 << 22


def rounded(values: Tensor, block_format: BlockFormat) -> Tensor:
    rows = values.reshape(-1, values.shape[-1])
    return dequantize(quantize(rows, block_format), rows.shape[1], block_format).view(values.shape)


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def average(parts: list[Tensor], block_format: BlockFormat, errors: list[Tensor], divisor: float) -> list[Tensor]:
    """What each rank gets of everybody's [W, n]; `errors` are those of all ranks, and become those of this call."""
    given = [part + error for part, error in zip(parts, errors, strict=True)]
    sent = [rounded(part, block_format) for part in given]
    means = []
    for rank in range(len(parts)):
        sent[rank][rank] = given[rank][rank]
        total = torch.zeros_like(given[rank][rank])
        for part in sent:
            total += part[rank] if part is not sent[rank] else given[rank][rank]
        means.append(total / divisor)
    for rank, error in enumerate(errors):
        error.copy_(given[rank] - sent[rank])
    return means


@pytest.mark.ranks(2, 3, in_turn=True)
@pytest.mark.parametrize("name", NAMES)
def test_a_gather_has_what_one_process_computes(name: Any) -> None:
    group, block_format = group_of(), BlockFormat(name, 8)
    for numel in (1, 21):
        messages = new_messages(group.size, numel, block_format, torch.device("cpu"))
        shard = of_rank(group.rank, numel)
        work = all_gather_quantized(messages, shard, group, block_format, tag=TAG)
        shard.zero_()
        work.wait()
        expected = torch.stack([rounded(of_rank(rank, numel), block_format) for rank in range(group.size)])
        assert torch.equal(dequantize(messages, numel, block_format), expected)


@pytest.mark.ranks(2, 3, in_turn=True)
@pytest.mark.parametrize("name", NAMES)
def test_a_mean_has_what_one_process_computes(name: Any) -> None:
    group, block_format = group_of(), BlockFormat(name, 8)
    for numel in (1, 21):
        feedback, errors = ErrorFeedback(), [torch.zeros(group.size, numel) for _ in range(group.size)]
        for step in range(3):
            parts = [of_rank(10 * step + rank, group.size, numel) for rank in range(group.size)]
            full = parts[group.rank].clone().view(-1)
            if step == 1:  # A pass that fails leaves no trace.
                reduce_scatter_quantized(
                    full.clone() * 5, QuantizedMean(group, block_format, tag=TAG), feedback=feedback
                ).wait()
                feedback.rollback()
            work = reduce_scatter_quantized(
                full, QuantizedMean(group, block_format, divisor=1.5, tag=TAG), feedback=feedback
            )
            mean = work.wait()
            feedback.commit()
            assert torch.equal(mean, average(parts, block_format, errors, 1.5)[group.rank])
            assert feedback.error is not None and torch.equal(feedback.error, errors[group.rank])
        parts = [of_rank(rank, group.size, numel).bfloat16() for rank in range(group.size)]
        mean = reduce_scatter_quantized(
            parts[group.rank].clone().view(-1), QuantizedMean(group, block_format, tag=TAG)
        ).wait()
        exact = average(
            [part.float() for part in parts],
            block_format,
            [torch.zeros_like(part.float()) for part in parts],
            group.size,
        )
        assert torch.equal(mean, exact[group.rank].bfloat16())


@pytest.mark.ranks(2, 3, in_turn=True)
@pytest.mark.parametrize("name", NAMES)
def test_a_sum_has_what_one_process_computes(name: Any) -> None:
    group, block_format = group_of(), BlockFormat(name, 8)
    for numel in (1, 21):
        feedback = ErrorFeedback(), ErrorFeedback()
        size = -(-numel // group.size)
        errors = [torch.zeros(group.size, size) for _ in range(group.size)]
        later = torch.zeros(group.size, size)
        for step in range(2):
            given = [of_rank(10 * step + rank, numel) for rank in range(group.size)]
            parts = [torch.nn.functional.pad(one, (0, size * group.size - numel)).view(-1, size) for one in given]
            means = torch.stack(average(parts, block_format, errors, group.size)) + later
            expected = rounded(means, block_format)
            later = means - expected
            values = given[group.rank].clone()
            assert (
                all_reduce_quantized(values, QuantizedMean(group, block_format, tag=TAG), feedback=feedback).wait()
                is values
            )
            for each in feedback:
                each.commit()
            assert torch.equal(values, expected.view(-1)[:numel])


def test_the_error_of_a_sum_that_is_not_finite_does_not_wait() -> None:
    feedback = ErrorFeedback()
    values = torch.tensor([1.0, torch.inf, 3.0])
    feedback.keep(values, torch.tensor([0.75, torch.nan, torch.nan]))
    feedback.commit()
    assert torch.equal(feedback.add_to(torch.zeros(3)), torch.tensor([0.25, 0.0, 0.0]))


def test_errors_are_of_unscaled_gradients_and_a_skip_releases() -> None:
    set_loss_scale(None)  # Another test may have left its scaler's.
    feedback, scale = ErrorFeedback(), torch.tensor(4.0)
    feedback.keep(torch.tensor([1.0]), torch.tensor([0.75]))
    feedback.commit()
    set_loss_scale(scale)
    for skipped, waits in ((True, 0.25), (False, 0.625)):
        for number in (2.0, 2.5):  # Two passes of one step
            assert torch.equal(feedback.add_to(torch.tensor([1.0])), 1 + 4 * feedback.error)
            feedback.keep(torch.tensor([number]), torch.tensor([0.0]))
            feedback.commit()
        assert feedback.was_scaled_by(scale) and not feedback.was_scaled_by(scale.clone())
        feedback.on_scaler_update(skipped=skipped)
        assert torch.equal(feedback.error, torch.tensor([waits]))
    del scale
    assert loss_scale() is None  # Its scaler is gone.


class OutOfMemory:
    """Fails to quantize, or to read what was sent, on rank 1."""

    def __init__(self, what: str) -> None:
        self.own, self.what = getattr(quantized_collectives, what), what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if group_of().rank == 1:
            raise torch.OutOfMemoryError(f"no memory to {self.what}")
        return self.own(*args, **kwargs)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("failing", ["quantize", "dequantize"])
@pytest.mark.parametrize("number", range(3))
def test_a_rank_without_memory_sends_zeros_and_raises_in_wait(number: int, failing: str) -> None:
    """The handle of each collective raises on the rank that fails, and there alone."""
    group, block_format = group_of(), BlockFormat("int8", 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_collectives, failing, OutOfMemory(failing))
        messages = new_messages(2, 8, block_format, torch.device("cpu"))
        work = [
            lambda: all_gather_quantized(messages, torch.ones(8), group, block_format, tag=TAG),
            lambda: reduce_scatter_quantized(torch.ones(16), QuantizedMean(group, block_format, tag=TAG)),
            lambda: all_reduce_quantized(torch.ones(8), QuantizedMean(group, block_format, tag=TAG)),
        ][number]()
        # A gather's messages are read by its caller.
        if group.rank == 1 and (number, failing) != (0, "dequantize"):
            with pytest.raises(torch.OutOfMemoryError, match=f"no memory to {failing}"):
                work.wait(20.0)
        else:
            work.wait(20.0)


@pytest.mark.simulation
@pytest.mark.parametrize(("name", "world"), [("int8", 2), ("int4", 16)])
def test_the_bytes_are_those_of_the_formula(name: Any, world: int) -> None:
    block_format, numel = BlockFormat(name), 1000
    with simulate(rank=1, world_size=world) as simulation:
        group = group_of()
        messages = new_messages(world, numel, block_format, torch.device("cpu"))
        all_gather_quantized(messages, torch.zeros(numel), group, block_format).wait()
        reduce_scatter_quantized(torch.zeros(world * numel), QuantizedMean(group, block_format)).wait()
        assert simulation.bytes_sent == dict.fromkeys(
            ("all_gather", "all_to_all"), (world - 1) * block_format.num_bytes(numel)
        )
        simulation.restart()
        all_reduce_quantized(torch.zeros(numel), QuantizedMean(group, block_format)).wait()
        one = (world - 1) * block_format.num_bytes(-(-numel // world))
        assert simulation.bytes_sent == {"all_to_all": one, "all_gather": one}
