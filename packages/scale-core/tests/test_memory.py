"""memory.py: the books of live storages."""

from __future__ import annotations

import pytest
import torch

from scale_core import compat
from scale_core.simulate.memory import Evidence, Memory, MemoryItem, MemoryTracker


def num_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def observe(books: MemoryTracker, tensor: torch.Tensor, kind: str = "activations") -> None:
    books.observe(tensor.untyped_storage(), kind)


def test_a_storage_counts_once_until_its_last_view_dies() -> None:
    books = MemoryTracker()
    tensor = num_bytes(100)
    view = tensor[10:20]
    for each in (tensor, view, tensor.view(10, 10)):
        observe(books, each)
    assert books.current_bytes == 100
    del tensor, each
    assert books.current_bytes == 100
    del view
    assert (books.current_bytes, books.peak_bytes) == (0, 100)


def test_the_peak_is_the_most_that_lived_together() -> None:
    books = MemoryTracker()
    first = num_bytes(30)
    observe(books, first)
    second = num_bytes(50)
    observe(books, second)
    del first
    third = num_bytes(20)
    observe(books, third)
    assert (books.current_bytes, books.peak_bytes) == (70, 80)
    del second, third


def test_what_is_learned_after_the_peak_counts_for_the_peak() -> None:
    books = MemoryTracker()
    weight, grad = num_bytes(10), num_bytes(20)
    observe(books, weight)
    observe(books, grad, "temporaries")
    passing = num_bytes(5)
    observe(books, passing)
    del passing
    books.claim(weight.untyped_storage(), "parameters", Evidence.OPTIMIZER)
    books.claim(grad.untyped_storage(), "gradients", Evidence.OPTIMIZER)
    del grad
    assert books.peak_by_kind() == {"gradients": 20, "parameters": 10, "activations": 5}
    assert books.current_by_kind() == {"parameters": 10}


def test_stronger_evidence_replaces_weaker_and_the_first_of_equals_stays() -> None:
    books = MemoryTracker()
    tensor = num_bytes(10)
    for kind, evidence, expected in [
        ("parameters", Evidence.MODULE, "parameters"),
        ("gathered", Evidence.TRAFFIC, "gathered"),
        ("reduction", Evidence.TRAFFIC, "gathered"),
        ("mine", Evidence.LABEL, "mine"),
        ("gradients", Evidence.OPTIMIZER, "mine"),
    ]:
        books.claim(tensor.untyped_storage(), kind, evidence)
        assert books.current_by_kind() == {expected: 10}


def test_a_storage_that_is_released_and_filled_again_is_a_gathered_one() -> None:
    books = MemoryTracker()
    tensor = num_bytes(100)
    storage = tensor.untyped_storage()
    observe(books, tensor)
    with compat.watching_resizes(lambda storage, before: books.resized(storage, before, "activations")):
        storage.resize_(0)
        assert books.current_bytes == 0
        assert books.observe(storage, "activations").released
        storage.resize_(40)
    assert not books.observe(storage, "activations").released
    assert books.current_by_kind() == {"gathered": 40}


def test_a_restart_keeps_what_lives_and_what_is_known_of_it() -> None:
    books = MemoryTracker()
    weight, passing = num_bytes(10), num_bytes(90)
    observe(books, weight)
    observe(books, passing)
    books.claim(weight.untyped_storage(), "parameters", Evidence.OPTIMIZER)
    del passing
    books.restart()
    assert (books.peak_bytes, books.peak_by_kind()) == (10, {"parameters": 10})
    other = num_bytes(7)
    observe(books, other)
    assert books.peak_by_kind() == {"parameters": 10, "activations": 7}
    del weight
    assert books.current_by_kind() == {"activations": 7}


def test_the_largest_at_the_peak_are_counted_together_where_they_are_alike() -> None:
    books = MemoryTracker()
    weights = [num_bytes(10) for _ in range(3)]
    for weight in weights:
        books.observe(weight.untyped_storage(), "activations", "aten::empty in forward")
        books.claim(weight.untyped_storage(), "parameters", Evidence.OPTIMIZER)
    passing = num_bytes(40)
    observe(books, passing, "temporaries")
    del passing
    assert books.largest_at_peak() == [
        MemoryItem("temporaries", "", 40, 1),
        MemoryItem("parameters", "aten::empty in forward", 10, 3),
    ]


def test_a_memory_learns_what_has_become_known_before_it_tells_kinds() -> None:
    books = MemoryTracker()
    weight = num_bytes(10)
    observe(books, weight)
    memory = Memory(books, lambda: books.claim(weight.untyped_storage(), "parameters", Evidence.OPTIMIZER))
    assert (memory.current_bytes, memory.peak_bytes) == (10, 10)
    assert books.current_by_kind() == {"activations": 10}
    assert memory.current_by_kind == memory.peak_by_kind == {"parameters": 10}
    assert memory.largest_at_peak == [MemoryItem("parameters", "", 10, 1)]


def test_closed_books_stay_as_they_are() -> None:
    books = MemoryTracker()
    tensor = num_bytes(10)
    observe(books, tensor)
    books.close()
    del tensor
    assert (books.current_bytes, books.current_by_kind()) == (10, {"activations": 10})


@pytest.mark.parametrize("evidence", list(Evidence))
def test_kinds_add_up_to_the_total_whatever_is_claimed(evidence: Evidence) -> None:
    books = MemoryTracker()
    tensors = [num_bytes(size) for size in (3, 5, 7, 11)]
    for tensor in tensors:
        observe(books, tensor)
    for tensor in tensors[::2]:
        books.claim(tensor.untyped_storage(), "some", evidence)
    tensors.pop()
    del tensor
    assert sum(books.peak_by_kind().values()) == books.peak_bytes == 26
    assert sum(books.current_by_kind().values()) == books.current_bytes == 15
