import random
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from scale_core.testing import run_ranks
from scale_snapshot import RandomState, SnapshotError, load, save


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(numpy.random.rand()), float(torch.rand(()))]


def test_all_generators_draw_again_what_they_drew() -> None:
    random.gauss(0, 1)  # Python keeps the second one of two.
    state = RandomState().state_dict()
    first = drawn()
    drawn()
    RandomState().load_state_dict(state)
    assert drawn() == first


def test_without_numpy_its_state_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RandomState().state_dict()
    monkeypatch.delitem(sys.modules, "numpy")
    RandomState().load_state_dict(state)
    assert "numpy" not in RandomState().state_dict()


def save_and_draw(folder: Path) -> list[float]:
    seed = dist.get_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    drawn()
    save(folder, 1, {"random": RandomState()})
    return drawn()


def load_and_draw(folder: Path, objects: dict[str, Any]) -> list[float]:
    load(folder, objects)
    return drawn()


def test_each_rank_gets_its_own_generators_back(tmp_path: Path) -> None:
    expected = run_ranks(save_and_draw, 2, tmp_path)
    assert expected[0] != expected[1]
    assert run_ranks(load_and_draw, 2, tmp_path, {"random": RandomState()}) == expected


def refused(folder: Path) -> str:
    with pytest.raises(SnapshotError) as caught:
        load(folder, {"random": RandomState()})
    return str(caught.value)


def test_at_another_number_of_ranks_generators_are_refused(tmp_path: Path) -> None:
    run_ranks(save_and_draw, 2, tmp_path)
    (message, *_) = run_ranks(refused, 3, tmp_path)
    assert "'random' was saved by 2 ranks, each of which had a state of its own, and there are 3 ranks now" in message
    assert "pass 'random': RandomState(reseed=True)" in message
    first, second, third = run_ranks(load_and_draw, 3, tmp_path, {"random": RandomState(reseed=True)})
    assert len({*first, *second, *third}) == 12
    assert run_ranks(load_and_draw, 3, tmp_path, {"random": RandomState(reseed=True)}) == [first, second, third]
