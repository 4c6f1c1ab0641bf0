"""offload_parts.py: what stands in two places, seen as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scale_fsdp.offload.placement import Part, PlacedState


def cut(numel: int = 10, at: int = 4, shape: tuple[int, ...] = (2, 5)) -> tuple[nn.Parameter, list[Part], PlacedState]:
    param = nn.Parameter(torch.arange(float(numel)).view(shape))
    group: dict[str, Any] = {"fused": None}
    parts = [
        Part(param, group, 0, at, on_host=True, divisible=True),
        Part(param, group, at, numel, on_host=False, divisible=True),
    ]
    state = PlacedState()
    state.add(param, parts)
    return param, parts, state


def test_a_part_is_its_elements_in_its_own_shape() -> None:
    param, (first, second), _ = cut()
    assert first.of(param).tolist() == [0, 1, 2, 3] and second.of(param).tolist() == [4, 5, 6, 7, 8, 9]
    whole = Part(param, {}, 0, 10, on_host=True, divisible=True)
    assert whole.of(param) is param and whole.shape == (2, 5) and first.shape == (4,)


def test_what_is_assigned_is_cut_and_what_is_read_is_joined() -> None:
    param, (first, second), state = cut()
    values = {"step": torch.tensor(3.0), "exp_avg": torch.arange(10.0).view(2, 5), "word": "x"}
    state[param] = values
    assert first.state["exp_avg"].tolist() == [0, 1, 2, 3] and second.state["exp_avg"].tolist() == [4, 5, 6, 7, 8, 9]
    values["exp_avg"].zero_()
    first.state["step"] += 1
    assert second.state["step"].item() == 3  # Each part counts for itself.
    found = state[param]
    assert found["exp_avg"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and found["word"] == "x"
    assert found["step"].item() == 4


def test_the_state_of_an_uncut_parameter_is_the_live_one() -> None:
    param = nn.Parameter(torch.ones(3))
    part, state = Part(param, {}, 0, 3, on_host=True, divisible=True), PlacedState()
    state.add(param, [part])
    assert param not in state and list(state) == [] and state[param] is part.state
    tensor = torch.zeros(3)
    state[param] = {"exp_avg": tensor}
    assert state[param]["exp_avg"] is tensor and param in state and len(state) == 1


def test_what_is_no_parameter_is_kept_as_it_is() -> None:
    _, _, state = cut()
    other = torch.ones(2)
    state[other] = {"a": 1}
    assert state[other] == {"a": 1} and next(iter(state)) is other
    del state[other]
    with pytest.raises(KeyError):
        state[other]


def test_pieces_fill_the_state_once_the_last_of_them_has_stepped() -> None:
    _, (_, part), _ = cut()
    for start, stop in ((0, 4), (4, 6)):
        piece = part.state_of(start, stop)
        assert piece == {}
        piece.update(exp_avg=torch.full((stop - start,), float(stop)), step=torch.tensor(1.0))
        assert part.state == {}
        part.keep(start, stop, piece)
    assert part.state["exp_avg"].tolist() == [4, 4, 4, 4, 6, 6] and part.state["step"].item() == 1
    for start, stop in ((0, 4), (4, 6)):
        piece = part.state_of(start, stop)
        piece["exp_avg"] += 1
        piece["step"] += 1
        assert part.state["step"].item() == 1
        part.keep(start, stop, piece)
    assert part.state["exp_avg"].tolist() == [5, 5, 5, 5, 7, 7] and part.state["step"].item() == 2


def test_the_whole_of_a_part_is_its_live_state() -> None:
    _, (part, _), _ = cut()
    piece = part.state_of(0, 4)
    piece["step"] = torch.tensor(1.0)
    part.keep(0, 4, piece)
    assert part.state is piece


def test_counts_of_where_everything_is() -> None:
    param, _, state = cut()
    assert state.placement() == (4, 6, 0, 0)
    state[param] = {"exp_avg": torch.zeros(2, 5), "step": torch.tensor(1.0), "word": "x"}
    assert state.placement() == (4, 6, 4 * 4 + 4, 6 * 4 + 4)


def test_a_saved_state_takes_the_strides_of_its_parameter() -> None:
    param = nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    part = Part(param, {}, 0, 96, on_host=True, divisible=False)
    saved = torch.randn(2, 3, 4, 4)
    part.place({"exp_avg": saved})
    assert part.state["exp_avg"].stride() == param.stride() and torch.equal(part.state["exp_avg"], saved)
