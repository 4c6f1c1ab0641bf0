"""streams.py: the verbs are the same on CPU and on CUDA."""

from __future__ import annotations

import pytest
import torch

from scale_core.streams import CudaStream, HostStream, copy_to, stream_for


def use_every_verb(device: torch.device) -> torch.Tensor:
    stream = stream_for(device)
    source = torch.arange(1 << 16, dtype=torch.float32, device=device)
    with stream.run():
        doubled = source * 2
    stream.record().synchronize()
    stream.join()
    return doubled


def test_the_host_s_stand_in_has_every_verb() -> None:
    assert isinstance(stream_for(torch.device("cpu")), HostStream)
    assert use_every_verb(torch.device("cpu"))[-1].item() == 2 * ((1 << 16) - 1)


def test_a_copy_is_never_shared_with_its_source() -> None:
    source = torch.ones(3, dtype=torch.bfloat16)
    stream = stream_for(source.device)
    copy = copy_to(source, source.device, stream)
    stream.record().synchronize()
    source.zero_()
    assert copy.tolist() == [1, 1, 1] and copy.dtype == torch.bfloat16


@pytest.mark.gpu
def test_a_side_stream_on_cuda_has_every_verb() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert isinstance(stream_for(device), CudaStream)
    assert use_every_verb(device)[-1].item() == 2 * ((1 << 16) - 1)


@pytest.mark.gpu
def test_a_copy_from_cuda_is_pinned_and_whole_after_its_event() -> None:
    source = torch.arange(1 << 20, device="cuda")
    stream = stream_for(source.device)
    copy = copy_to(source, torch.device("cpu"), stream)
    stream.record().synchronize()
    assert copy.is_pinned()
    assert torch.equal(copy, torch.arange(1 << 20))
