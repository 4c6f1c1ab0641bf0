"""Which ranks have other data, and which other parts of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from scale_adascale.process_groups import data_group_of, model_group_of
from scale_core.comm.group import Group, group_of
from scale_core.microbatch_grads import announces_samples


def announced(ranks: Group, with_parameters: Group | None = None) -> tuple[nn.Module, SGD]:
    model = nn.Linear(2, 1)
    announces_samples(model, ranks, with_parameters)
    return model, SGD(model.parameters(), lr=0.1)


def fake(*ranks: int) -> Group:
    return Group(0, len(ranks), None, "fake", ranks)


def test_without_a_pipeline_all_have_other_data_and_the_whole_model() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert data_group_of(optimizer, None) == group_of()
    assert model_group_of(optimizer, Group(), None) == Group()


def test_the_ranks_of_a_pipeline_have_other_parts_of_the_model_if_they_have_parameters() -> None:
    pipeline = fake(0, 3, 5)
    model, optimizer = announced(pipeline)
    assert model_group_of(optimizer, Group(), None) is pipeline
    announces_samples(model, pipeline, fake(0, 5))
    assert model_group_of(optimizer, Group(), None) == fake(0, 5)
    announces_samples(model, pipeline, Group())
    assert model_group_of(optimizer, Group(), None) == Group()


def test_what_is_given_is_taken_unless_it_has_other_stages_of_the_pipeline(monkeypatch) -> None:
    model, optimizer = announced(fake(0, 3))
    monkeypatch.setattr("scale_adascale.process_groups.group_of", lambda given: given)
    replicas = fake(0, 1)
    assert data_group_of(optimizer, replicas) is replicas
    assert model_group_of(optimizer, replicas, fake(0, 2)) == fake(0, 2)
    with pytest.raises(ValueError, match=r"some have other stages of the pipeline over \[0, 3\].*process_group="):
        data_group_of(optimizer, fake(0, 1, 2, 3))
    del model


def test_where_all_ranks_are_those_of_one_pipeline_none_has_other_data(monkeypatch) -> None:
    model, optimizer = announced(fake(0, 1))
    monkeypatch.setattr("scale_adascale.process_groups.group_of", lambda given: fake(0, 1))
    assert data_group_of(optimizer, None) == Group()
    del model
