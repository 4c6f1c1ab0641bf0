"""streams.py: the verbs are the same on CPU and on CUDA."""

from __future__ import annotations

import pytest
import torch

from scale_core.device.streams import (
    DeviceStream,
    InlineExecutor,
    Stream,
    copy_into,
    copy_to,
    host_memory,
    on_host,
    stream_for,
    tensor_on,
    worker_for,
)


def use_every_verb(device: torch.device) -> torch.Tensor:
    stream = stream_for(device)
    source = torch.arange(1 << 16, dtype=torch.float32, device=device)
    with stream.run():
        doubled = source * 2
    with stream.run(after_caller=False):
        doubled = doubled * 1
    stream.record().synchronize()
    stream.join()
    return doubled


def test_the_host_s_stand_in_has_every_verb() -> None:
    assert type(stream_for(torch.device("cpu"))) is Stream
    assert use_every_verb(torch.device("cpu"))[-1].item() == 2 * ((1 << 16) - 1)


def test_a_copy_is_never_shared_with_its_source() -> None:
    source = torch.ones(3, dtype=torch.bfloat16)
    stream = stream_for(source.device)
    copy = copy_to(source, source.device, stream)
    stream.record().synchronize()
    source.zero_()
    assert copy.tolist() == [1, 1, 1] and copy.dtype == torch.bfloat16


def test_the_host_s_worker_has_done_all_when_the_call_returns() -> None:
    worker, done = worker_for(torch.device("cpu")), list[int]()
    assert isinstance(worker, InlineExecutor)
    future = worker.submit(done.append, 3)
    assert done == [3] and future.done() and future.result() is None
    assert worker.submit(lambda x, *, y: x + y, 1, y=2).result() == 3


def test_what_the_host_s_worker_raises_comes_out_of_the_future() -> None:
    future = InlineExecutor().submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        future.result()


def test_the_host_reaches_what_is_on_it() -> None:
    assert on_host(torch.ones(2)) and not on_host(torch.ones(2, device="meta"))
    memory = host_memory(5, torch.bfloat16, torch.device("cpu"))
    assert on_host(memory) and memory.shape == (5,) and memory.dtype == torch.bfloat16 and not memory.is_pinned()


def test_a_copy_into_memory_converts_as_it_goes() -> None:
    memory = host_memory(3, torch.bfloat16, torch.device("cpu"))
    copy_into(memory, torch.tensor([1.0, 2.0, 3.0]))
    assert memory.tolist() == [1, 2, 3]


def test_numbers_for_a_device_are_made_on_the_host_first() -> None:
    with torch.device("meta"):
        numbers = tensor_on(torch.device("cpu"), [1, 2], torch.int32)
    assert numbers.tolist() == [1, 2] and numbers.dtype == torch.int32


@pytest.mark.gpu
def test_copies_into_pinned_memory_are_complete_after_streams() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source, stream = torch.arange(1 << 20, dtype=torch.float32, device=device), stream_for(device)
    memory = host_memory(1 << 20, torch.float32, device)
    with stream.run():
        copy_into(memory, source)
    stream.record().synchronize()
    with stream.run(after_caller=False):
        copy_into(source, memory.mul_(2))
    stream.join()
    assert source[-1].item() == 2 * ((1 << 20) - 1)


@pytest.mark.gpu
def test_memory_for_copies_from_cuda_is_pinned() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert host_memory(5, torch.float32, device).is_pinned() and not on_host(torch.ones(1, device=device))
    worker = worker_for(device)
    assert not isinstance(worker, InlineExecutor)
    assert worker.submit(lambda: torch.ones(3, device=device).sum().item()).result() == 3


@pytest.mark.gpu
def test_a_side_stream_on_cuda_has_every_verb() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert isinstance(stream_for(device), DeviceStream)
    assert use_every_verb(device)[-1].item() == 2 * ((1 << 16) - 1)


@pytest.mark.gpu
def test_a_copy_from_cuda_is_pinned_and_whole_after_its_event() -> None:
    source = torch.arange(1 << 20, device="cuda")
    stream = stream_for(source.device)
    copy = copy_to(source, torch.device("cpu"), stream)
    stream.record().synchronize()
    assert copy.is_pinned()
    assert torch.equal(copy, torch.arange(1 << 20))
