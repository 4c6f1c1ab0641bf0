"""Tango 1.3.2, unmodified, with its engine `fairscale` on two CPU ranks: it trains, saves, resumes and consolidates.

It is not installed beside our packages: `nox -s fairscale_clients` makes an environment for it.
"""

import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tango") is None, reason="needs ai2-tango: nox -s 'fairscale_clients(tango)'"
)

PARTS = '''
import os
from pathlib import Path

import torch
from torch import nn

from tango import Step
from tango.common.dataset_dict import DatasetDict
from tango.integrations.torch import Model, TrainCallback


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        return self.activation(self.linear(x))


@Model.register("regression")
class Regression(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(FeedForward() for _ in range(3)))
        self.regression_head = nn.Linear(4, 1)

    def forward(self, x, y):
        return {"loss": nn.functional.mse_loss(self.regression_head(self.blocks(x)), y)}


def samples():
    generator = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(4, generator=generator), "y": torch.randn(1, generator=generator)} for _ in range(24)]


@Step.register("samples")
class Samples(Step):
    DETERMINISTIC = True
    CACHEABLE = False

    def run(self) -> DatasetDict:
        return DatasetDict({"train": samples(), "validation": samples()[:8]})


@TrainCallback.register("interrupt")
class Interrupt(TrainCallback):
    """Ends all workers before the fifth step, once."""

    def pre_batch(self, step, epoch, batch):
        marker = Path(os.environ["INTERRUPTED"])
        if step == 4 and not marker.exists():
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                marker.touch()
            torch.distributed.barrier()
            raise RuntimeError("interrupted")
'''


def experiment(port: int, fsdp_config: dict[str, Any]) -> dict[str, Any]:
    loader = {"batch_size": 4, "sampler": {"type": "torch::DistributedSampler", "shuffle": False}}
    train = {
        "type": "torch::train",
        "model": {
            "type": "fairscale::with_wrapped_modules",
            "model": {"type": "regression"},
            "modules_to_wrap": [r"blocks\.[0-9]+", "regression_head"],
            "fsdp_config": fsdp_config,
            "activation_checkpointing": True,
        },
        "training_engine": {
            "type": "fairscale",
            "optimizer": {"type": "torch::AdamW", "lr": 0.05},
            "max_grad_norm": 0.5,
            "fsdp_config": fsdp_config,
        },
        "dataset_dict": {"type": "ref", "ref": "data"},
        "train_dataloader": loader,
        "validation_split": "validation",
        "validate_every": 2,
        "checkpoint_every": 2,
        "train_steps": 6,
        "log_every": 1,
        "device_count": 2,
        "distributed_port": port,
        "callbacks": [{"type": "interrupt"}],
    }
    return {"steps": {"data": {"type": "samples"}, "train": train}}


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "INTERRUPTED": str(folder / "interrupted")}
    command = [sys.executable, "-m", "tango", "run", "experiment.json", "-i", "regression_parts", "-w", "workspace"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


def reference(folder: Path, num_steps: int) -> dict[str, torch.Tensor]:
    """The plain model on one process, on what both workers see together."""
    sys.path.insert(0, str(folder))
    try:
        parts: Any = importlib.import_module("regression_parts")
    finally:
        sys.path.remove(str(folder))
    torch.manual_seed(42)  # what Tango seeds by default
    model = parts.Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    samples = parts.samples()
    for step in range(num_steps):
        batch = samples[8 * (step % 3) :][:8]
        optimizer.zero_grad()
        model(*(torch.stack([sample[name] for sample in batch]) for name in "xy"))["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "fsdp_config",
    [{"reshard_after_forward": True}, {"reshard_after_forward": False, "move_params_to_cpu": True}],
    ids=["on the device", "on the host"],
)
def test_it_trains_resumes_and_consolidates_whole_weights(tmp_path: Path, fsdp_config: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "regression_parts.py").write_text(PARTS)
    (tmp_path / "experiment.json").write_text(json.dumps(experiment(port, fsdp_config)))
    first = run(tmp_path)
    assert first.returncode != 0 and "interrupted" in first.stdout + first.stderr, first.stderr[-6000:]
    (latest,) = tmp_path.rglob("checkpoint_state_latest")
    assert latest.resolve().name == "checkpoint_state_step4"
    second = run(tmp_path)
    assert second.returncode == 0, second.stderr[-6000:] + second.stdout[-2000:]
    assert "Catching dataloader up to step 4" in second.stdout + second.stderr
    assert latest.resolve().name == "checkpoint_state_step6"
    (best,) = tmp_path.rglob("checkpoint_state_best")
    num_steps = int(best.resolve().name.removeprefix("checkpoint_state_step"))
    (weights,) = tmp_path.rglob("weights.pt")
    torch.testing.assert_close(dict(torch.load(weights)), reference(tmp_path, num_steps), rtol=1e-5, atol=1e-6)
