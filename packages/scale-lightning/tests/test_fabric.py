"""The three strategies of Fabric, beside one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning_models import Block, Net, assert_equal, batches, environment, plain_training
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp import class_policy
from scale_lightning import FabricScaleFSDPStrategy, FabricScaleOSSStrategy, FabricScaleShardedDDPStrategy

pytestmark = [  # What Lightning says of few workers, and what it uses of torch that torch has deprecated
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
STRATEGIES = {
    "scale_fsdp": lambda **options: FabricScaleFSDPStrategy(class_policy(Block), **options),
    "scale_oss": FabricScaleOSSStrategy,
    "scale_sharded_ddp": FabricScaleShardedDDPStrategy,
}


class Loss(nn.Module):
    """The loss of `Net` as the forward of a plain module."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.net, self.factor = net.net, net.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.net(x).float() * self.factor.sum() - x.sum(1, keepdim=True)).square().mean()


def train(strategy: Any, source: str | None, target: str, accumulate: int = 1, clip: float | None = None) -> None:
    if isinstance(strategy, tuple):
        strategy = STRATEGIES[strategy[0]](state_dict_type=strategy[1])
    size, rank = dist.get_world_size(), dist.get_rank()
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, plugins=[environment()])
    fabric.launch()
    plain = Loss()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = fabric.setup(plain, optimizer, scheduler=scheduler)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if source is not None:
        fabric.load(source, state)
        assert state["epoch"] == 1
    for number, step in enumerate(batches(size)):
        last = (number + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(step[rank]) / accumulate)
        if last:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    state["epoch"] += 1
    fabric.save(target, state)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_training_by_fabric_equals_one_process(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "state.ckpt")
    run_ranks(train, 2, name, None, path, 2, 0.5)
    model, optimizer = plain_training([2], accumulate=2, clip=0.5, shuffle=False)
    saved = torch.load(path, weights_only=True)
    assert_equal(saved["model"], dict(model.state_dict()), 1e-6)
    assert_equal(saved["optimizer"]["state"], optimizer.state_dict()["state"], 1e-6)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_training_by_fabric_resumes_at_another_number_of_ranks(name: str, kind: str, tmp_path: Path) -> None:
    first, second = (str(tmp_path / f"{part}.ckpt") for part in ("first", "second"))
    run_ranks(train, 2, (name, kind), None, first)
    assert Path(first).is_dir() == (kind == "sharded")
    run_ranks(train, 1, (name, "full"), first, second)
    model, optimizer = plain_training([2, 1], shuffle=False)
    saved = torch.load(second, weights_only=True)
    assert_equal(saved["model"], dict(model.state_dict()))
    assert_equal(saved["optimizer"]["state"], optimizer.state_dict()["state"])
    assert saved["epoch"] == 2


def set_up_stepped() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy="scale_fsdp", plugins=[environment()])
    fabric.launch()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fabric.setup(model, optimizer)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    with pytest.raises(ValueError, match="this AdamW has stepped already"):
        run_ranks(set_up_stepped, 1)
