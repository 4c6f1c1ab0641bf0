import math

import pytest
import torch

from scale_core.comm.group import Group, group_of
from scale_core.testing import run_ranks
from scale_train.data import windows_at
from scale_train.model import GPT, ModelConfig
from scale_train.options import OptimizerOptions, ParallelOptions
from scale_train.training.parallelize import make_engine, parallel_axes
from scale_train.training.trainer import held_out_loss, held_out_starts, sum_over_ranks

TEXT = torch.arange(150, dtype=torch.uint8)
CPU = torch.device("cpu")


def evaluated(parallel: str, group: Group) -> float:
    torch.manual_seed(0)
    options = ParallelOptions(parallel=parallel)
    engine = make_engine(GPT(ModelConfig(1, 16, 2)), options, OptimizerOptions(), parallel_axes(group, options), CPU)
    starts = held_out_starts(len(TEXT), 8, 0)
    loss = held_out_loss(engine, TEXT, starts, 8, 4, group)
    assert engine.model.training
    return loss


def evaluated_here(parallel: str) -> float:
    return evaluated(parallel, group_of())


def test_windows_are_spread_evenly_over_all_bytes():
    starts = held_out_starts(num_bytes=101, sequence=10, most_tokens=50)
    assert starts.tolist() == [0, 22, 45, 67, 90]
    assert held_out_starts(101, 10, 0).tolist() == list(range(0, 100, 10))
    assert held_out_starts(11, 10, 5).tolist() == [0]


def test_the_held_out_loss_is_the_mean_over_the_windows():
    torch.manual_seed(0)
    model = GPT(ModelConfig(1, 16, 2))
    expected = model(*windows_at(TEXT, held_out_starts(len(TEXT), 8, 0), 8)).item()
    assert evaluated("none", Group()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ranks, parallel", [(2, "fsdp"), (3, "fsdp"), (2, "ddp")])
def test_ranks_that_do_not_divide_the_windows_find_the_same(ranks, parallel):
    by_rank = run_ranks(evaluated_here, ranks, parallel)
    assert len(set(by_rank)) == 1
    assert by_rank[0] == pytest.approx(evaluated("none", Group()), rel=1e-6)


def sum_of_ranks() -> float:
    return sum_over_ranks(0.1 + group_of().rank, group_of())


def test_a_sum_over_ranks_has_the_same_bits_on_all():
    assert run_ranks(sum_of_ranks, 3) == [math.fsum([0.1, 1.1, 2.1])] * 3
