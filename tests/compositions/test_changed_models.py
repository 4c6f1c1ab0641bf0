"""A snapshot of a model that has changed: one error lists all that differs on any rank, or what fits is loaded."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import scale_snapshot
from scale_core.comm.group import group_of
from scale_core.state import sharded_state_dict
from scale_core.state.local_shard import LocalShard
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, fully_shard
from scale_oss import OSS
from scale_pipe import DistributedPipe
from scale_snapshot import SnapshotError
from scale_tp import parallelize


class Seen(nn.Module):
    """Passes its input on, and has a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x


def built(way: str, changed: bool) -> tuple[nn.Module, Optimizer]:
    """The model, or the changed one: a layer is another, one has another width, and a buffer another dtype."""
    layers = OrderedDict[str, nn.Module](first=nn.Linear(6, 8), seen=Seen(torch.float64 if changed else torch.float32))
    layers["new" if changed else "old"] = nn.Linear(8, 8)
    layers["head"] = nn.Linear(8, 6 if changed else 4)
    model: nn.Module = nn.Sequential(layers)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(9.0 if changed else 1.0)
    options: dict[str, Any] = {"lr": 0.25 if changed else 0.5, "momentum": 0.9}
    if way == "oss":
        return model, OSS(model.parameters(), SGD, **options)
    if way == "fully_shard":
        model = fully_shard(model)
    elif way == "flat":
        model = FullyShardedDataParallel(model, flatten_parameters=True)
    elif way == "pipe":
        assert isinstance(model, nn.Sequential)
        model = DistributedPipe(model, balance=[2, 2], chunks=1)
    else:
        model = parallelize(model, {"first": "colwise_gather_output", "head": "colwise_gather_output"}, group_of())
    return model, SGD(model.parameters(), **options)


def elements(value: Any) -> Tensor:
    """This rank's elements of an entry; all are one number."""
    found: Tensor = (value.tensor if isinstance(value, LocalShard) else value).detach()
    return found


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in sharded_state_dict(model, optimizer).items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("way", ["fully_shard", "flat", "oss", "pipe", "tp"])
@pytest.mark.ranks(2, in_turn=True)
def test_all_that_has_changed_is_one_error_or_one_warning(way: str, tmp_path: Path) -> None:
    model, optimizer = built(way, changed=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    scale_snapshot.save(tmp_path, 1, {"model": model, "optim": optimizer})

    model, optimizer = built(way, changed=True)
    objects = {"model": model, "optim": optimizer}
    before = {key: elements(value).clone() for key, value in state_of(model, optimizer).items()}
    with pytest.raises(SnapshotError) as caught:
        scale_snapshot.load(tmp_path, objects)
    for key, value in state_of(model, optimizer).items():
        assert torch.equal(elements(value), before[key]), f"{key} is changed"

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        scale_snapshot.load(tmp_path, objects, strict=False)
    warned = [str(warning.message) for warning in seen if warning.category is UserWarning]
    assert len(warned) == (dist.get_rank() == 0), warned
    loaded = {"model.first.weight": 0.5, "model.first.bias": 0.5}
    momenta = dict.fromkeys(("optim.first.weight.momentum_buffer", "optim.first.bias.momentum_buffer"), 1.0)
    if way != "flat":  # There one state is that of all parameters, not all of which fit.
        loaded |= momenta
    state = state_of(model, optimizer)
    for key, value in state.items():
        assert (elements(value) == loaded.get(key, 9.0)).all(), f"{key}: {value}"
    if way != "pipe":  # Of a pipeline other ranks have some, and of OSS another rank has all of a momentum.
        assert loaded.keys() <= state.keys() | (momenta.keys() if way == "oss" else set())
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()

    (refused, warning), (also, *nothing) = by_rank([str(caught.value), *warned])
    assert refused == also and not nothing
    assert refused.count("strict=False") == 1
    for text in (refused, warning):
        missing = text.partition("missing in it: ")[2].partition(";")[0]
        unexpected = text.partition("unexpected in it: ")[2].partition(";")[0]
        assert all(key in missing for key in ("model.new.weight", "model.new.bias")), text
        old = ("model.old.weight", "model.old.bias", "optim.old.weight.momentum_buffer")
        assert all(key in unexpected for key in old), text
        assert "model.head.weight: the saved shape is (4, 8), expected (6, 8)" in text
        assert "optim.head.weight.momentum_buffer: the saved shape is (4, 8), expected (6, 8)" in text
        assert "model.seen.mean: the saved dtype is torch.float32, expected torch.float64" in text


# ------------------------------------------------------------------------------------------------------- extra state


class Scaled(nn.Linear):
    """A layer with a state beside its parameters."""

    amax: dict[str, Any] | None = None

    def get_extra_state(self) -> Any:
        return self.amax

    def set_extra_state(self, state: Any) -> None:
        self.amax = state


def with_extra_state(way: str) -> tuple[nn.Module, dict[int, Scaled]]:
    """A model in one wrapping, and the layers of this rank by number."""
    layers = [Scaled(4, 4) for _ in range(3)]
    model: nn.Module = nn.Sequential(*layers)
    if way == "fully_shard":
        model = fully_shard(model)
    elif way == "wrapped":
        model = FullyShardedDataParallel(model)
    elif way == "pipe":
        assert isinstance(model, nn.Sequential)
        model = DistributedPipe(model, balance=[1, 2], chunks=1)
    here = set(model.modules())
    return model, {number: layer for number, layer in enumerate(layers) if layer in here}


def save_extra_state(folder: Path) -> None:
    for way in ("plain", "fully_shard", "wrapped", "pipe"):
        model, layers = with_extra_state(way)
        assert len(layers) == (3 if way != "pipe" else 1 + dist.get_rank())
        for number, layer in layers.items():
            layer.amax = {"history": torch.full((3,), float(number)), "steps": (1, number)}
        scale_snapshot.save(folder / way, 1, {"model": model})
    model, layers = with_extra_state("fully_shard")
    for layer in layers.values():
        layer.amax = {"of": dist.get_rank()}
    scale_snapshot.save(folder / "each", 1, {"model": model})


def load_extra_state(folder: Path) -> None:
    for saved in ("plain", "fully_shard", "wrapped", "pipe"):
        for way in ("plain", "fully_shard", "wrapped", "pipe"):
            model, layers = with_extra_state(way)
            scale_snapshot.load(folder / saved, {"model": model})
            for number, layer in layers.items():
                assert layer.amax is not None and layer.amax["steps"] == (1, number), (saved, way, number)
                assert layer.amax["history"].tolist() == [number] * 3
    model, layers = with_extra_state("fully_shard")
    scale_snapshot.load(folder / "each", {"model": model})
    assert [layer.amax for layer in layers.values()] == [{"of": dist.get_rank()}] * 3


def test_extra_state_loads_by_name_into_any_wrapping(tmp_path: Path) -> None:
    run_ranks(save_extra_state, 2, tmp_path)
    run_ranks(load_extra_state, 2, tmp_path)
    model = nn.Sequential(*(Scaled(4, 4) for _ in range(3)))
    for saved in ("fully_shard", "pipe"):
        scale_snapshot.load(tmp_path / saved, {"model": model})
        assert [layer.amax["steps"] for layer in model] == [(1, 0), (1, 1), (1, 2)]
    with pytest.raises(SnapshotError, match=r"model@extra_state\[0\] was saved by 2 ranks, each of which had another"):
        scale_snapshot.load(tmp_path / "each", {"model": model})
    with pytest.warns(UserWarning, match=r"model@extra_state\[0\] was saved by 2 ranks"):
        scale_snapshot.load(tmp_path / "each", {"model": model}, strict=False)
    assert model[0].amax["steps"] == (1, 0)
    with pytest.raises(SnapshotError, match=r"6 unexpected in it: model@extra_state\[0\]\.history"):
        scale_snapshot.load(tmp_path / "plain", {"model": nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))})
