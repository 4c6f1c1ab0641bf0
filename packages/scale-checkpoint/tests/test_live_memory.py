"""The count of live storages: each once, from the operator that makes it to its last reference."""

from __future__ import annotations

import torch

from scale_checkpoint.live_memory import LiveMemory, not_counted, storage_bytes

CPU = torch.device("cpu")


def test_a_storage_counts_once_until_its_last_reference_is_gone() -> None:
    before = torch.zeros(64)
    with LiveMemory(CPU) as live:
        a = torch.ones(100)
        assert live.current_bytes == live.num_bytes(live.storage_number(a)) == 400
        view = a[10:20].view(2, 5)
        b = a + 1
        assert live.current_bytes == 800, "a view is no memory of its own"
        shown = before[:3]
        before.add_(1)
        assert live.current_bytes == 800, "what was there before does not count"
        del a
        assert live.current_bytes == 800, "the view holds it"
        del view
        assert live.current_bytes == 400 and live.peak_bytes == 800
        del b, shown
        assert live.current_bytes == 0
    live.close()


def test_a_storage_that_is_resized_counts_with_its_new_size() -> None:
    with LiveMemory(CPU) as live:
        a = torch.zeros(10)
        a.resize_(30)
        assert live.current_bytes == live.peak_bytes == 120
    live.close()


def test_stand_ins_and_other_devices_do_not_count() -> None:
    with LiveMemory(CPU) as live:
        with not_counted():
            host = torch.zeros(100)
        other = torch.zeros(100, device="meta")
        assert live.current_bytes == 0
        copy = host.clone()
        assert live.current_bytes == copy.nbytes == 400
    live.close()
    del other


def test_tensors_without_a_storage_are_passed_over() -> None:
    with LiveMemory(CPU) as live:
        sparse = torch.eye(3).to_sparse()
        assert (sparse @ torch.ones(3, 1)).shape == (3, 1)
    live.close()
    assert storage_bytes([sparse, (dense := torch.zeros(4)), dense[:2]]) == 16
