"""Whether gradients were changed, without a look at their values."""

from __future__ import annotations

import pytest
import torch

from scale_adascale.gradient_checks import Marks


def test_gradients_of_which_nothing_is_known_are_zero_if_their_elements_are() -> None:
    for zeros in (torch.zeros(3), torch.zeros(3).to_sparse(), torch.zeros(3, dtype=torch.complex64), None):
        assert Marks().are_zero([None, zeros])
    assert not Marks().are_zero([torch.zeros(3), torch.tensor([0.0, 1e-45])])
    assert not Marks().are_zero([torch.eye(3).to_sparse()])


def test_zeros_that_were_written_are_not_looked_at_until_they_change() -> None:
    marks, grad = Marks(), torch.zeros(3)
    marks.set([grad])
    with torch.no_grad():
        grad.data[0] = 1.0  # This is no change that a tensor counts.
    assert marks.are_zero([grad])
    grad[1] = 1.0
    assert not marks.are_zero([grad])
    marks.set([grad])
    marks.forget()
    assert not marks.are_zero([grad])


def test_sparse_gradients_have_marks_too() -> None:
    marks, grad = Marks(), torch.eye(3).to_sparse()
    marks.set([grad])
    assert not marks.are_changed([grad], alone=True, is_torn=False)
    assert marks.are_changed([grad.clone()], alone=True, is_torn=False)
    grad.mul_(0.5)
    assert marks.are_changed([grad], alone=True, is_torn=False)


@pytest.mark.parametrize("alone", [True, False])
def test_a_gradient_that_was_changed_or_cleared_is_known_and_with_others_only_one_that_was_cleared(alone) -> None:
    marks, one, other = Marks(), torch.ones(3), torch.ones(2)
    marks.set([one, None, other])
    assert not marks.are_changed([one, torch.ones(4), other], alone=alone, is_torn=False)  # A layer used since then.
    assert marks.are_changed([one, torch.ones(4), other], alone=alone, is_torn=True)
    assert marks.are_changed([None, None, other], alone=alone, is_torn=False)
    other.mul_(2)
    assert marks.are_changed([one, None, other], alone=alone, is_torn=False) is alone
    assert marks.are_changed([one, None, other], alone=alone, is_torn=True)


def test_a_gradient_has_come_if_it_is_neither_that_of_the_last_step_nor_the_zeros_that_were_written() -> None:
    marks, grad = Marks(), torch.ones(3)
    assert marks.have_come([grad]) and not marks.have_come([None])
    marks.set_at_step([grad])
    assert not marks.have_come([grad])
    grad.zero_()
    marks.set([grad])
    assert not marks.have_come([grad])
    grad.add_(1)
    assert marks.have_come([grad]) and marks.have_come([None, torch.ones(1)])


def test_a_new_gradient_at_the_address_of_the_old_one_has_come() -> None:
    marks, grads = Marks(), [torch.ones(400_000)]
    marks.set_at_step(grads)
    again = grads[0].detach()
    assert again.data_ptr() == grads[0].data_ptr() and again._version == grads[0]._version
    grads.clear()
    assert marks.have_come([again])
    marks.set_at_step([again])
    marks.forget_step()
    assert marks.have_come([again])
