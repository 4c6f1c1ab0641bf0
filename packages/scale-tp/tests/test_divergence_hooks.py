"""model_hooks.py: tensor parallel ranks that are given, or hold, other numbers than each other are found."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from torch import nn

from scale_core import DivergenceError, check_replicas
from scale_core.comm.group import group_of
from scale_tp.conversion.parallelize import parallelize

PLAN = {"words": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.noise = 0.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.down(self.up(self.norm(input) + self.noise).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(9, 6), nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if scale is None else hidden * scale


def divided(**options: object) -> Model:
    torch.manual_seed(0)
    model = parallelize(Model(), PLAN, group_of(), **options)  # type: ignore[arg-type]
    assert isinstance(model, Model)
    return model


@pytest.mark.ranks(2)
def test_differing_inputs_are_named_with_their_module() -> None:
    rank, model = group_of().rank, divided(check_inputs=True)
    ids = torch.arange(8).view(2, 4)
    model(ids, scale=torch.ones(1))
    with pytest.raises(DivergenceError, match="kwargs") as caught:
        model(ids, scale=torch.full((1,), float(rank)))
    assert "kwargs['scale'] [1] torch.float32, first at [0]: rank 0: 0.0; rank 1: 1.0" in str(caught.value)
    other = ids.clone()
    other[1, 2] += rank
    for each in (model, pickle.loads(pickle.dumps(model))):
        with pytest.raises(DivergenceError) as caught:
            each(other)
        assert "'Model' is given other inputs on some of the ranks [0, 1]" in str(caught.value)
        assert "args[0] [2, 4] torch.int64, first at [1, 2]: rank 0: 6; rank 1: 7" in str(caught.value)
    with pytest.raises(DivergenceError, match=re.escape("rank 0: args[0] [1, 4] torch.int64; rank 1: args[0] [2, 4]")):
        model(ids[: 1 + rank])
    model.blocks[1].noise = float(rank)
    with pytest.raises(DivergenceError, match=r"'blocks.1.up' is given other inputs .* args\[0\] \[2, 4, 6\]"):
        model(ids)


@pytest.mark.ranks(2)
def test_norms_that_come_apart_are_found_at_the_next_check() -> None:
    rank, model = group_of().rank, divided(check_replicas_every=2)
    ids = torch.arange(8).view(2, 4)
    model(ids)
    model.blocks[1].norm.weight.data[0] += rank
    model(ids)
    with torch.no_grad():
        model(ids)
    with pytest.raises(DivergenceError) as caught:
        model(ids)
    assert "step 3: 1 of 6 tensors" in str(caught.value)
    assert "'blocks.1.norm.weight' [6]: each of the ranks 0, 1 has values of its own" in str(caught.value)
    with pytest.raises(DivergenceError, match="1 of "):
        check_replicas(model)


@pytest.mark.ranks(4)
def test_one_call_compares_replicas_parts_and_norms() -> None:
    """Two replicas of a model that two ranks share: parts are compared between the replicas, norms between all."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = parallelize(Model(), PLAN, mesh["tensor"])
    check_replicas(model)
    rank = group_of().rank
    blocks = model.get_submodule("blocks")
    blocks[0].up.weight.to_local().data[0, 0] += int(rank == 2)
    with pytest.raises(DivergenceError, match=r"'blocks.0.up.weight' \[8, 6\]: each of the ranks 0, 2 has"):
        check_replicas(model)
    blocks[0].up.weight.to_local().data[0, 0] -= int(rank == 2)
    blocks[0].down.bias.data[0] += int(rank == 2)
    with pytest.raises(DivergenceError, match=r"down.bias' \[6\]: ranks 0, 1, 3 hold equal values, .*: rank 2"):
        check_replicas(model)
