"""lone_vector.py: torch makes no vector of parts of parameters, and any of whole ones."""

from __future__ import annotations

import pytest
import torch
from sharded_by_hand import cut
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from scale_core.lone_vector import watch_vectors


def test_vectors_of_parts_are_refused_in_both_directions() -> None:
    watch_vectors()
    model = cut(nn.Sequential(nn.Linear(4, 4)), 0, 2)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"'0.weight' is a shard, .* of \[4, 4\].*summon_full_params\(\)"):
        parameters_to_vector(model.parameters())
    with pytest.raises(RuntimeError, match=r"'0.weight' is a shard"):
        vector_to_parameters(torch.zeros(20), model.parameters())
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_whole_parameters_and_those_of_a_world_of_one_make_vectors() -> None:
    watch_vectors()
    for model in (nn.Linear(2, 2), cut(nn.Sequential(nn.Linear(2, 2)), 0, 1)):
        vector = parameters_to_vector(model.parameters())
        assert vector.shape == (6,)
        vector_to_parameters(torch.zeros(6), model.parameters())
        assert not any(param.any() for param in model.parameters())
