"""offload/kinds.py: how an optimizer's state may be divided."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from scale_core.optim.traits import PER_PARAMETER
from scale_fsdp.offload.placement import split_of


class Own(optim.SGD):
    """A class that nobody knows."""


def test_the_table_says_how_to_divide() -> None:
    assert split_of(optim.AdamW, None) == "element" and split_of(optim.AdamW, "parameter") == "parameter"
    for kind in PER_PARAMETER:
        assert split_of(kind, None) == "parameter"
        with pytest.raises(ValueError, match=f"{kind.__name__} needs each parameter as a whole: pass split="):
            split_of(kind, "element")


def test_a_class_that_is_not_known_needs_a_word_from_the_user() -> None:
    with pytest.raises(ValueError, match=r'Own updates each element by itself is not known.*split="element"'):
        split_of(Own, None)
    assert split_of(Own, "element") == "element"


def test_what_can_not_work_in_two_places_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LBFGS can't work in two places: its direction depends on all"):
        split_of(optim.LBFGS, None)
    with pytest.raises(ValueError, match=r"SparseAdam can't work .* sparse"):
        split_of(optim.SparseAdam, "element")
    with pytest.raises(ValueError, match="split to be"):
        split_of(optim.SGD, "row")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"class of optimizers, got \[\]: pass the class first"):
        split_of([], None)  # type: ignore[arg-type]
    built = optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    with pytest.raises(TypeError, match="got an SGD that is built already: pass the class"):
        split_of(built, None)  # type: ignore[arg-type]
