"""What has left: once each, in which order it comes back, as it was, and that nothing of it remains."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_checkpoint.offload.storage import HostMemory, StoredBytes
from scale_checkpoint.offload.store import Store


class RecordedHostMemory(HostMemory):
    """The host, and a record of what goes and comes, by number."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_put = 0

    def put(self, source: Tensor) -> StoredBytes:
        number, self.num_put = self.num_put, self.num_put + 1
        self.events.append(f"out {number}")
        stored = super().put(source)
        plain = stored.copy_to

        def copy_to(target: Tensor) -> Any:
            self.events.append(f"back {number}")
            return plain(target)

        stored.copy_to = copy_to  # type: ignore[method-assign]
        return stored


def test_all_that_is_packed_comes_back_as_it_was() -> None:
    store = Store(HostMemory())
    base = torch.arange(24.0).reshape(2, 3, 4)
    views = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "a slice": base[:, 1:],
        "expanded": torch.arange(3.0)[:, None].expand(3, 5),
        "other bits": base.view(torch.int32),
        "bytes": torch.arange(7, dtype=torch.uint8)[1:],
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "complex": torch.view_as_complex(base.reshape(12, 2)),
    }
    packed = {name: store.pack(view) for name, view in views.items()}
    for name, view in views.items():
        back = packed[name].unpack()
        assert torch.equal(back, view) and back.stride() == view.stride() and back.dtype == view.dtype, name
        assert back.untyped_storage()._cdata != view.untyped_storage()._cdata


def test_a_storage_leaves_once_for_all_its_saved_views() -> None:
    place = RecordedHostMemory()
    store = Store(place)
    base = torch.arange(12.0)
    packed = [store.pack(base[:6]), store.pack(base[6:]), store.pack(base.view(3, 4))]
    assert place.events == ["out 0"]
    assert [tensor.unpack().sum().item() for tensor in packed] == [15.0, 51.0, 66.0]
    assert place.events == ["out 0", "back 0"]
    assert packed[0].unpack().sum() == 15.0, "a graph that is retained comes back to it"
    # What was changed in place is something else, and so is a storage that got the number of one that is gone.
    later = store.pack(base.add_(1)[:6])
    assert place.events[-1] == "out 1" and later.unpack().sum() == 21.0
    for _ in range(20):
        fresh = torch.rand(12)
        assert torch.equal(store.pack(fresh).unpack(), fresh)


def test_the_backward_fetches_one_ahead_in_reverse_order() -> None:
    place = RecordedHostMemory()
    store = Store(place)
    packed = [store.pack(torch.full((4,), float(i))) for i in range(4)]
    place.events.clear()
    del packed[1]  # Whose graph is gone is not fetched, nor does it stop what comes after it.
    found = []
    while packed:
        found.append(packed.pop().unpack()[0].item())
    assert found == [3.0, 2.0, 0.0]
    assert place.events == ["back 3", "back 2", "back 0"]
    first, second, third = (store.pack(torch.ones(4)) for _ in range(3))
    place.events.clear()
    third.unpack()
    assert place.events == ["back 6", "back 5"], "the one before is on its way, and no other"
    second.unpack()
    first.unpack()
    assert place.events == ["back 6", "back 5", "back 4"]


def test_only_a_view_whose_storage_others_need_is_copied() -> None:
    """With `alone`, the last view takes the fetched memory, and the views before it get copies."""
    store, base = Store(HostMemory()), torch.arange(6.0)
    packed = [store.pack(base[:3]), store.pack(base[3:])]
    first = packed[0].unpack(alone=True)
    first.fill_(7.0)
    assert packed[1].unpack(alone=True).tolist() == [3.0, 4.0, 5.0]
    last = store.pack(torch.ones(4))
    last.fetch()
    assert last._storage._fetched is not None
    fetched = last._storage._fetched[0].data_ptr()
    assert last.unpack(alone=True).data_ptr() == fetched


class Underway:
    """The event of a copy that takes a while."""

    def __init__(self) -> None:
        self.has_arrived, self.num_queries = False, 0

    def query(self) -> bool:
        self.num_queries += 1
        assert self.num_queries < 10, "nobody asks for ever"
        return self.has_arrived


def test_a_source_must_stay_unchanged_until_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event, place = Underway(), RecordedHostMemory()
    plain = place.put

    def put(source: Tensor) -> StoredBytes:
        stored = plain(source)
        stored.copied = event  # type: ignore[assignment]
        return stored

    monkeypatch.setattr(place, "put", put)
    store = Store(place)
    packed = [store.pack(torch.ones(4))]
    assert len(store._in_flight) == 1 and store._in_flight_bytes == 16
    event.has_arrived = True
    packed.append(store.pack(torch.ones(4)))
    assert not store._in_flight and store._in_flight_bytes == 0
    event.has_arrived = False
    changing = torch.ones(4)
    packed.append(store.pack(changing))
    changing.add_(1)
    event.has_arrived = True
    with pytest.raises(RuntimeError, match=r"a tensor \[4\] that autograd has saved was changed in place while it was"):
        store.pack(torch.ones(4))


def test_host_memory_is_freed_by_backward_or_a_dropped_graph() -> None:
    gc.collect()
    store = Store(HostMemory())
    packed = [store.pack(torch.randn(1000)) for _ in range(3)]
    packed[2].unpack()
    assert packed[1]._storage.is_fetched
    storage = packed[1]._storage
    del packed
    assert not storage.is_fetched
    del storage
    assert store._known == {} and store._last is None
