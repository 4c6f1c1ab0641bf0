"""memory.py: the bytes of live storages."""

from __future__ import annotations

from array import array

import pytest
import torch

from scale_check.simulate.memory import Evidence, Memory, MemoryItem, MemoryTracker
from scale_core import compat


def num_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def observe(tracker: MemoryTracker, tensor: torch.Tensor, kind: str = "activations") -> None:
    tracker.observe(tensor.untyped_storage(), kind)


def test_a_storage_counts_once_until_its_last_view_dies() -> None:
    tracker = MemoryTracker()
    tensor = num_bytes(100)
    view = tensor[10:20]
    for each in (tensor, view, tensor.view(10, 10)):
        observe(tracker, each)
    assert tracker.current_bytes == 100
    del tensor, each
    assert tracker.current_bytes == 100
    del view
    assert (tracker.current_bytes, tracker.peak_bytes) == (0, 100)


def test_the_peak_is_the_most_that_lived_together() -> None:
    tracker = MemoryTracker()
    first = num_bytes(30)
    observe(tracker, first)
    second = num_bytes(50)
    observe(tracker, second)
    del first
    third = num_bytes(20)
    observe(tracker, third)
    assert (tracker.current_bytes, tracker.peak_bytes) == (70, 80)
    del second, third


def test_what_is_learned_after_the_peak_counts_for_the_peak() -> None:
    tracker = MemoryTracker()
    weight, grad = num_bytes(10), num_bytes(20)
    observe(tracker, weight)
    observe(tracker, grad, "temporaries")
    passing = num_bytes(5)
    observe(tracker, passing)
    del passing
    tracker.claim(weight.untyped_storage(), "parameters", Evidence.OPTIMIZER)
    tracker.claim(grad.untyped_storage(), "gradients", Evidence.OPTIMIZER)
    del grad
    assert tracker.peak_by_kind() == {"gradients": 20, "parameters": 10, "activations": 5}
    assert tracker.current_by_kind() == {"parameters": 10}


def test_stronger_evidence_replaces_weaker() -> None:
    tracker = MemoryTracker()
    tensor = num_bytes(10)
    for kind, evidence, expected in [
        ("parameters", Evidence.MODULE, "parameters"),
        ("gathered", Evidence.TRAFFIC, "gathered"),
        ("reduction", Evidence.TRAFFIC, "gathered"),
        ("mine", Evidence.LABEL, "mine"),
        ("gradients", Evidence.OPTIMIZER, "mine"),
    ]:
        tracker.claim(tensor.untyped_storage(), kind, evidence)
        assert tracker.current_by_kind() == {expected: 10}


def test_a_storage_released_and_filled_again_is_gathered() -> None:
    tracker = MemoryTracker()
    tensor = num_bytes(100)
    storage = tensor.untyped_storage()
    observe(tracker, tensor)
    with compat.watching_resizes(lambda storage, before: tracker.resized(storage, before, "activations")):
        storage.resize_(0)
        assert tracker.current_bytes == 0
        assert tracker.observe(storage, "activations").released
        storage.resize_(40)
    assert not tracker.observe(storage, "activations").released
    assert tracker.current_by_kind() == {"gathered": 40}


def test_a_restart_keeps_what_lives_and_what_is_known_of_it() -> None:
    tracker = MemoryTracker()
    weight, passing = num_bytes(10), num_bytes(90)
    observe(tracker, weight)
    observe(tracker, passing)
    tracker.claim(weight.untyped_storage(), "parameters", Evidence.OPTIMIZER)
    del passing
    tracker.restart()
    assert (tracker.peak_bytes, tracker.peak_by_kind()) == (10, {"parameters": 10})
    other = num_bytes(7)
    observe(tracker, other)
    assert tracker.peak_by_kind() == {"parameters": 10, "activations": 7}
    del weight
    assert tracker.current_by_kind() == {"activations": 7}


def test_the_largest_at_the_peak_are_counted_together() -> None:
    tracker = MemoryTracker()
    weights = [num_bytes(10) for _ in range(3)]
    for weight in weights:
        tracker.observe(weight.untyped_storage(), "activations", "aten::empty in forward")
        tracker.claim(weight.untyped_storage(), "parameters", Evidence.OPTIMIZER)
    passing = num_bytes(40)
    observe(tracker, passing, "temporaries")
    del passing
    assert tracker.largest_at_peak() == [
        MemoryItem("temporaries", "", 40, 1),
        MemoryItem("parameters", "aten::empty in forward", 10, 3),
    ]


def test_a_memory_learns_the_kinds_before_it_reports() -> None:
    tracker = MemoryTracker()
    weight = num_bytes(10)
    observe(tracker, weight)
    memory = Memory(tracker, lambda: tracker.claim(weight.untyped_storage(), "parameters", Evidence.OPTIMIZER))
    assert (memory.current_bytes, memory.peak_bytes) == (10, 10)
    assert tracker.current_by_kind() == {"activations": 10}
    assert memory.current_by_kind == memory.peak_by_kind == {"parameters": 10}
    assert memory.largest_at_peak == [MemoryItem("parameters", "", 10, 1)]


class EndingArray(array):
    """An array that ends tensors when a number is appended, as a garbage collection may."""

    tensors: list[torch.Tensor]

    def append(self, number: int) -> None:
        super().append(number)
        self.tensors.clear()


def test_storages_that_end_in_the_middle_of_a_change_are_booked_after_it() -> None:
    tracker = MemoryTracker()
    tensors = [num_bytes(1) for _ in range(2000)]  # More than Python's limit of calls inside of calls.
    for tensor in tensors:
        observe(tracker, tensor)
    del tensor
    EndingArray.tensors, tracker._changed = tensors, EndingArray("q", tracker._changed)
    other = num_bytes(50)
    observe(tracker, other, "other")
    assert (tracker.current_by_kind(), tracker.current_bytes) == ({"other": 50}, 50)
    assert (tracker.peak_by_kind(), tracker.peak_bytes) == ({"activations": 2000, "other": 50}, 2050)


def test_a_storage_that_ends_in_the_middle_of_a_restart_is_booked_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = MemoryTracker()
    tensors, kept = [num_bytes(30)], num_bytes(50)
    for kind, tensor in (("first", tensors[0]), ("kept", kept)):
        observe(tracker, tensor, kind)
    del tensor
    EndingArray.tensors = tensors
    monkeypatch.setattr("scale_check.simulate.memory.array", EndingArray)
    tracker.restart()
    assert (tracker.current_by_kind(), tracker.peak_by_kind()) == ({"kept": 50}, {"kept": 50, "first": 30})


def test_a_tracker_that_was_closed_stays_as_it_is() -> None:
    tracker = MemoryTracker()
    tensor = num_bytes(10)
    observe(tracker, tensor)
    tracker.close()
    del tensor
    assert (tracker.current_bytes, tracker.current_by_kind()) == (10, {"activations": 10})


@pytest.mark.parametrize("evidence", list(Evidence))
def test_kinds_add_up_to_the_total_whatever_is_claimed(evidence: Evidence) -> None:
    tracker = MemoryTracker()
    tensors = [num_bytes(size) for size in (3, 5, 7, 11)]
    for tensor in tensors:
        observe(tracker, tensor)
    for tensor in tensors[::2]:
        tracker.claim(tensor.untyped_storage(), "some", evidence)
    tensors.pop()
    del tensor
    assert sum(tracker.peak_by_kind().values()) == tracker.peak_bytes == 26
    assert sum(tracker.current_by_kind().values()) == tracker.current_bytes == 15
