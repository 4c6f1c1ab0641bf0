"""replica_check.py: ranks that hold the same numbers in place of their parts say so when the model first runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from scale_core.comm.group import group_of
from scale_core.errors import ShardedTensorError
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.conversion import replica_check
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.replica_check import check_first_forward
from scale_tp.layers.full_init import init_as_full

IDS = torch.arange(8)[None]
PLAN = {"unused": "colwise_rep", "up": "colwise", "down": "rowwise", "words": "embedding_rowwise"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.unused = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.words(ids)).relu())


def _divided() -> nn.Module:
    torch.manual_seed(0)
    return parallelize(Model(), PLAN, group_of())


def _fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight)


def _fill_parts(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(local_tensor(module.weight))


def _sent(model: nn.Module) -> None:
    for param in model.parameters():
        dist.broadcast(local_tensor(param.data), 0)


ALIKE: dict[str, Callable[[nn.Module], object]] = {
    "drawn into the parts": lambda model: model.apply(_fill_parts),
    "sent from one rank": _sent,
}
APART: dict[str, Callable[[nn.Module], object]] = {
    "as divided": lambda model: None,
    "drawn into the parameters": lambda model: model.apply(_fill),
    "drawn as a whole": lambda model: init_as_full(model, lambda model: model.apply(_fill)),
    "all the same value": lambda model: [nn.init.constant_(param, 0.3) for param in model.parameters()],
}


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("change", ALIKE)
def test_ranks_that_hold_the_same_as_their_parts_say_so(change: str) -> None:
    model = _divided()
    torch.manual_seed(1)
    ALIKE[change](model)
    with pytest.raises(RuntimeError, match=r"the ranks \[0, 1\] hold the same numbers in \d of \d .*'words.weight'"):
        model(IDS)
    assert not any(module._forward_pre_hooks for module in (model.up, model.down))


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("change", APART)
def test_ranks_that_hold_their_parts_are_looked_at_once(change: str) -> None:
    model = _divided()
    torch.manual_seed(1)
    APART[change](model)
    for divided in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with pytest.raises(IndexError):
            divided(IDS + 1)  # A forward that fails has not been the first one.
        divided(IDS)
        assert not any(module._forward_pre_hooks for module in (divided.words, divided.up, divided.down))
    _sent(model)
    model(IDS)


@pytest.mark.ranks(2)
def test_a_part_of_the_weights_may_be_alike() -> None:
    """As in a model that is made of repeated ones."""
    model = _divided()
    dist.broadcast(model.up.weight.to_local().data, 0)
    with pytest.warns(UserWarning, match=r"hold the same numbers in 1 of 3 divided weights \('up.weight'\)"):
        model(IDS)


@pytest.mark.ranks(2)
def test_a_compiled_model_is_checked_when_it_first_runs_plain() -> None:
    model = _divided()
    _sent(model)
    with torch.no_grad():
        torch.compile(model, backend="eager")(IDS)
    with pytest.raises(RuntimeError, match="hold the same numbers"):
        model(IDS)


@pytest.mark.ranks(2)
def test_a_forward_on_fake_tensors_ends_the_check() -> None:
    """One rank may make it by itself, so it compares nothing, and later forwards have no hooks."""
    model = nn.Identity()
    check_first_forward(model, group_of())
    with patch.object(replica_check, "exchange", side_effect=AssertionError), FakeTensorMode():
        model(torch.ones(1))
    assert not model._forward_pre_hooks and not model._forward_hooks


@pytest.mark.ranks(2)
def test_fsdp2_around_divided_layers_is_refused() -> None:
    """It would take one rank's part for the other's."""
    with pytest.raises(ShardedTensorError, match=r"chunk of a parameter of shape \(8, 6\)"):
        fully_shard(_divided())


def test_one_process_has_nothing_to_compare() -> None:
    model = nn.Linear(2, 2)
    check_first_forward(model, group_of())
    model(torch.ones(2))
