"""No schedule has a race: three steps of each rank on simulated streams."""

from __future__ import annotations

import pytest
import torch
from pipe_schedules import BUILDERS
from simulated_pipe import simulate_peers
from torch import nn

from scale_check.simulate import simulate
from scale_pipe import DistributedPipe

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

RANKS, CHUNKS, SAMPLES, WIDTH, STEPS = 2, 4, 8, 16, 3


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", BUILDERS)
def test_three_steps_of_a_schedule_have_no_race(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_peers(monkeypatch, RANKS, (SAMPLES, WIDTH), CHUNKS)
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
