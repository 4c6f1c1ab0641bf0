"""What one pipeline saves, any other one loads: other stages, another schedule, one process; by plain names."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from split_models import Tower
from torch import Tensor, nn

from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe, Pipe, split


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3))


def tower(seed: int) -> Tower:
    torch.manual_seed(seed)
    return Tower()


def save_and_load(folder: Path) -> list[str]:
    """Saves from four stages in a V; loads into two stages of other sizes. Returns what differs."""
    wrong = []
    for name, build, first, second in (
        (
            "layers",
            layers,
            lambda model: DistributedPipe(model, "zb_v", balance=[1, 2, 2, 1]),
            lambda model: DistributedPipe(model, "1f1b", balance=[4, 2]),
        ),
        (
            "tower",
            tower,
            lambda model: DistributedPipe(split(model, ["blocks.1", "blocks.2", "head"]), "zb_v"),
            lambda model: DistributedPipe(split(model, ["blocks.3"]), "gpipe"),
        ),
    ):
        state = first(build(1)).state_dict()
        dcp.save({"model": state}, checkpoint_id=folder / name)
        pipe = second(build(2))
        loaded = pipe.state_dict()
        dcp.load({"model": loaded}, checkpoint_id=folder / name)
        pipe.load_state_dict(loaded)
        expected = build(1).state_dict()
        wrong += [key for key, value in pipe.state_dict().items() if not torch.equal(value, expected[key])]
        wrong += [f"{name} lacks all"] * (not pipe.state_dict())
    return wrong


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # That is what is meant.
def test_states_pass_through_dcp_into_any_other_stages(tmp_path: Path) -> None:
    assert run_ranks(save_and_load, 2, tmp_path) == [[], []]
    for name, build in (("layers", layers), ("tower", tower)):
        model = build(3)
        state: dict[str, Tensor] = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=tmp_path / name, no_dist=True)
        assert all(torch.equal(value, build(1).state_dict()[key]) for key, value in state.items())
    pipe = Pipe(layers(4), [2, 4], devices=["cpu", "cpu"])
    pipe.load_state_dict(layers(1).state_dict())
    state = pipe.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path / "layers", no_dist=True)
    assert list(state) == list(layers(1).state_dict())


def test_stages_of_any_cut_load_what_those_of_another_have() -> None:
    whole = {
        key: value for stage in split(tower(1), ["blocks.1", "blocks.3"]) for key, value in stage.state_dict().items()
    }
    model = tower(2)
    for stage in split(model, ["blocks.2.1"]):
        stage.load_state_dict({key: whole[key] for key in stage.state_dict()})
    assert all(torch.equal(value, tower(1).state_dict()[key]) for key, value in model.state_dict().items())
