"""offload/transfer.py: parameters and gradients are copied to the host, and new values back."""

from __future__ import annotations

import offload_cases as cases
import pytest
import torch
from torch import Tensor, nn

from scale_fsdp.offload.placement import StatePart
from scale_fsdp.offload.transfer import ElementRange, GradientCopy, HostTransfer, PinnedBuffer, are_current

HOST = torch.device("cpu")


def part_of(param: nn.Parameter, start: int = 0, stop: int | None = None) -> StatePart:
    return StatePart(param, {}, start, param.numel() if stop is None else stop, on_host=True, divisible=True)


def with_grad(numel: int = 12) -> nn.Parameter:
    param = nn.Parameter(torch.arange(float(numel)))
    param.grad = torch.full((numel,), 0.5)
    return param


def test_what_is_on_the_host_is_used_where_it_is() -> None:
    param = with_grad()
    load = HostTransfer(HOST).fetch([ElementRange(part_of(param), 0, 12)], {})
    assert load.chunks[0].param is param and load.chunks[0].grad is param.grad and load.buffer is None
    assert not load.write_backs


@torch.no_grad()
def test_what_is_away_is_copied_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.let_parameters_be_away(monkeypatch)
    param, ferry = with_grad(), HostTransfer(HOST)
    part = part_of(param, 2, 12)
    part.cast_target = torch.zeros(12, dtype=torch.bfloat16)
    load = ferry.fetch([ElementRange(part, 1, 4)], {})
    load.ready.synchronize()
    (piece,) = load.chunks
    assert piece.param.tolist() == [3, 4, 5] and piece.grad.tolist() == [0.5] * 3
    piece.param.mul_(-1)
    assert piece.cast_target is not None
    piece.cast_target.copy_(piece.param)
    assert param[3] == 3
    ferry.write_back(load)
    ferry.release(load)
    ferry.join()
    assert param.tolist() == [0, 1, 2, -3, -4, -5, 6, 7, 8, 9, 10, 11]
    assert part.cast_target.tolist() == [0, 0, 0, -3, -4, -5, 0, 0, 0, 0, 0, 0]


def test_a_gradient_that_came_early_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.let_parameters_be_away(monkeypatch)
    param = with_grad()
    part, early = part_of(param), torch.full((12,), 7.0)
    load = HostTransfer(HOST).fetch([ElementRange(part, 0, 12)], {part: early})
    assert load.chunks[0].param.tolist() == param.tolist() and len(load.write_backs) == 1


def test_a_slot_holds_several_dtypes_and_is_used_again() -> None:
    slot = PinnedBuffer(HOST)
    tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(4)]
    slot.reserve(tensors)
    first = [slot.allocate(tensor) for tensor in tensors]
    assert [place.shape for place in first] == [tensor.shape for tensor in tensors]
    assert first[0].untyped_storage().data_ptr() == first[2].untyped_storage().data_ptr()
    assert first[2].storage_offset() == 3 and first[1].dtype == torch.bfloat16
    slot.reserve(tensors[:1])
    assert slot.allocate(tensors[0]).is_set_to(first[0])
    slot.reserve([torch.ones(100)])
    assert slot.allocate(torch.ones(100)).shape == (100,)


def test_a_place_has_the_strides_of_what_it_is_for() -> None:
    slot, tensor = PinnedBuffer(HOST), torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    slot.reserve([tensor])
    assert slot.allocate(tensor).stride() == tensor.stride()


def early_copy(grad: Tensor, param: nn.Parameter) -> GradientCopy:
    param.grad = grad
    copy = GradientCopy(part_of(param))
    copy.start(grad, HostTransfer(HOST))
    return copy


def test_a_copy_is_one_as_long_as_the_gradient_stays_what_it_was() -> None:
    changes = {
        "nothing": lambda grad: None,
        "multiplied": lambda grad: grad.mul_(0.5),
        "without a version": lambda grad: grad.data.mul_(0.5),
        "negated": lambda grad: grad.data.neg_(),
        "clamped": lambda grad: grad.data.clamp_(-1, 1),
        "one element": lambda grad: grad.data[3:4].add_(1e-3),
        "one element, in its last digit": lambda grad: grad.data[3:4].view(torch.int32).add_(1),
        "all elements, in their last digits": lambda grad: grad.data.mul_(1 + 2**-22),
        "unscaled by torch": lambda grad: torch._amp_foreach_non_finite_check_and_unscale_(
            [grad], torch.zeros(()), torch.tensor(2.0**-16)
        ),
    }
    copies = []
    for change in changes.values():
        param = nn.Parameter(torch.zeros(100))
        grad = torch.randn(100, generator=torch.Generator().manual_seed(0))
        copies.append((early_copy(grad, param), grad))
        change(grad)
    assert dict(zip(changes, are_current(copies), strict=True)) == {name: name == "nothing" for name in changes}


@pytest.mark.parametrize(
    "grad",
    [
        torch.tensor([0.5, -0.5]),  # of two classes
        torch.arange(1.0, 8).repeat(2, 1) * torch.tensor([[1.0], [-1.0]]),
        torch.arange(1.0, 8).view(7, 1) * torch.tensor([[1.0, -1.0]]),
        (torch.arange(1.0, 49).view(1, 3, 4, 4) * torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)).to(
            memory_format=torch.channels_last
        ),
        torch.tensor([1.0, -3.0, -1.0, 3.0]),  # before a normalization
        torch.tensor([0.25, -0.25]).repeat(13),  # of groups of features
        torch.tensor(2.0),
    ],
)
def test_a_negated_gradient_whose_sum_is_0_is_detected(grad: Tensor) -> None:
    copy = early_copy(grad, nn.Parameter(torch.zeros_like(grad)))
    grad.data.neg_()
    assert are_current([(copy, grad)]) == [False]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_copy_of_a_complex_gradient_sees_either_part_change(dtype: torch.dtype) -> None:
    copies = []
    for change in (0, 1e-3, 1e-3j):
        grad = torch.arange(1.0, 6).to(dtype) * (1 - 2j)
        copies.append((early_copy(grad, nn.Parameter(torch.zeros(5, dtype=dtype))), grad))
        grad.data[3] += change
    assert are_current(copies) == [True, False, False]


def test_a_copy_of_another_tensor_is_none_though_it_is_equal() -> None:
    param, grad = nn.Parameter(torch.zeros(5)), torch.ones(5)
    copy = early_copy(grad, param)
    assert are_current([(copy, torch.ones(5)), (copy, grad)]) == [False, True]
    assert are_current([]) == []


def test_a_copy_does_not_keep_the_gradient_alive() -> None:
    param = nn.Parameter(torch.zeros(5))
    copy = early_copy(torch.ones(5), param)
    param.grad = None
    assert copy._copied_from is not None and copy._copied_from() is None


def test_a_copy_is_used_once() -> None:
    param, grad = nn.Parameter(torch.zeros(5)), torch.arange(5.0)
    copy = early_copy(grad, param)
    assert are_current([(copy, grad)]) == [True]
    assert copy.wait().tolist() == grad.tolist()
    assert are_current([(copy, grad)]) == [False]


def test_a_gradient_that_is_no_number_is_copied_again() -> None:
    param, grad = nn.Parameter(torch.zeros(5)), torch.full((5,), float("nan"))
    assert are_current([(early_copy(grad, param), grad)]) == [False]
