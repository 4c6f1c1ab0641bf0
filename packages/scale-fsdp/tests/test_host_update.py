"""host_update.py: buckets, and one update of parameters with state on the host and on the device."""

from __future__ import annotations

from typing import Any

import offload_cases as cases
import pytest
import torch
from torch import nn

from scale_fsdp.offload import host_update as offload_update
from scale_fsdp.offload.host_kernel import HostKernel
from scale_fsdp.offload.host_update import OffloadUpdate, buckets
from scale_fsdp.offload.placement import StatePart


def parts_with_grads(sizes: list[int], group: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[StatePart]:
    parts = []
    for size in sizes:
        param = nn.Parameter(torch.ones(size, dtype=dtype))
        param.grad = torch.full((size,), 0.5, dtype=dtype)
        parts.append(StatePart(param, group, 0, size, on_host=True, divisible=True))
    return parts


def shape_of(parts: list[StatePart]) -> list[list[tuple[int, int, int]]]:
    return [[(parts.index(s.part), s.start, s.stop) for s in bucket] for bucket in buckets(parts)]


def test_buckets_join_small_parts_and_divide_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_update, "CHUNK_ELEMENTS", 100)
    parts = parts_with_grads([30, 40, 50, 250, 0], {})
    assert shape_of(parts) == [
        [(0, 0, 30), (1, 0, 40)],
        [(2, 0, 50)],
        [(3, 0, 100)],
        [(3, 100, 200)],
        [(3, 200, 250), (4, 0, 0)],
    ]


def test_a_bucket_is_of_one_group_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = {"lr": 1.0}, {"lr": 1.0}
    parts = [
        *parts_with_grads([3, 4], one),
        *parts_with_grads([5], other),
        *parts_with_grads([6], other, torch.float64),
    ]
    assert shape_of(parts) == [[(0, 0, 3), (1, 0, 4)], [(2, 0, 5)], [(3, 0, 6)]]


def test_what_can_not_be_divided_is_one_piece_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_update, "CHUNK_ELEMENTS", 10)
    (part,) = parts_with_grads([25], {})
    part.divisible = False
    assert shape_of([part]) == [[(0, 0, 25)]]


@pytest.mark.parametrize("away", [False, True])
def test_each_part_is_updated_once_where_it_stands(away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.small_pieces(monkeypatch, 128)
    if away:
        cases.let_parameters_be_away(monkeypatch)
    update = OffloadUpdate(torch.optim.SGD, {"lr": 1.0})
    group = dict(update.device_optimizer.defaults)
    on_host, on_device = parts_with_grads([300, 5], group), parts_with_grads([7], {**group, "lr": 2.0})
    on_device[0].on_host = False
    update.run([*on_host, *on_device], {}, factor=0.5)
    assert [set(part.param.tolist()) for part in (*on_host, *on_device)] == [{0.75}, {0.75}, {0.5}]


def test_a_slot_comes_back_though_the_update_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.let_parameters_be_away(monkeypatch)
    update = OffloadUpdate(torch.optim.SGD, {"lr": 1.0})
    parts = parts_with_grads([5], dict(update.device_optimizer.defaults))
    for _ in range(5):  # More often than there are slots.
        (bucket,) = buckets(parts)
        load = update.fetch(bucket, {})
        load.chunks.clear()
        with pytest.raises(IndexError):
            update.finish_bucket(load)
    update.run(parts, {}, 1.0)
    assert parts[0].param.tolist() == [0.5] * 5


def test_a_step_that_fails_leaves_every_slot_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.small_pieces(monkeypatch, 64)
    cases.let_parameters_be_away(monkeypatch)
    update = OffloadUpdate(torch.optim.SGD, {"lr": 1.0})
    parts = parts_with_grads([200, 200], dict(update.device_optimizer.defaults))
    original = HostKernel.step

    def fail(self: HostKernel, *args: Any) -> None:
        raise ArithmeticError("here")

    monkeypatch.setattr(HostKernel, "step", fail)
    for _ in range(4):
        with pytest.raises(ArithmeticError):
            update.run(parts, {}, 1.0)
    monkeypatch.setattr(HostKernel, "step", original)
    update.run(parts, {}, 1.0)
    assert {tuple(set(part.param.tolist())) for part in parts} == {(0.5,)}
