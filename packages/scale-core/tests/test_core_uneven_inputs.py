"""uneven_inputs.py: all ranks stay in the loop until the last of them has no more batches."""

from __future__ import annotations

import pytest
from rank_values import by_rank

from scale_core.comm.group import Group, group_of
from scale_core.uneven_inputs import LossShare, current_share, join


@pytest.mark.ranks(3)
@pytest.mark.fault(20)
def test_a_rank_without_data_gets_its_last_batch_again() -> None:
    """What this rank sees: each batch, whether it counts, and what its gradients count."""
    lengths = [1, 3, 2]
    rank = group_of().rank
    joined = join([f"{rank}{number}" for number in range(lengths[rank])])
    seen = [(batch, joined.active, current_share()) for batch in joined]
    assert current_share() is None
    first, second, third = by_rank(seen)
    assert first == [("00", True, None), ("00", False, LossShare(0.0, 2)), ("00", False, LossShare(0.0, 1))]
    assert second == [("10", True, None), ("11", True, LossShare(1.0, 2)), ("12", True, LossShare(1.0, 1))]
    assert third == [("20", True, None), ("21", True, LossShare(1.0, 2)), ("21", False, LossShare(0.0, 1))]


@pytest.mark.ranks(2)
def test_ranks_can_count_by_their_samples() -> None:
    batches = [[1, 2], [3]] if group_of().rank else [[1, 2], [3, 4], [5, 6]]
    shares = []
    for _ in join(batches, samples=len):
        share = current_share()
        assert share is not None
        shares.append((share.weight, share.divisor))
    first, second = by_rank(shares)
    assert first == [(0.5, 1), (2 / 3, 1), (1.0, 1)]
    assert second == [(0.5, 1), (1 / 3, 1), (0.0, 1)]


@pytest.mark.ranks(2)
def test_nothing_is_left_behind_where_the_loop_is_left_early() -> None:
    for number, _ in enumerate(join([1, 2, 3] if group_of().rank else [1])):
        if number == 1:
            assert current_share() == LossShare(float(group_of().rank), 1)
            break
    assert current_share() is None


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize(
    "num_ranks, lengths, size, words",
    [
        (3, [1, 0, 0], 2, "no batch at all on ranks 1, 2 of 3"),
        (2, [1, 1], 0, r"expected every batch to have a sample, got \[0, 0\], by rank"),
    ],
)
def test_a_rank_without_samples_is_named_on_all(num_ranks: int, lengths: list[int], size: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"join: .*{words}"):
        for _ in join([[0] * size] * lengths[group_of().rank], samples=len):
            pass


@pytest.mark.ranks(2)
def test_a_loader_that_fails_on_one_rank_ends_the_loop_on_all() -> None:
    def batches():  # type: ignore[no-untyped-def]
        yield 1
        if group_of().rank == 1:
            raise OSError("no such file")
        yield 2

    with pytest.raises(OSError if group_of().rank == 1 else RuntimeError) as caught:
        for _ in join(batches()):
            pass
    assert current_share() is None
    first, second = by_rank(str(caught.value))
    assert "rank 1 could not get its next batch" in first and second == "no such file"


def test_in_a_world_of_one_it_is_the_loop_itself() -> None:
    joined = join(iter("abc"), Group())
    assert [(batch, joined.active, current_share()) for batch in joined] == [(c, True, None) for c in "abc"]
    assert not list(join([], Group()))
