"""Whether gradients were changed, without a look at their values."""

from __future__ import annotations

import pytest
import torch

from scale_adascale.measurement.norm_reduction import bit_checksum, checksum_term, rank_factor
from scale_adascale.measurement.param_info import fingerprint
from scale_adascale.measurement.step_statistics import are_zero, has_new, versions_of, were_changed
from scale_core.comm.group import Group


def test_unknown_gradients_are_zero_if_their_elements_are() -> None:
    for zeros in (torch.zeros(3), torch.zeros(3).to_sparse(), torch.zeros(3, dtype=torch.complex64), None):
        assert are_zero([None, zeros])
    assert not are_zero([torch.zeros(3), torch.tensor([0.0, 1e-45])])
    assert not are_zero([torch.eye(3).to_sparse()])


def test_written_zeros_are_not_looked_at_until_they_change() -> None:
    grad = torch.zeros(3)
    zeros = versions_of([grad])
    with torch.no_grad():
        grad.data[0] = 1.0  # This is no change that a tensor counts.
    assert are_zero([grad], zeros)
    grad[1] = 1.0
    assert not are_zero([grad], zeros)
    assert are_zero([grad], versions_of([grad]))


def test_sparse_gradients_have_versions_too() -> None:
    grad = torch.eye(3).to_sparse()
    before = versions_of([grad])
    assert not were_changed(before, [grad], alone=True, pass_failed=False)
    assert were_changed(before, [grad.clone()], alone=True, pass_failed=False)
    grad.mul_(0.5)
    assert were_changed(before, [grad], alone=True, pass_failed=False)


@pytest.mark.parametrize("alone", [True, False])
def test_changed_gradients_are_known_with_others_only_cleared(alone) -> None:
    one, other, late = torch.ones(3), torch.ones(2), torch.ones(4)
    before = versions_of([one, None, other])
    assert not were_changed(before, [one, late, other], alone=alone, pass_failed=False)  # A layer used since then.
    assert were_changed(before, [one, late, other], alone=alone, pass_failed=True)
    assert were_changed(before, [None, None, other], alone=alone, pass_failed=False)
    other.mul_(2)
    assert were_changed(before, [one, None, other], alone=alone, pass_failed=False) is alone
    assert were_changed(before, [one, None, other], alone=alone, pass_failed=True)


def test_a_gradient_is_new_unless_last_steps_or_written_zeros() -> None:
    grad = torch.ones(3)
    assert has_new([grad], (), ()) and not has_new([None], (), ())
    of_step = versions_of([grad])
    assert not has_new([grad], (), of_step)
    grad.zero_()
    zeros = versions_of([grad])
    assert not has_new([grad], zeros, of_step)
    grad.add_(1)
    assert has_new([grad], zeros, of_step) and has_new([None, torch.ones(1)], zeros, of_step)


def test_a_new_gradient_at_the_address_of_the_old_one_has_come() -> None:
    grads = [torch.ones(400_000)]
    before = versions_of(grads)
    again = grads[0].detach()
    assert again.data_ptr() == grads[0].data_ptr() and again._version == grads[0]._version
    grads.clear()
    assert has_new([again], before)
    assert not has_new([again], versions_of([again]))


WHOLE, SOME = 0, 21  # steps that have looked before; of two gradients such a step looks at the second


def total(size: int, grads: list[torch.Tensor], shapes: list[int]) -> float:
    """What the summands of all ranks sum up to."""
    groups = [Group(rank, size, None, "fake", tuple(range(size))) for rank in range(size)]
    cpu = torch.device("cpu")
    parts = list(zip(groups, grads, shapes, strict=True))
    some, whole = (
        sum(checksum_term(group, shape, [None, grad], cpu, step=look).item() for group, grad, shape in parts)
        for look in (SOME, WHOLE)
    )
    assert bool(some) == bool(whole)
    return whole


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 250, 1024])
def test_the_factors_of_all_ranks_sum_up_to_zero(size):
    factors = [rank_factor(rank, size) for rank in range(size)]
    assert sum(factors) == 0 and all(abs(factor) <= 250 for factor in factors)
    assert size == 1 or any(factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_gradients_give_zero_and_one_other_bit_does_not(size, dtype):
    grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = grad.clone()
    other[2, 3] *= 1 + (2.0**-7 if dtype is torch.bfloat16 else 2.0**-23)
    assert total(size, [grad] * size, [7] * size) == 0.0
    assert total(size, [grad] * (size - 1) + [other], [7] * size) != 0.0
    assert total(size, [grad] * size, [7] * (size - 1) + [8]) != 0.0


def test_two_stages_of_two_replicas_are_parts_in_any_rank_order():
    one, two = torch.ones(3), torch.full((3,), 1.5)
    for order in ([one, two, one, two], [one, one, two, two], [one, two, two, one]):
        assert total(4, order, [0] * 4) != 0.0


def bits(grads: list[torch.Tensor], look: int) -> int:
    return int(bit_checksum(grads, torch.device("cpu"), step=look))


def test_sparse_and_unordered_gradients_have_bits_too():
    dense = torch.arange(12.0).reshape(4, 3)
    for look in (WHOLE, SOME):
        expected = bits([dense], look)
        assert bits([dense.T.contiguous().T], look) == bits([dense.to_sparse(1)], look) == expected


def test_gradients_of_all_dtypes_are_read_and_zeros_are_as_none():
    table, head = torch.zeros(10, 300), torch.arange(3.0).bfloat16()
    for look in (WHOLE, SOME):
        assert bits([table, head], look) == bits([head], look) != bits([table, head + 1], look)
        assert bits([table], look) == bits([], look) == 0


def test_first_steps_read_all_elements_and_later_ones_take_turns():
    table = torch.zeros(10, 300)
    table[7, 5] = 1.0
    assert all(bits([table], look) for look in range(8))
    found = [look for look in range(SOME, SOME + 186) if bits([table], look)]
    assert len(found) == 2 and found[1] - found[0] == 3000 // 32


def test_later_steps_look_at_one_gradient_after_the_other():
    ones, nothing = torch.ones(100), torch.zeros(100)
    for place in range(3):
        grads = [ones if number == place else nothing for number in range(3)]
        assert [bool(bits(grads, look)) for look in range(9, 15)] == [look % 3 == place for look in range(9, 15)]
        assert bits(grads, WHOLE)


def test_shapes_and_their_order_make_the_fingerprint():
    a, b = torch.ones(2, 3), torch.ones(4)
    assert fingerprint([a, b]) == fingerprint([a + 1, b]) != fingerprint([b, a])
