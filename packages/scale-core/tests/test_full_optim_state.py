"""full_optim_state.py: full states from the parts of all ranks, or an error of all where they differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_values import by_rank
from torch import Tensor, nn

from scale_core.comm.group import Group, group_of
from scale_core.consistency.contract import Contract
from scale_core.sharded_tensor.full_tensor import Part
from scale_core.state.full_optim_state import ParamState, gather_optim_states
from scale_core.state.param_ownership import ParamSlice
from scale_core.tree import map_tensors

HOST = torch.device("cpu")


def part_of(name: str, shape: tuple[int, ...], cuts: list[int], group: Group, **values: Any) -> ParamState:
    """What this rank has of a parameter that is cut there; tensors of its shape are given whole."""
    parts = [Part(cuts[rank], cuts[rank + 1]) for rank in range(group.size)]
    start, stop, _ = parts[group.rank]
    owner = nn.Parameter(torch.zeros(stop - start))

    def cut(value: Tensor) -> Tensor:
        return value.reshape(-1)[start:stop].clone() if tuple(value.shape) == shape else value

    state = {key: map_tensors(cut, value) for key, value in values.items()}
    return ParamState(ParamSlice(name, owner, shape, start, stop), group, parts, HOST, state)


def alone(**values: Any) -> dict[Any, Any]:
    (found,) = gather_optim_states([part_of("w", (4,), [0, 4], Group(), **values)], Contract(Group()), keeps=True)
    return found


def test_an_entry_is_a_number_or_a_tensor_of_the_shard_s_shape() -> None:
    numbers = {"count": 7, "none": None, "pair": [1, {"a": 2.5}]}
    given: dict[str, Any] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), **numbers}
    found = alone(**given)
    assert [*found] == [*given] and torch.equal(found["step"], given["step"])
    assert torch.equal(found["exp_avg"], given["exp_avg"])
    assert {key: found[key] for key in numbers} == numbers
    assert gather_optim_states([], Contract(Group()), keeps=True) == []
    with pytest.raises(ValueError, match=r"state w.v has shape \(2,\), expected the shard's \(4,\) or a number"):
        alone(v=torch.zeros(2))


def test_of_a_scalar_s_shard_the_name_tells_a_count_from_a_state() -> None:
    owner = nn.Parameter(torch.tensor(1.0))
    values = {"step": torch.tensor(2.0), "exp_avg": torch.tensor(0.5)}
    state = ParamState(ParamSlice("s", owner, (), 0, 1), Group(), [Part(0, 1)], HOST, values)
    assert [state.tensors(key, value) for key, value in values.items()] == [[], [values["exp_avg"]]]
    assert gather_optim_states([state], Contract(Group()), keeps=True) == [values]


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_any_size_become_whole_on_those_that_keep_them(num_ranks: int) -> None:
    group = group_of()
    contract, last = Contract(group), group.size - 1
    matrix, count = torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.int64)
    cuts = [0, 1, 5, 6] if group.size == 3 else [0, 5, 6]
    ends = [0, 0, 4, 4] if group.size == 3 else [0, 0, 4]
    step = torch.tensor(3.0)
    a = part_of("a", (2, 3), cuts, group, step=step, sum=matrix, half=matrix.bfloat16(), nested=[matrix, matrix + 1])
    b = part_of("b", (4,), ends, group, step=step, n=count)
    if not group.rank:  # It holds nothing of b: it may have counted otherwise, or never have made a state of it.
        b = replace(b, values={"step": torch.tensor(9.0)} if group.size == 3 else {})
    all_of = replace(part_of("c", (4,), [0] * (group.size + 1), group), rank_of_all=last)
    if group.rank == last:
        all_of = replace(all_of, values={"rows": [torch.ones(2), torch.ones(3)], "trust": torch.tensor(0.5)})
    for keeps in (True, group.rank == last):
        found = gather_optim_states([a, b, all_of], contract, keeps=keeps)
        assert bool(found) is keeps
        for first, second, third in [found] if keeps else []:
            assert torch.equal(first["sum"], matrix) and torch.equal(first["half"], matrix.bfloat16())
            assert all(torch.equal(value, matrix + add) for add, value in enumerate(first["nested"]))
            assert torch.equal(second["n"], count) and second["n"].dtype == torch.int64
            assert first["step"] == second["step"] == 3
            assert [value.tolist() for value in third["rows"]] == [[1, 1], [1, 1, 1]] and third["trust"] == 0.5
    columns = torch.arange(10.0).view(2, 5)
    bounds = [0, 1, 4, 5] if group.size == 3 else [0, 4, 5]
    ranges = [(((0, 2),), ((bounds[rank], bounds[rank + 1]),)) for rank in range(group.size)]
    parts = [Part(0, 2 * (bounds[rank + 1] - bounds[rank]), ranges[rank]) for rank in range(group.size)]
    mine = columns[:, bounds[group.rank] : bounds[group.rank + 1]]
    held = ParamSlice("d", nn.Parameter(mine), (2, 5), *parts[group.rank][:2])
    (whole,) = gather_optim_states([ParamState(held, group, parts, HOST, {"sum": mine})], contract, keeps=True)
    assert torch.equal(whole["sum"], columns)


@pytest.mark.ranks(2)
def test_ranks_that_differ_all_raise_the_same() -> None:
    group = group_of()
    contract, said = Contract(group), []
    both = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}
    nan = {"x": torch.tensor(float("nan")), "y": float("nan")}
    cases: list[list[dict[str, Any]]] = [
        [both, both],
        [nan, {"x": torch.tensor(float("nan")), "y": float("nan")}],
        [both, {**both, "step": torch.tensor(4.0)}],
        [both, {**both, "step": torch.tensor(3)}],
        [both, {"step": torch.tensor(3.0)}],
        [{}, both],
        [both, {**both, "exp_avg": torch.ones(4, dtype=torch.bfloat16)}],
        [both, {**both, "exp_avg": [torch.ones(4)]}],
        [both, {**both, "rows": torch.ones(3)}],
        [both, {"exp_avg": both["exp_avg"], "step": both["step"]}],
    ]
    for case in cases:
        state = part_of("w", (4,), [0, 2, 4], group, **case[group.rank])
        try:
            gather_optim_states([state], contract, keeps=not group.rank)
            said.append("agreed")
        except ValueError as error:
            said.append(str(error))
    first, second = by_rank(said)
    assert first == second
    assert [message.partition(":")[0] for message in first] == [
        "agreed",
        "agreed",
        "optimizer state w.step differs between the ranks",
        "optimizer state w.step differs between the ranks",
        "optimizer state w.exp_avg is there on rank 0, but not on rank 1, which holds a part of the parameter, too",
        "optimizer state w.step is there on rank 1, but not on rank 0, which holds a part of the parameter, too",
        "optimizer state w.exp_avg differs between the ranks",
        "optimizer state w.exp_avg differs between the ranks",
        "optimizer state w.rows has shape (3,), expected the shard's (2,) or a number",
        "agreed",
    ]
    assert "3.0 (torch.float32) on rank 0, 4.0 (torch.float32) on rank 1: all ranks must step together" in first[2]


@pytest.mark.ranks(4)
def test_copies_on_other_ranks_are_compared_and_one_is_sent() -> None:
    """Copies on two pairs of ranks, of which one pair has another step."""
    world = group_of()
    pairs = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = group_of(pairs[world.rank // 2])
    results = []
    for step in (3.0, 3.0 + world.rank // 2):
        state = part_of("w", (4,), [0, 2, 4], group, step=torch.tensor(step), sum=torch.arange(4.0))
        try:
            found = gather_optim_states([state], Contract(world), keeps=world.rank == 2, compared_over=world)
            results.append(str([values["sum"].tolist() for values in found]))
        except ValueError as error:
            results.append(str(error))
    said = by_rank(" / ".join(results))
    assert [text.partition(" / ")[0] for text in said] == ["[]", "[]", "[[0.0, 1.0, 2.0, 3.0]]", "[]"]
    assert all("w.step differs between the ranks: 3.0 (torch.float32) on rank 0, 4.0" in text for text in said)
