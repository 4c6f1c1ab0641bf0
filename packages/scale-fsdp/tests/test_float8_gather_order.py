"""A gather in fp8 of a shard on the host: what a side stream copies is computed with after its copy has arrived."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_core.device.streams import Stream
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DevicePolicy
from scale_core.flat.host_staged import HostStagedTransport
from scale_core.flat.layout import FlatLayout
from scale_fsdp.transports import float8
from scale_fsdp.transports.policy import WirePolicy


class CastWeight:
    dtype = torch.float8_e4m3fn

    def scale(self, amax: Tensor) -> Tensor:
        return 448.0 / amax.clamp(min=1e-12)

    def cast(self, values: Tensor, scale: Tensor, out: Tensor) -> None:
        out.copy_((values * scale).clamp(-448, 448).to(self.dtype).view(torch.uint8))


class RecordingStream(Stream):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def run(self, *, after_caller: bool = True) -> AbstractContextManager[object]:
        @contextmanager
        def context() -> Iterator[None]:
            self.log.append("begin copy")
            yield
            self.log.append("end copy")

        return context()

    def join(self) -> None:
        self.log.append("join")


def logged(function: Any, name: str, log: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return function(*args, **kwargs)

    return call


def test_magnitudes_and_their_reduction_come_after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    with simulate(rank=0, world_size=4, device="sim", check=False):
        group = group_of()
        layout = FlatLayout.plan(["weight"], [(16, 16)], group.size)
        devices = DevicePolicy(shard=torch.device("cpu"), compute=torch.device("sim", 0))
        weights: Any = [CastWeight()]
        policy = WirePolicy(float8=weights)
        flat = FlatBuffer(["weight"], [torch.randn(16, 16)], layout, group, devices=devices, transport_policy=policy)
        assert isinstance(flat.transport, HostStagedTransport)
        flat.transport.copies.stream = RecordingStream(log)
        monkeypatch.setattr(torch.linalg, "vector_norm", logged(torch.linalg.vector_norm, "magnitude", log))
        monkeypatch.setattr(float8, "all_reduce", logged(float8.all_reduce, "all_reduce", log))
        flat.gather(tag=1 << 21)
        flat.wait_gathered(10.0)
        flat.release()
        flat.wait_sent()
    assert log[:5] == ["begin copy", "end copy", "join", "magnitude", "all_reduce"]
