"""collectives.py: every rank's record and words, in order, and an error where ranks bring what does not fit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from scale_core.comm.collectives import exchange, exchange_text
from scale_core.comm.group import Group, group_of
from scale_core.errors import TransferError


@pytest.mark.ranks(2)
def test_the_default_device_does_not_matter() -> None:
    """As around a model that is built without memory: records are for the host, whatever the default is."""
    group = group_of()
    with torch.device("meta"):
        assert exchange([group.rank, 7], group) == [[rank, 7] for rank in range(group.size)]
    torch.set_default_device("meta")
    try:
        assert exchange_text("a word", group) == ["a word"] * group.size
    finally:
        torch.set_default_device(None)


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_records_and_words_of_all_ranks_arrive_in_order(num_ranks: int) -> None:
    group = group_of()
    largest, everyone = (1 << 63) - 1, range(group.size)
    assert exchange([group.rank, -group.rank, largest], group) == [[rank, -rank, largest] for rank in everyone]
    assert exchange([], group) == [[] for _ in everyone]
    texts = ["", "größer als 8 Bytes: 🦕", "x" * 1000, "a lone \udcff surrogate"][: group.size]
    assert exchange_text(texts[group.rank], group) == texts
    assert exchange_text("", group) == [""] * group.size


@pytest.mark.ranks(2)
def test_records_of_different_lengths_are_an_error_and_no_abort() -> None:
    group = group_of()
    with pytest.raises(TransferError) as caught:
        exchange([1] if group.rank == 0 else [1, 2, 3], group, limit_seconds=1.0)
    message = str(caught.value)
    assert message.startswith("exchange with rank ")


@pytest.mark.ranks(4)
def test_no_rank_waits_for_one_that_has_failed_in_an_earlier_round() -> None:
    """Rank 0 waits for rank 1, which gives up. Rank 3 comes later: it would wait for rank 0, which is elsewhere."""
    group, store = group_of(), dist.distributed_c10d._get_default_store()
    exchange([], group)
    if group.rank == 3:
        store.wait(["0 has failed"])
    with pytest.raises(TransferError) as caught:
        exchange([group.rank] * (2 if group.rank == 1 else 1), group, limit_seconds=1.0 if group.rank == 1 else 30.0)
    store.set(f"{group.rank} has failed", "")
    assert group.rank == 1 or "has closed the connection" in str(caught.value)


def test_a_record_of_more_than_a_million_integers_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1048576 integers, got 1048577"):
        exchange(range((1 << 20) + 1), Group())
