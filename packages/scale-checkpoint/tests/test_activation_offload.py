"""Saved tensors that leave: which do, once each, in which order they come back, and that they are as they were."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import checkpoint_wrapper, offload_activations
from scale_checkpoint.live import LiveBytes
from scale_checkpoint.offload import Store, packing
from scale_checkpoint.places import Away, Host
from scale_checkpoint_cases import differing


class Watched(Host):
    """The host, and a record of what goes and comes, by number."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_put = 0

    def put(self, source: Tensor) -> Away:
        number, self.num_put = self.num_put, self.num_put + 1
        self.events.append(f"out {number}")
        away = super().put(source)
        plain = away.into

        def into(target: Tensor) -> Any:
            self.events.append(f"back {number}")
            return plain(target)

        away.into = into  # type: ignore[method-assign]
        return away


def test_all_that_is_packed_comes_back_as_it_was() -> None:
    store = Store(Host())
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


def test_a_storage_leaves_once_however_many_views_of_it_are_saved() -> None:
    place = Watched()
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
    place = Watched()
    store = Store(place)
    packed = [store.pack(torch.full((4,), float(i))) for i in range(4)]
    place.events.clear()
    del packed[1]  # Whose graph is gone is not fetched, nor does it stop what comes after it.
    found = []
    while packed:
        found.append(packed.pop().unpack()[0].item())
    assert found == [3.0, 2.0, 0.0]
    assert place.events == ["back 3", "back 2", "back 0"]
    first, second = store.pack(torch.ones(4)), store.pack(torch.ones(4))
    place.events.clear()
    second.unpack()
    assert place.events == ["back 5", "back 4"], "the one before is on its way"
    first.unpack()
    assert place.events == ["back 5", "back 4"]


def test_what_stays_where_it_is() -> None:
    layer = nn.Linear(64, 64)
    pack = packing([layer], "host", 1000)
    large = torch.randn(64, 64)
    stays = {
        "a parameter": layer.weight,
        "a view of a parameter": layer.weight.t(),
        "small": torch.randn(8),
        "a piece of something large": large[0],
        "sparse": large.to_sparse(),
        "meta": torch.empty(64, 64, device="meta"),
        "conjugated": torch.randn(64, 64, dtype=torch.complex64).conj(),
    }
    assert {name for name, tensor in stays.items() if not isinstance(pack(tensor), Tensor)} == set()
    assert not isinstance(pack(large), Tensor)


def test_the_context_frees_the_device_and_changes_nothing() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Softmax(-1))
    ours = copy.deepcopy(plain)
    x = torch.randn(128, 64)
    kept = {}
    for name, model in {"plain": plain, "ours": ours}.items():
        with LiveBytes(torch.device("cpu")) as live:
            if name == "ours":
                with offload_activations(model, min_bytes=1):
                    loss = model(x).square().sum()
            else:
                loss = model(x).square().sum()
            kept[name] = live.current_bytes
        live.close()
        loss.backward()
    assert differing([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()]) == []
    assert kept["ours"] < 100 < 100_000 < kept["plain"]


def test_boundary_inputs_of_checkpointed_modules_leave_too() -> None:
    x = torch.randn(128, 64, requires_grad=True)
    kept = []
    for offload in (False, True):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        for block in model:
            checkpoint_wrapper(block, offload_to_cpu=offload, min_bytes=1)
        with LiveBytes(torch.device("cpu")) as live:
            loss = model(x * 1).sum()
            kept.append(live.current_bytes)
        live.close()
        loss.backward()
    assert kept[0] >= 4 * x.nbytes and kept[1] < x.nbytes


def test_the_host_memory_is_free_after_the_backward_and_when_a_graph_is_dropped() -> None:
    gc.collect()
    store = Store(Host())
    packed = [store.pack(torch.randn(1000)) for _ in range(3)]
    packed[2].unpack()
    assert packed[1]._gone.is_fetched
    gone = packed[1]._gone
    del packed
    assert not gone.is_fetched
    del gone
    assert store._known == {} and store._last is None


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r'offload_to: expected "host" or the path of a folder, got \'disk\''):
        offload_activations(to="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_bytes: expected 0 or more, got -1"):
        offload_activations(min_bytes=-1)
