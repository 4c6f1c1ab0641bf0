"""skipped_backward.py: what becomes of the outputs of a forward pass, as autograd tells it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scale_oss.skipped_backward import PendingForwards

WEIGHT = torch.ones(3, requires_grad=True)


class Listener:
    """Counts how often a backward has come to a forward's outputs."""

    def __init__(self) -> None:
        self.num_met = 0

    def meet(self) -> None:
        self.num_met += 1


LISTENER = Listener()


def followed() -> PendingForwards:
    return PendingForwards(LISTENER.meet)


def forward(forwards: PendingForwards) -> Tensor:
    y = WEIGHT * 2
    forwards.watch({"y": y, "twice": [y]})
    return y


@pytest.mark.parametrize("use", [torch.Tensor.sum, lambda y: y.mul_(2).sum(), lambda y: y.view(3, 1).mul_(2).sum()])
def test_a_backward_that_comes_to_an_output_is_seen_whatever_was_done_to_it(use: object) -> None:
    forwards = followed()
    y = forward(forwards)
    use(y).backward()  # type: ignore[operator]
    del y
    assert forwards.num_unmatched == 0 and not forwards.has_skipped(in_step=True)


def test_an_output_that_is_a_view_may_be_changed_in_place() -> None:
    forwards = followed()
    view = (WEIGHT * 2).view(3, 1)
    forwards.watch(view)
    view.mul_(3)
    view.sum().backward()
    del view
    assert forwards.num_unmatched == 0


def test_what_has_no_gradient_is_not_waited_for() -> None:
    forwards = followed()
    forwards.watch([WEIGHT, torch.ones(2), "words"])
    assert forwards.num_unmatched == 0


def test_a_pass_is_left_out_when_its_output_is_gone() -> None:
    forwards = followed()
    y = forward(forwards)
    assert not forwards.has_skipped(in_step=False)
    del y
    assert forwards.has_skipped(in_step=False)
    forwards.drop_skipped()
    assert forwards.num_unmatched == 0 and not forwards.has_skipped(in_step=True)


def test_where_all_ranks_begin_a_forward_together_an_output_that_is_still_there_tells_as_well() -> None:
    forwards = followed()
    forward(forwards).sum().backward()
    forwards.reset_baseline()
    kept = forward(forwards)
    assert forwards.has_skipped(in_step=True) and not forwards.has_skipped(in_step=False)
    forwards.accept_unmatched()
    assert not forwards.has_skipped(in_step=True)
    kept.sum().backward()
    assert forwards.num_unmatched == 0


def test_a_pass_of_several_forwards_is_given_up_as_one() -> None:
    forwards = followed()
    (forward(forwards) + forward(forwards)).sum().backward()
    forwards.reset_baseline()
    first, second = forward(forwards), forward(forwards)
    del first
    assert forwards.has_skipped(in_step=False)
    forwards.drop_skipped()
    del second
    assert not forwards.has_skipped(in_step=False)


def test_what_all_ranks_drop_is_expected_as_long_as_they_do() -> None:
    forwards = followed()
    for _ in range(3):
        forward(forwards)
        if forwards.has_skipped(in_step=False):
            forwards.accept_unmatched()
        forward(forwards).sum().backward()
        assert forwards.num_unmatched == 1
        forwards.reset_baseline()
        assert forwards.num_unmatched == 0
        forward(forwards)
        assert not forwards.has_skipped(in_step=False)
        forwards.clear()
    forward(forwards).sum().backward()
    forwards.reset_baseline()  # Nothing was dropped this time.
    forward(forwards)
    assert forwards.has_skipped(in_step=False)


def test_who_listens_is_told_of_a_backward_before_it_goes_on_and_of_one_that_does_not_count_too() -> None:
    forwards, heard = followed(), []
    for counts in (True, False):
        before = LISTENER.num_met
        y = WEIGHT * 2
        y.register_hook(lambda _, before=before: heard.append(LISTENER.num_met - before))
        forwards.watch(y * 1, counts=counts)  # Dropped, and of no pass.
        z = y * 3
        forwards.watch(z, counts=counts)
        z.sum().backward()
        assert LISTENER.num_met == before + 1
    assert heard == [1, 1] and forwards.num_unmatched == 1
