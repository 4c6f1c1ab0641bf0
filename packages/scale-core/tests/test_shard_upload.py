"""host_staged.py: a shard on its way from the host, cast where it arrives, and when it may be written to again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import scale_core.flat.host_staged
from scale_core.comm.group import Group
from scale_core.device.streams import Stream, copy_over
from scale_core.flat import storage
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DevicePolicy, DtypePolicy
from scale_core.flat.host_staged import HostToDeviceCopy
from scale_core.flat.layout import FlatLayout
from scale_core.flat.live_buffers import wait_sent

HOST, NEAR = torch.device("cpu"), torch.device("cpu", 0)
"""The host under two names: what compares them takes the second for another device, and has real memory on it."""


class Told(Stream):
    """A stream that writes down what it is asked for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def run(self, *, after_caller: bool = True) -> AbstractContextManager[object]:
        self.log.append(f"{self.name}: run")
        return nullcontext()

    def record(self) -> Any:
        self.log.append(f"{self.name}: record")
        return self

    def synchronize(self) -> None:
        self.log.append(f"{self.name}: waited for")

    def join(self) -> None:
        self.log.append(f"{self.name}: join")


@contextmanager
def told_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    log: list[str] = []
    monkeypatch.setattr(storage, "copy_stream", lambda device, what: Told(log, what))
    yield log


class Sizes(TorchDispatchMode):
    """The largest tensor that an operation has made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::empty", "aten::_to_copy", "aten::clone", "aten::empty_like"):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("size", [0, 1, 7, 8, 29])
@pytest.mark.parametrize(
    "source, target", [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)]
)
def test_it_is_cast_where_it_arrives_in_small_pieces(
    size: int, source: torch.dtype, target: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_core.flat.host_staged, "PIECE_ELEMENTS", 8)
    shard = (torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e3).to(source)
    arrived = torch.zeros(size, dtype=target)
    with Sizes() as sizes:
        HostToDeviceCopy(Stream()).start(shard, arrived)
    assert torch.equal(arrived, shard.to(target))
    assert sizes.largest <= 8


def test_a_shard_is_written_to_after_the_last_copy_has_ended() -> None:
    log: list[str] = []
    sending, shard, target = HostToDeviceCopy(Told(log, "shards")), torch.ones(3), torch.zeros(3)
    sending.wait()
    sending.start(shard, target)
    sending.start(shard, target)
    assert log == ["shards: record"] * 2
    sending.wait()
    sending.wait()
    assert log[2:] == ["shards: waited for"]


def buffer_of(devices: DevicePolicy, dtype: torch.dtype | None = None) -> FlatBuffer:
    params = [torch.arange(6.0).view(2, 3).requires_grad_(), torch.ones(2).requires_grad_()]
    layout = FlatLayout.plan(["weight", "bias"], [(2, 3), (2,)], world_size=1)
    return FlatBuffer(["weight", "bias"], params, layout, Group(), DtypePolicy(dtype), devices=devices)


WRITES = {
    "load": lambda buffer: buffer.load(0, torch.zeros(2, 3)),
    "discard": lambda buffer: buffer.discard(),
    "all buffers at once": lambda buffer: wait_sent(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_shard_is_not_written_to_while_a_gather_reads_it(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with told_streams(monkeypatch) as log:
        buffer = buffer_of(DevicePolicy(shard=HOST, compute=NEAR))
        log.clear()
        buffer.gather()
        buffer.wait_gathered()
        assert log == ["shards: run", "shards: record", "shards: join"]  # The device waits for the copy, not the host.
        assert buffer.unsharded_params[0].tolist() == [[0, 1, 2], [3, 4, 5]]
        buffer.release()
        WRITES[write](buffer)
        assert log[3:] == ["shards: waited for"]


def test_what_is_seen_whole_in_between_is_read_by_a_copy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with told_streams(monkeypatch) as log:
        buffer = buffer_of(DevicePolicy(shard=HOST, compute=NEAR), torch.bfloat16)
        log.clear()
        whole, _ = buffer.gather_full_params()
        assert whole.dtype == torch.float32 and log == ["shards: run", "shards: record", "shards: join"]
        buffer.load(0, whole * 2)
        assert log[3:] == ["shards: waited for"] and buffer.pieces[0].tolist() == [[0, 2, 4], [6, 8, 10]]


def reduce(buffer: FlatBuffer) -> None:
    for index, whole in enumerate(buffer.unsharded_params):
        whole.grad = torch.full(whole.shape, 2.0, dtype=whole.dtype)
        buffer.gradient.accumulate(index)
    buffer.reduce()
    buffer.wait_reduced()


def test_gradients_have_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with told_streams(monkeypatch) as log:
        buffer = buffer_of(DevicePolicy(shard=HOST, compute=HOST, reduced=NEAR))
        reduce(buffer)
        assert log == ["gradients: run", "gradients: record"]
        assert all(param.grad is None for param in buffer.sharded_params)
        buffer.commit()
        assert log[2] == "gradients: waited for"
        assert [param.grad.tolist() for param in buffer.sharded_params if param.grad is not None] == [
            [[2] * 3] * 2,
            [2] * 2,
        ]


def test_where_nothing_moves_there_is_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with told_streams(monkeypatch) as log:
        buffer = buffer_of(DevicePolicy())
        buffer.gather()
        buffer.wait_gathered()
        reduce(buffer)
        buffer.commit()
        buffer.load(0, torch.zeros(2, 3))
        assert log == []


def test_a_copy_is_waited_for_by_the_side_that_receives_it() -> None:
    log: list[str] = []
    there = copy_over(torch.ones(3), torch.device("meta"), Told(log, "copies"))
    assert there.is_meta and there.shape == (3,) and log == ["copies: run", "copies: join"]
    source: Tensor = torch.ones(3)
    here = copy_over(source, HOST, Told(log, "copies"))
    assert log[2:] == ["copies: run", "copies: record", "copies: waited for"]
    source.zero_()
    assert here.tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_a_cast_shard_equals_that_of_the_host(dtype: torch.dtype) -> None:
    shard = torch.randn((1 << 25) + 5).pin_memory()
    device = torch.device("cuda", torch.cuda.current_device())
    stream = storage.copy_stream(device, "shards")
    target, sending = torch.empty(shard.shape, dtype=dtype, device=device), HostToDeviceCopy(stream)
    with stream.run():
        torch.cuda._sleep(1_000_000_000)  # About half a second.
        sending.start(shard, target)
    assert not sending._sent.query(), "the host goes on while the copy has not even begun"  # type: ignore[union-attr]
    sending.wait()
    assert torch.equal(target.cpu(), shard.to(dtype))
