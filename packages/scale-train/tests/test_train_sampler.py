import pytest
import torch

from scale_train.data import Sampler, slice_of_rank, windows_at
from scale_train.errors import InputError


def test_each_epoch_draws_every_window_once_in_another_order():
    sampler = Sampler(num_bytes=101, sequence=10, seed=0)
    first, second = sampler.starts(sampler.windows), sampler.starts(sampler.windows)
    for epoch in (first, second):
        gaps = epoch.sort().values.diff()
        assert torch.equal(gaps, torch.full_like(gaps, 10))
        assert epoch.min() >= 0 and epoch.max() + 10 + 1 <= 101
    assert not torch.equal(first, second)


def test_steps_of_any_size_draw_the_same_sequence():
    whole = Sampler(500, 7, seed=3).starts(60)
    by_steps = Sampler(500, 7, seed=3)
    assert torch.equal(whole, torch.cat([by_steps.starts(n) for n in (1, 20, 39)]))


def test_a_sampler_goes_on_where_its_state_was_taken():
    sampler = Sampler(500, 7, seed=3)
    sampler.starts(45)
    resumed = Sampler(500, 7, seed=3)
    resumed.load_state(sampler.state())
    assert torch.equal(sampler.starts(100), resumed.starts(100))


@pytest.mark.parametrize(("num_bytes", "sequence", "seed"), [(501, 7, 3), (500, 8, 3), (500, 7, 4)])
def test_the_position_in_another_order_is_refused(num_bytes, sequence, seed):
    with pytest.raises(InputError, match="resume with the same --text, --sequence and --seed"):
        Sampler(num_bytes, sequence, seed).load_state(Sampler(500, 7, 3).state())


def test_the_shortest_text_has_one_window():
    sampler = Sampler(num_bytes=11, sequence=10, seed=0)
    assert sampler.windows == 1
    assert sampler.starts(3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("num_ranks", "accumulate"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 3), (3, 2)])
def test_micro_batches_of_all_ranks_are_the_global_batch(num_ranks, accumulate):
    starts = torch.arange(24)
    parts = [slice_of_rank(starts, rank, num_ranks, accumulate) for rank in range(num_ranks)]
    assert [[len(piece) for piece in part] for part in parts] == [[24 // num_ranks // accumulate] * accumulate] * (
        num_ranks
    )
    assert torch.equal(torch.cat([torch.cat(together) for together in zip(*parts, strict=True)]), starts)


def test_the_last_micro_batch_of_a_pipeline_may_be_smaller():
    of_both = [slice_of_rank(torch.arange(10), rank, 2, 3) for rank in range(2)]
    assert [[piece.tolist() for piece in part] for part in of_both] == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [6, 7], [9]],
    ]
    assert [len(slice_of_rank(torch.arange(2), 0, 1, 8)), len(slice_of_rank(torch.arange(2), 1, 2, 8))] == [2, 1]


def test_the_targets_are_the_tokens_one_byte_later():
    tokens, targets = windows_at(torch.arange(20, dtype=torch.uint8), torch.tensor([0, 7]), 4)
    assert tokens.tolist() == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert targets.tolist() == [[1, 2, 3, 4], [8, 9, 10, 11]]
