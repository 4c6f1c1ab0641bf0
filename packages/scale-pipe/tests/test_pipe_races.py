"""No schedule has a race: three steps of each rank on simulated streams.

The other ranks are not there: what they would send has the sizes that it has in this model, and a header is what it
would be for the same sizes as before. So the first message of a slot, which describes its tensors, is not tried here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from pipe_schedules import BUILDERS
from torch import Tensor, nn

from scale_check.simulate import simulate
from scale_core.tree import tensors_in
from scale_pipe import DistributedPipe
from scale_pipe.distributed import program
from scale_pipe.distributed.p2p.channel import MessageKind, P2PChannel, PayloadMeta
from scale_pipe.distributed.p2p.messages import pack
from scale_pipe.distributed.step_loop import StepLoop, StepStatus

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

RANKS, CHUNKS, SAMPLES, WIDTH, STEPS = 2, 4, 8, 16, 3
STRUCTURE, _ = pack(torch.empty(0))


class Header:
    """The header of a peer that sends what it has sent before."""

    def __init__(self, kind: int) -> None:
        self._values = [MessageKind.SAME_META, 0, SAMPLES // CHUNKS, SAMPLES, CHUNKS, kind]

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


class SimulatedChannel(P2PChannel):
    """Tensors of the device go over the communicator of each pair of ranks, as over NCCL."""

    _host: Any = HostTransport()

    def set_device(self, device: torch.device) -> None:
        super().set_device(device)
        self.matches_by_order = self._on_device = device.type != "cpu"

    def post_receive(self, slot: Any, peer: int) -> None:
        super().post_receive(slot, peer)
        memory: Any = Header(self.pass_kind)
        received = torch.empty(SAMPLES // CHUNKS, WIDTH, device="meta", requires_grad="gradient" not in str(slot))
        self._metas[slot] = PayloadMeta.of(STRUCTURE, [received])
        self._posted[slot] = self._posted[slot]._replace(memory=memory)


def status_of_all(loop: StepLoop, runtime: Any, steps_after_all: bool, device: torch.device) -> StepStatus:
    """What all ranks would hear of each other if none has failed; the host waits for losses where they are."""
    assert runtime.failure is None, runtime.failure
    for loss in tensors_in(runtime.losses):
        loss.cpu()
    return StepStatus([], torch.zeros((), device=device), [], True, False, [0] * RANKS)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", BUILDERS)
def test_three_steps_of_a_schedule_have_no_race(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "P2PChannel", SimulatedChannel)
    monkeypatch.setattr(StepLoop, "_exchange_status", status_of_all)
    monkeypatch.setattr(StepLoop, "_compare_steps", lambda *_: None)
    monkeypatch.setattr(nn.Module, "to", lambda module, _: module)  # Stages are made there; torch moves no fake ones.
    schedule = BUILDERS[name](RANKS, CHUNKS)
    with simulate(rank=rank, world_size=RANKS, device="sim", races=True) as simulation:
        with torch.device("sim"):
            stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(schedule.num_stages)]
        pipe = DistributedPipe(stages, schedule, device="sim")
        optimizer = torch.optim.AdamW(pipe.parameters(), foreach=True)
        for _ in range(STEPS):
            x, target = torch.randn(SAMPLES, WIDTH, device="sim"), torch.randn(SAMPLES, WIDTH, device="sim")
            pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        assert {"send", "receive"} <= {collective.op for collective in simulation.collectives}
