"""groups.py and getters.py: which ranks compute a layer together, and what is asked of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import scale_tp
from scale_core.compat import process_groups, time_limit
from scale_tp import megatron, parallel_state
from scale_tp.parallel_state import axis_group, tensor_parallel_group

GETTERS_OF = {"model": "tensor_model", "data": "data", "pipeline": "pipeline_model", "context": "context"}
GETTERS = [f"get_{axis}_parallel_{what}" for axis in GETTERS_OF.values() for what in ("rank", "world_size", "ranks")]


@pytest.fixture(autouse=True)
def _undivided() -> Iterator[None]:
    yield
    scale_tp.destroy_model_parallel()


def test_one_process_needs_no_initialization() -> None:
    assert not megatron.model_parallel_is_initialized()
    assert tensor_parallel_group().size == 1
    assert [getattr(megatron, name)() for name in GETTERS] == [0, 1, [0]] * 4
    assert megatron.get_tensor_model_parallel_src_rank() == 0
    assert megatron.get_tensor_model_parallel_group() is None


def test_one_process_may_initialize_all_the_same() -> None:
    scale_tp.initialize_model_parallel(1)
    assert megatron.model_parallel_is_initialized()
    assert [getattr(megatron, name)() for name in GETTERS] == [0, 1, [0]] * 4
    with pytest.raises(RuntimeError, match=r"divided already .data 1.*destroy_model_parallel"):
        scale_tp.initialize_model_parallel(1)
    scale_tp.destroy_model_parallel()
    assert not megatron.model_parallel_is_initialized()
    scale_tp.destroy_model_parallel()


@pytest.mark.ranks(4)
def test_a_program_may_divide_layers_between_groups_of_its_own() -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    own, other = pairs if dist.get_rank() < 2 else pairs[::-1]
    parallel_state.set_axis_group("model", own)
    assert megatron.get_tensor_model_parallel_group() is own
    assert megatron.get_tensor_model_parallel_rank() == dist.get_rank() % 2
    assert parallel_state.context_parallel_group().size == 1
    assert scale_tp.ColumnParallelLinear(4, 6).weight.to_local().shape == (3, 4)  # type: ignore[operator]
    for getter in (megatron.get_data_parallel_group, megatron.get_context_parallel_ranks):
        with pytest.raises(RuntimeError, match=r"axis are not known: the program has set only the groups of model\."):
            getter()
    with pytest.raises(RuntimeError, match=r"divided already \(model 2\)"):
        scale_tp.initialize_model_parallel(2)
    with pytest.raises(ValueError, match="not a member of the process group"):
        parallel_state.set_axis_group("model", other)
    assert megatron.get_tensor_model_parallel_group() is own  # An error changes nothing.
    parallel_state.set_axis_group("data", dist.group.WORLD)
    assert megatron.get_data_parallel_world_size() == 4
    scale_tp.destroy_model_parallel()
    assert not megatron.model_parallel_is_initialized() and own in process_groups()
    scale_tp.initialize_model_parallel(2)
    replicas = megatron.get_data_parallel_group()
    parallel_state.set_axis_group("model", own)  # The same ranks: the other axes stay.
    assert megatron.get_data_parallel_group() is replicas and megatron.get_tensor_model_parallel_group() is own
    parallel_state.set_axis_group("model", None)
    assert not megatron.model_parallel_is_initialized()
    scale_tp.initialize_model_parallel(2)
    replicas = megatron.get_data_parallel_group()
    parallel_state.set_axis_group("model", own)
    scale_tp.destroy_model_parallel()
    assert replicas not in process_groups() and own in process_groups()


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((2,), ValueError, r"expected 2 \(model\) to divide the number of ranks, got 1 ranks: start as many processes"),
        ((1, 3, 2), ValueError, r"3 \(pipeline\) x 2 \(context\) = 6 to divide"),
        ((0,), ValueError, "the model parallel size to be at least 1, got 0"),
        ((1, -1), ValueError, "the pipeline parallel size to be at least 1, got -1"),
        ((1, 1, 2.0), TypeError, "the context parallel size to be an integer, got 2.0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scale_tp.initialize_model_parallel(*sizes)
    assert not megatron.model_parallel_is_initialized()


def test_arguments_have_the_names_and_the_order_of_megatrons() -> None:
    names = list(inspect.signature(scale_tp.initialize_model_parallel).parameters)
    assert names == [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "model_parallel_backend",
        "pipeline_backend",
        "cp_backend",
        "ddp_backend",
        "limit_seconds",
    ]


@pytest.mark.ranks(4)
def test_ranks_that_are_not_divided_yet_are_refused() -> None:
    for call in (megatron.get_tensor_model_parallel_rank, tensor_parallel_group):
        with pytest.raises(ValueError, match=r"4 ranks have not been divided yet.*initialize_model_parallel"):
            call()
    with pytest.raises(
        ValueError, match=r"expected 3 \(model\) to divide the number of ranks, got 4 ranks: choose sizes"
    ):
        scale_tp.initialize_model_parallel(3)
    assert tensor_parallel_group(dist.group.WORLD).size == 4


@pytest.mark.ranks(4)
def test_ranks_are_divided_and_nothing_is_left_of_it() -> None:
    before, rank = len(process_groups()), dist.get_rank()
    pair, replicas = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    for pipeline, data_ranks, pipeline_ranks in ((1, replicas, [rank]), (2, [rank], replicas)):
        scale_tp.initialize_model_parallel(2, pipeline)
        model_group = megatron.get_tensor_model_parallel_group()
        assert model_group is not None and time_limit(model_group) == time_limit(dist.group.WORLD)
        ranks = {"model": pair, "data": data_ranks, "pipeline": pipeline_ranks, "context": [rank]}
        for axis, expected in ranks.items():
            getter = f"get_{GETTERS_OF[axis]}_parallel"
            assert getattr(megatron, f"{getter}_ranks")() == expected
            assert getattr(megatron, f"{getter}_rank")() == expected.index(rank)
            assert getattr(megatron, f"{getter}_world_size")() == len(expected)
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=getattr(megatron, f"{getter}_group")())
            assert total.item() == sum(expected)
        scale_tp.destroy_model_parallel()
        assert len(process_groups()) == before


@pytest.mark.ranks(4)
def test_replicas_of_the_context_axis_have_a_group_together() -> None:
    before, rank = len(process_groups()), dist.get_rank()
    scale_tp.initialize_model_parallel(2, 1, 2)
    replicas = axis_group(parallel_state.DATA_CONTEXT)
    assert replicas.ranks == (rank % 2, rank % 2 + 2) and replicas.rank == rank // 2
    assert megatron.get_data_context_parallel_world_size() == 2
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=megatron.get_data_context_parallel_group())
    assert total.item() == 2 * (rank % 2) + 2
    scale_tp.destroy_model_parallel()
    assert len(process_groups()) == before


@pytest.mark.ranks(4)
def test_a_default_group_that_goes_first_takes_the_others() -> None:
    """And nothing is left to be destroyed."""
    scale_tp.initialize_model_parallel(4)
    dist.destroy_process_group()
    scale_tp.destroy_model_parallel()
    assert tensor_parallel_group().size == 1
