"""One rank of a pipeline in a simulation: what its peers would send has the sizes of this rank's own micro-batches.

A header is that of a peer that sends the same sizes as before. So the first message of a slot, which describes its
tensors, is not tried here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_core.tree import tensors_in
from scale_pipe.distributed import program
from scale_pipe.distributed.p2p import MessageKind, P2PChannel, PayloadMeta
from scale_pipe.distributed.stage import pack
from scale_pipe.distributed.step import StepLoop, StepStatus

STRUCTURE, _ = pack(torch.empty(0))


class Header:
    """The header of a peer that sends what it has sent before."""

    def __init__(self, kind: int, num_samples: int, num_chunks: int) -> None:
        self._values = [MessageKind.SAME_META, 0, num_samples // num_chunks, num_samples, num_chunks, kind]

    def __getitem__(self, _: slice) -> Header:
        return self

    def view(self, _: torch.dtype) -> Header:
        return self

    def tolist(self) -> list[int]:
        return self._values


class HostTransport:
    """Moves nothing on the host, at once."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> HostTransport:
        return self

    recv = send

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


def simulate_peers(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, batch_shape: Sequence[int], num_chunks: int
) -> None:
    """Has a `DistributedPipe` run without its peers; `batch_shape` is that of all tensors between stages."""
    num_samples, *sizes = batch_shape

    class SimulatedChannel(P2PChannel):
        """Tensors of the device go over the communicator of each pair of ranks, as over NCCL."""

        _host: Any = HostTransport()

        def set_device(self, device: torch.device) -> None:
            super().set_device(device)
            self.matches_by_order = self._on_device = device.type != "cpu"

        def post_receive(self, slot: Any, peer: int) -> None:
            super().post_receive(slot, peer)
            memory: Any = Header(self.pass_kind, num_samples, num_chunks)
            requires_grad = "gradient" not in str(slot)
            received = torch.empty(num_samples // num_chunks, *sizes, device="meta", requires_grad=requires_grad)
            self._metas[slot] = PayloadMeta.of(STRUCTURE, [received])
            self._posted[slot] = self._posted[slot]._replace(memory=memory)

    def status_of_all(loop: StepLoop, runtime: Any, steps_after_all: bool, device: torch.device) -> StepStatus:
        """What all ranks would hear of each other if none has failed; the host waits for losses where they are."""
        assert runtime.failure is None, runtime.failure
        for loss in tensors_in(runtime.losses):
            loss.cpu()
        measured = list(range(num_ranks)) if runtime.grads.is_measured else []
        return StepStatus([], torch.zeros((), device=device), measured, True, False, [0] * num_ranks)

    monkeypatch.setattr(program, "P2PChannel", SimulatedChannel)
    monkeypatch.setattr(StepLoop, "_exchange_status", status_of_all)
    monkeypatch.setattr(StepLoop, "_compare_steps", lambda *_: None)
    monkeypatch.setattr(nn.Module, "to", lambda module, _: module)  # Stages are made there; torch moves no fake ones.
