"""AdaScale's sums over ranks have no race: three steps on simulated streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from scale_adascale import AdaScale
from scale_check.simulate import simulate

pytestmark = [
    pytest.mark.simulation,
    # AdaScale asks where a gradient stands; in a simulation it stands nowhere.
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

WIDTH, STEPS = 16, 3


@pytest.fixture(autouse=True, params=[False, True], ids=["", "backward_thread"])
def _simulation(request: pytest.FixtureRequest) -> Iterator[None]:
    with simulate(world_size=4, device="sim", races=True, backward_thread=request.param):
        yield


@pytest.mark.parametrize("averages", [True, False], ids=["averaged", "not averaged"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_gains_of_replicas_have_no_race(
    optimizer: Callable[..., Optimizer], micro_batches: int, averages: bool
) -> None:
    """Where gradients are averaged after the pass, that is a wait for sums over ranks, too."""
    with torch.device("sim"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    adascale = AdaScale(optimizer(model.parameters(), lr=0.1), num_gradients_to_accumulate=micro_batches)
    for _ in range(STEPS):
        for _ in range(micro_batches):
            model(torch.randn(4, WIDTH, device="sim")).sum().backward()
        for param in model.parameters() if averages else ():
            assert param.grad is not None
            torch.distributed.all_reduce(param.grad.div_(4))
        adascale.step()
        adascale.zero_grad()
