"""placement.py: which elements have their state on the host, and the state of a split parameter as one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from scale_core.optim.traits import PER_PARAMETER
from scale_fsdp.offload.placement import PlacedState, StatePart, chunk_ranges, host_counts, resolve_split


def cut(
    numel: int = 10, at: int = 4, shape: tuple[int, ...] = (2, 5)
) -> tuple[nn.Parameter, list[StatePart], PlacedState]:
    param = nn.Parameter(torch.arange(float(numel)).view(shape))
    group: dict[str, Any] = {"fused": None}
    parts = [
        StatePart(param, group, 0, at, on_host=True, divisible=True),
        StatePart(param, group, at, numel, on_host=False, divisible=True),
    ]
    state = PlacedState()
    state.add(param, parts)
    return param, parts, state


def test_a_part_is_its_elements_in_its_own_shape() -> None:
    param, (first, second), _ = cut()
    assert first.slice(param).tolist() == [0, 1, 2, 3] and second.slice(param).tolist() == [4, 5, 6, 7, 8, 9]
    whole = StatePart(param, {}, 0, 10, on_host=True, divisible=True)
    assert whole.slice(param) is param and whole.shape == (2, 5) and first.shape == (4,)


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
    part, state = StatePart(param, {}, 0, 3, on_host=True, divisible=True), PlacedState()
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
        piece = part.state_slice(start, stop)
        assert piece == {}
        piece.update(exp_avg=torch.full((stop - start,), float(stop)), step=torch.tensor(1.0))
        assert part.state == {}
        part.store_state(start, stop, piece)
    assert part.state["exp_avg"].tolist() == [4, 4, 4, 4, 6, 6] and part.state["step"].item() == 1
    for start, stop in ((0, 4), (4, 6)):
        piece = part.state_slice(start, stop)
        piece["exp_avg"] += 1
        piece["step"] += 1
        assert part.state["step"].item() == 1
        part.store_state(start, stop, piece)
    assert part.state["exp_avg"].tolist() == [5, 5, 5, 5, 7, 7] and part.state["step"].item() == 2


def test_the_whole_of_a_part_is_its_live_state() -> None:
    _, (part, _), _ = cut()
    piece = part.state_slice(0, 4)
    piece["step"] = torch.tensor(1.0)
    part.store_state(0, 4, piece)
    assert part.state is piece


def test_counts_of_where_everything_is() -> None:
    param, _, state = cut()
    assert state.placement() == (4, 6, 0, 0)
    state[param] = {"exp_avg": torch.zeros(2, 5), "step": torch.tensor(1.0), "word": "x"}
    assert state.placement() == (4, 6, 4 * 4 + 4, 6 * 4 + 4)


def test_a_saved_state_takes_the_strides_of_its_parameter() -> None:
    param = nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    part = StatePart(param, {}, 0, 96, on_host=True, divisible=False)
    saved = torch.randn(2, 3, 4, 4)
    part.load_state({"exp_avg": saved})
    assert part.state["exp_avg"].stride() == param.stride() and torch.equal(part.state["exp_avg"], saved)


def cases() -> Iterator[tuple[list[int], int]]:
    """Sizes of parameters, and how many elements are wanted on the host."""
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.choice((0, 1, 64, draw.randrange(500))) for _ in range(draw.randint(1, 12))]
        yield sizes, round(draw.choice((0.0, draw.random(), 1.0)) * sum(sizes))


@pytest.mark.parametrize("multiple", [1, 64])
def test_at_most_one_parameter_is_cut_and_the_number_is_right(multiple: int) -> None:
    for sizes, wanted in cases():
        counts = host_counts(sizes, wanted, [multiple] * len(sizes))
        assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
        cut = [count for count, size in zip(counts, sizes, strict=True) if 0 < count < size]
        assert len(cut) <= 1 and all(count % multiple == 0 for count in cut)
        assert abs(sum(counts) - wanted) <= multiple // 2


def test_whole_parameters_come_as_near_as_the_next_one_allows() -> None:
    for sizes, wanted in cases():
        counts = host_counts(sizes, wanted, [0] * len(sizes))
        assert all(count in (0, size) for count, size in zip(counts, sizes, strict=True))
        left = wanted - sum(counts)
        assert abs(left) <= max(sizes) / 2 or 0 < left < max(sizes)


def test_the_last_parameters_go_to_the_host_first() -> None:
    assert host_counts([10, 20, 30], 45, [1, 1, 1]) == [0, 15, 30]
    assert host_counts([10, 20, 30], 60, [1, 1, 1]) == [10, 20, 30]
    assert host_counts([10, 20, 30], 0, [1, 1, 1]) == [0, 0, 0]


def test_what_can_not_be_cut_is_passed_over_for_what_fits() -> None:
    assert host_counts([10, 500, 30], 40, [1, 0, 1]) == [10, 0, 30]


def test_ranges_cover_everything_once() -> None:
    assert chunk_ranges(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert chunk_ranges(8, 4) == [(0, 4), (4, 8)]
    assert chunk_ranges(0, 4) == [(0, 0)]


def test_the_table_says_how_to_divide() -> None:
    assert resolve_split(optim.AdamW, None) == "element" and resolve_split(optim.AdamW, "parameter") == "parameter"
    for kind in PER_PARAMETER:
        assert resolve_split(kind, None) == "parameter"
        with pytest.raises(ValueError, match=f"{kind.__name__} needs each full parameter: pass split="):
            resolve_split(kind, "element")


def test_a_class_that_is_not_known_needs_a_word_from_the_user() -> None:
    class Own(optim.SGD):
        """A class that nobody knows."""

    with pytest.raises(ValueError, match=r'Own updates each element by itself is not known.*split="element"'):
        resolve_split(Own, None)
    assert resolve_split(Own, "element") == "element"


def test_what_can_not_work_in_two_places_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LBFGS can't have its state in two places: its direction depends on all"):
        resolve_split(optim.LBFGS, None)
    with pytest.raises(ValueError, match=r"SparseAdam can't have .* sparse"):
        resolve_split(optim.SparseAdam, "element")
    with pytest.raises(ValueError, match="split to be"):
        resolve_split(optim.SGD, "row")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"class of optimizers, got \[\]: pass the class first"):
        resolve_split([], None)  # type: ignore[arg-type]
    built = optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    with pytest.raises(TypeError, match="got an SGD that is built already: pass the class"):
        resolve_split(built, None)  # type: ignore[arg-type]
