"""Objects with a state: the same on all ranks, each rank's own, or rank 0's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scale_core.state.local_shard import LocalShard
from scale_core.testing import run_ranks
from scale_snapshot import FromRank0, PerRank, SnapshotError, load, save


class Holder:
    """An object with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def keys_of(path: Path) -> list[str]:
    manifest = json.loads((path / "manifest.json").read_text())
    return sorted([*manifest["tensors"], *manifest["values"]])


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": 1, "b": {"c": [torch.arange(3)], 4: None}},
        [1, (2, torch.ones(2))],
        {1: 2},
        None,
        {"it.a": 1, "it.b": 2},
        {"state": 1},
        {"a.b": torch.ones(1), "ranks[0]": 3},
    ],
)
def test_any_state_comes_back_as_it_was(tmp_path: Path, state: Any) -> None:
    save(tmp_path, 1, {"it": Holder(state), "its": Holder([state])})
    one, other = Holder(), Holder()
    load(tmp_path, {"it": one, "its": other})
    assert repr(one.state) == repr(state)
    assert repr(other.state) == repr([state])


def test_an_array_at_the_top_of_a_state_comes_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "mean": numpy.arange(6.0).reshape(2, 3).T,
        "count": numpy.array(7),
        "weight": nn.Parameter(torch.ones(2)),
        "leaf": torch.ones(2, requires_grad=True),
        "nested": {"mean": numpy.arange(2)},
    }
    one, other, whole = Holder(), Holder(), Holder()
    objects = {"it": Holder(state), "its": PerRank(Holder(state)), "whole": Holder(state["mean"]), "raw": state}
    save(tmp_path, 1, objects)
    loaded = load(tmp_path, {"it": one, "its": PerRank(other), "whole": whole, "raw": None}).state
    for found in (one.state, other.state, loaded["raw"]):
        assert repr(found) == repr(state)
    assert repr(whole.state) == repr(state["mean"])
    save(tmp_path, 2, {"array": state["mean"]})
    assert repr(load(tmp_path, {"array": None}).state["array"]) == repr(state["mean"])


def test_entries_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}
    with pytest.raises(ValueError, match=r"two entries that would be named it.a.b"):
        save(tmp_path, 1, {"it": Holder(state)})


def save_states(folder: Path, kind: str) -> list[str]:
    rank = dist.get_rank()
    objects: dict[str, Any] = {
        "same": Holder({"at": (3, 4), "of": torch.arange(4)}),
        "own": Holder({"at": (rank, 4), "of": torch.full((1 + rank,), rank)}),
    }
    if kind == "marked":
        objects["same"] = PerRank(objects["same"])
        objects["own"] = FromRank0(objects["own"])
    if kind == "values":
        objects = {"own": PerRank(torch.tensor(10 * rank)), "other": PerRank((rank, "x")), "first": FromRank0(rank)}
    return keys_of(save(folder, 1, objects))


def load_states(folder: Path, same: bool = True) -> tuple[Any, Any]:
    one, other = Holder(), Holder()
    load(folder, {"same": one, "own": other} if same else {"own": other})
    return one.state, other.state


@pytest.mark.ranks(2)
def test_equal_states_are_saved_once_and_others_for_each_rank(tmp_path: Path) -> None:
    assert save_states(tmp_path, "") == [
        *("own.ranks[0].at", "own.ranks[0].of", "own.ranks[1].at", "own.ranks[1].of"),
        *("same.at", "same.of", "scale.objects"),
    ]
    (same, own), rank = load_states(tmp_path), dist.get_rank()
    assert (same["at"], same["of"].tolist()) == ((3, 4), [0, 1, 2, 3])
    assert (own["at"], own["of"].tolist()) == ((rank, 4), [rank] * (1 + rank))


@pytest.mark.ranks(2)
def test_marks_say_whose_state_is_saved(tmp_path: Path) -> None:
    keys = save_states(tmp_path, "marked")
    assert [key for key in keys if key.endswith("at")] == ["own.at", "same.ranks[0].at", "same.ranks[1].at"]
    same, own = load_states(tmp_path)
    assert (same["at"], own["at"]) == ((3, 4), (0, 4))


@pytest.mark.ranks(2)
def test_values_of_each_rank_are_returned_to_it(tmp_path: Path) -> None:
    save_states(tmp_path, "values")
    own, rank = torch.tensor(-1), dist.get_rank()
    state = load(tmp_path, {"own": PerRank(own), "other": PerRank(None), "first": FromRank0(None)}).state
    assert [own.item(), state["other"], state["first"]] == [10 * rank, (rank, "x"), 0]


def refused(folder: Path) -> str:
    with pytest.raises(SnapshotError) as caught:
        load(folder, {"same": Holder(), "own": Holder()})
    return str(caught.value)


def resized(folder: Path) -> Any:
    own = Holder()
    load(folder, {"same": Holder(), "own": PerRank(own, resize=lambda states, rank, size: [states, rank, size])})
    return own.state


def test_another_number_of_ranks_has_to_say_what_each_gets(tmp_path: Path) -> None:
    run_ranks(save_states, 2, tmp_path, "")
    message, *_ = run_ranks(refused, 3, tmp_path)
    assert "'own' was saved by 2 ranks, each of which had a state of its own, and there are 3 ranks now" in message
    assert "pass 'own': PerRank(own, resize=...), which says what each rank gets" in message
    for number, (states, rank, size) in enumerate(run_ranks(resized, 3, tmp_path)):
        assert ([state["at"] for state in states], rank, size) == ([(0, 4), (1, 4)], number, 3)


class Loader(DataLoader[Any], Holder):
    """A data loader with a state."""

    def __init__(self, state: Any = None) -> None:
        DataLoader.__init__(self, TensorDataset(torch.ones(3)))
        self.state = state

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # It is not needed.
        return iter(())


@pytest.mark.ranks(2)
def test_the_state_of_a_data_loader_is_one_of_its_rank(tmp_path: Path) -> None:
    keys, _ = by_rank(keys_of(save(tmp_path, 1, {"loader": Loader({"yielded": 3})})))
    assert keys == ["loader.ranks[0].yielded", "loader.ranks[1].yielded", "scale.objects"]


class Sharded(Holder):
    """An object whose state is sharded, as averages of weights."""

    def state_dict(self) -> dict[str, Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        start, stop = (7 * at // size for at in (rank, rank + 1))
        part = self.state if self.state is not None else torch.zeros(stop - start)
        self.state = part
        return {
            "ema.weight": LocalShard(part, (7,), start, stop),
            "ema.updates": 3,
            "ema.bias": torch.ones(2),
            "ema.decays": numpy.array([0.9, 0.5]),
            "ema.history": [torch.ones(1)] if size == 2 else [],
        }

    def load_state_dict(self, state: Any) -> None:
        assert (state["ema.updates"], state["ema.bias"].tolist()) == (3, [1.0, 1.0])
        assert (state["ema.decays"].tolist(), state["ema.history"][0].tolist()) == ([0.9, 0.5], [1.0])
        self.loaded: Tensor = state["ema.weight"]


def save_sharded(folder: Path, name: str) -> list[str]:
    start, stop = (7 * at // 2 for at in (dist.get_rank(), dist.get_rank() + 1))
    return keys_of(save(folder, 1, {name: Sharded(torch.arange(start, stop, dtype=torch.float32))}))


def load_sharded(folder: Path, name: str) -> list[float]:
    held = Sharded()
    load(folder, {name: held})
    found = held.loaded
    assert isinstance(found, LocalShard)
    return [float(number) for number in found.tensor]


@pytest.mark.parametrize("name", ["ema", "average"])
def test_a_sharded_state_loads_at_any_number_of_ranks(tmp_path: Path, name: str) -> None:
    keys, _ = run_ranks(save_sharded, 2, tmp_path, name)
    prefix = "ema" if name == "ema" else "average.ema"
    entries = ["bias", "decays", "decays#data", "history", "history.0", "updates", "weight"]
    assert keys == [*(f"{prefix}.{entry}" for entry in entries), "scale.objects"]
    assert load_sharded(tmp_path, name) == list(range(7))
    assert list(chain(*run_ranks(load_sharded, 3, tmp_path, name))) == list(range(7))
