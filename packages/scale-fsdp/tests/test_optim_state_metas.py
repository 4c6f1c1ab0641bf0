"""state_dict/optimizer.py: ranks compare what their optimizers keep, or all of them say where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scale_core.comm.group import Group, group_of
from scale_core.consistency.contract import Contract
from scale_core.state.param_ownership import ParamSlice
from scale_core.testing import run_ranks
from scale_fsdp.state_dict.optimizer import StateMeta, StateMetas, all_gather_state_metas, state_metas

WIDE = StateMeta("torch.float32", True)


def holding(name: str = "w", shape: tuple[int, ...] = (4, 2), start: int = 0, stop: int = 4) -> ParamSlice:
    owner = nn.Parameter(torch.zeros(stop - start))
    return ParamSlice(name, owner, shape, start, stop, 0, (stop - start,))


def step(value: float) -> StateMeta:
    return StateMeta("torch.float32", False, value)


def test_an_entry_is_a_number_or_a_tensor_of_the_shard_s_shape() -> None:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4), "count": 7, "none": None, "pair": [1, {"a": 2.5}]}
    kinds = state_metas([holding()], state)["w"]
    assert kinds["step"] == step(3.0)
    assert torch.equal(kinds["step"].scalar(), torch.tensor(3.0))
    assert kinds["exp_avg"] == WIDE
    assert [kinds[key].scalar() for key in ("count", "none", "pair")] == [7, None, [1, {"a": 2.5}]]
    assert kinds["exp_avg"].torch_dtype == torch.float32


def test_of_a_scalar_s_shard_the_name_tells_a_count_from_a_state() -> None:
    owner = nn.Parameter(torch.tensor(1.0))
    kinds = state_metas([ParamSlice("s", owner, (), 0, 1)], {"step": torch.tensor(2.0), "exp_avg": torch.tensor(0.5)})[
        "s"
    ]
    assert kinds == {"step": step(2.0), "exp_avg": WIDE}


def test_a_rank_that_holds_nothing_needs_no_state() -> None:
    assert state_metas([holding(start=2, stop=2)], {}) == {}
    assert state_metas([holding()], {}) == {"w": {}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(2),
            r"optimizer state w.v has shape \(2,\), expected the shard's \(4,\) or a number: this optimizer",
        ),
        ([torch.zeros(1)], "optimizer state w.v is a list, expected a tensor or a number"),
        ({1: 2}, "optimizer state w.v is a dict, expected a tensor or a number"),
    ],
)
def test_what_is_neither_is_refused_by_name(value: Tensor | list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state_metas([holding()], {"v": value})
    with pytest.raises(ValueError, match=message):
        all_gather_state_metas(lambda: state_metas([holding()], {"v": value}), Group(), Contract(Group()))


def agree() -> list[Any]:
    rank, group = dist.get_rank(), group_of()
    contract = Contract(group)

    def fail() -> StateMetas:
        raise ValueError("it went wrong")

    def told(first: StateMetas, second: StateMetas) -> Any:
        return all_gather_state_metas(lambda: (first, second)[rank], group, contract)

    both = {"w": {"step": step(3.0), "exp_avg": WIDE}}
    results: list[Any] = [told(both, both), told(both, {}), told({"a": {"x": WIDE}}, both), told({}, {})]
    results.append(told({"w": {"x": step(float("nan"))}}, {"w": {"x": step(float("nan"))}})["w"].keys())
    for attempt in (
        lambda: all_gather_state_metas(fail if rank else dict, group, contract),
        lambda: told(both, {"w": {"step": step(4.0), "exp_avg": WIDE}}),
        lambda: told(both, {"w": {"step": step(3.0)}}),
        lambda: told({"w": {}}, both),
        lambda: told({"w": {"x": WIDE}}, {"w": {"x": StateMeta("torch.bfloat16", True)}}),
    ):
        try:
            attempt()
            results.append("agreed")
        except ValueError as error:
            results.append(str(error))
    return [[*each] if isinstance(each, type({}.keys())) else each for each in results]


def test_ranks_that_differ_all_raise_the_same() -> None:
    first, second = run_ranks(agree, 2)
    assert first == second
    both = {"w": {"step": step(3.0), "exp_avg": WIDE}}
    assert first[:5] == [both, both, {"a": {"x": WIDE}, **both}, {}, ["x"]]
    assert [message.partition(":")[0] for message in first[5:]] == [
        "it went wrong (on rank 1)",
        "optimizer state w.step differs between the ranks",
        "optimizer state w.exp_avg is there on rank 0, but not on rank 1, which holds a part of the parameter, too",
        "optimizer state w.exp_avg is there on rank 1, but not on rank 0, which holds a part of the parameter, too",
        "optimizer state w.x differs between the ranks",
    ]
    assert "3.0 on rank 0, 4.0 on rank 1: all ranks must step together" in first[6]
