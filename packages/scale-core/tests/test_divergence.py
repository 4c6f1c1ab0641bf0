"""divergence.py: what must be equal on several ranks and is not is found, with its name and the ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_core import DivergenceError, check_replicas, group_of
from scale_core.comm.subgroups import subgroup_of
from scale_core.consistency.divergence import check_interval, digests_of
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_core.testing import run_ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))


def error_of(check: Any, *args: Any, **options: Any) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    with pytest.raises(DivergenceError) as caught:
        check(*args, **options)
    return str(caught.value), caught.value.names, caught.value.ranks


def changed_on_rank(changed: int) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    here = model()
    check_replicas(here)
    if group_of().rank == changed:
        here[2].weight.data[3, 5] += 1e-6
    return error_of(check_replicas, here, step=7)


def test_a_value_changed_on_one_rank_is_named_on_all_ranks() -> None:
    errors = run_ranks(changed_on_rank, 4, 2)
    assert len(set(errors)) == 1
    text, names, ranks = errors[0]
    assert text.startswith("step 7: 1 of 6 tensors that must be equal on several ranks are not:\n")
    assert "'2.weight' [8, 32]: ranks 0, 1, 3 hold equal values, and others than these: rank 2" in text
    assert names == ("'2.weight' [8, 32]",) and ranks == (2,)


def test_of_two_ranks_none_is_taken_for_right() -> None:
    text, _, ranks = run_ranks(changed_on_rank, 2, 0)[0]
    assert "each of the ranks 0, 1 has values of its own" in text and ranks == (1,)


@pytest.mark.ranks(2)
def test_buffers_are_compared_but_for_running_statistics() -> None:
    here = model()
    here.register_buffer("table", torch.arange(10.0))
    here(torch.randn(4, 16) + group_of().rank)
    check_replicas(here)
    here.table[2] += group_of().rank
    check_replicas(here, buffers=False)
    assert "'table' [10]" in error_of(check_replicas, here)[0]


@pytest.mark.ranks(4)
def test_pieces_are_compared_with_those_of_the_same_elements() -> None:
    """4 ranks: two copies of a parameter that two ranks share."""
    world = group_of()
    first, second = subgroup_of(world, (0, 1)), subgroup_of(world, (2, 3))
    place = world.rank % 2
    axes = (Axis(first if world.rank < 2 else second, Placement.SHARD),)
    piece = torch.arange(4.0) + 4 * place
    set_shard(piece, Shard("weight", (8,), 4 * place, 4 * place + 4, axes))
    norm = torch.ones(3)
    check_replicas([("weight", piece), ("norm", norm)])
    if world.rank == 3:
        piece[0] = -piece[0]
    text, _, ranks = error_of(check_replicas, [("weight", piece), ("norm", norm)])
    assert "1 of 3 tensors" in text and "'weight' [8]: each of the ranks 1, 3 has values of its own" in text
    assert ranks == (3,)
    summand = torch.full((2,), float(world.rank))
    set_shard(summand, Shard("summand", (2,), 0, 2, (Axis(world, Placement.PARTIAL),)))
    check_replicas([("summand", summand)])


@pytest.mark.ranks(3)
def test_ranks_may_hold_different_parameters_or_none() -> None:
    rank = group_of().rank
    check_replicas([(f"layer{rank}", torch.full((3,), float(rank)))] if rank else [])


@pytest.mark.ranks(2)
def test_another_dtype_is_another_value() -> None:
    error_of(check_replicas, [("weight", torch.zeros(4, dtype=(torch.float16, torch.bfloat16)[group_of().rank]))])


@pytest.mark.parametrize("numel", [1, 7, 130, 1000, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_each_changed_bit_and_each_swap_changes_the_digest(numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    values = torch.arange(numel) % 2 if dtype is torch.bool else torch.randint(-100, 100, (numel,))
    tensor = values.to(dtype)
    before = digests_of([tensor])
    assert digests_of([tensor.clone()]) == before
    raw = tensor.view(torch.uint8)
    for place in torch.randint(raw.numel(), (20,)).tolist():
        raw[place] ^= 1
        assert digests_of([tensor]) != before
        raw[place] ^= 1
    for first, second in torch.randint(numel, (20, 2)).tolist():
        swapped = tensor.clone()
        swapped[[first, second]] = tensor[[second, first]]
        assert (digests_of([swapped]) == before) == torch.equal(swapped, tensor)


def bits(*tensors: Tensor) -> list[int]:
    return digests_of(tensors)


def test_a_digest_is_of_bits_and_knows_nan_and_the_sign_of_zero() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert bits(nan) == bits(nan.clone())
    assert bits(torch.tensor([0.0])) != bits(torch.tensor([-0.0]))
    assert bits(torch.ones(2, 3)) != bits(torch.ones(3, 2)) != bits(torch.ones(6))


def test_a_digest_is_that_of_the_values_in_any_memory() -> None:
    base = torch.arange(1001, dtype=torch.float32).to(torch.bfloat16)
    assert bits(base[1:]) == bits(base[1:].clone())  # not at an address of whole words
    square = torch.arange(1024.0).view(32, 32)
    assert bits(square.t()) == bits(square.t().contiguous())
    complex_values = torch.randn(40, dtype=torch.complex64)
    assert bits(complex_values.conj()) == bits(complex_values.conj().resolve_conj())
    assert bits(complex_values.conj()) != bits(complex_values)


def test_a_world_of_one_has_nothing_to_compare() -> None:
    check_replicas(model())
    check_replicas([("meta", torch.empty(3, device="meta")), ("empty", torch.empty(0))])


def test_an_interval_is_given_or_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALE_CHECK_REPLICAS_EVERY", raising=False)
    assert check_interval(None) == 100 and check_interval(0) == 0
    monkeypatch.setenv("SCALE_CHECK_REPLICAS_EVERY", "7")
    assert check_interval(None) == 7 and check_interval(3) == 3
    for wrong in (-1, True, 1.5, "x"):
        with pytest.raises(ValueError, match="expected a number of steps in check_replicas_every"):
            check_interval(wrong)  # type: ignore[arg-type]
    monkeypatch.setenv("SCALE_CHECK_REPLICAS_EVERY", "often")
    with pytest.raises(ValueError, match="SCALE_CHECK_REPLICAS_EVERY, got 'often'"):
        check_interval(None)


def late_rank() -> str:
    if group_of().rank == 1:
        return ""
    check = partial(check_replicas, model(), limit_seconds=1.0)
    with pytest.raises(Exception, match="the comparison of what must be equal") as caught:
        check()
    return type(caught.value).__name__


def test_a_rank_that_does_not_come_is_named_within_the_limit() -> None:
    assert run_ranks(late_rank, 2)[0] == "ScaleDistributedError"
