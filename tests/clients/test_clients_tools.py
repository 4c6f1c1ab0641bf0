"""Every block of the guide on torch's tools, run from its text on two ranks.

What takes a compiler, or programs under torchrun, is in `soak` and in `nox -s "clients(tools)"`.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainings import mean_gradients

from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import faults

pytestmark = [
    # The compiler asks each tensor that it meets for its gradient, and hides the warning, which an error is not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "tools.md").read_text(encoding="utf-8")
BLOCKS: dict[str, str] = dict(re.findall(r'^```python title="([^"\n]*)"\n(.*?)^```$', GUIDE, re.MULTILINE | re.DOTALL))
RESTARTS = "torchrun restarts"

Names = dict[str, Any]


def run(title: str, **given: Any) -> Names:
    """The names of a block, after it has run behind the one that all begin from."""
    names: Names = dict(given)
    exec(BLOCKS["begin"], names)
    exec(BLOCKS[title], names)
    return names


def whole_data() -> tuple[Tensor, Tensor]:
    """The inputs [2, 64, 8] and labels [2, 64] of both ranks, drawn as in the block that all begin from."""
    plain_model()
    return torch.randn(2, 64, 8), torch.randint(3, (2, 64))


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(8, 3))


def plain_backward(plain: nn.Module) -> None:
    """The mean of both ranks' gradients, on one process."""

    def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
        inputs, labels = whole_data()
        return nn.functional.cross_entropy(model(inputs[rank]), labels[rank])

    mean_gradients(plain, loss_of, 0, 2)


def has_gradients(model: nn.Module, plain: nn.Module) -> None:
    """This rank's are, to the bit, its part of the plain model's."""
    plain_backward(plain)
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        shard = shard_of(param)
        assert shard is not None and param.grad is not None and whole.grad is not None
        assert torch.equal(local_tensor(param.grad).flatten(), whole.grad.flatten()[shard.start : shard.stop]), name


def compiles(title: str, folder: str) -> None:
    """Traces forward and backward as they are traced for inductor, whose C++ compiler would take minutes."""
    torch._dynamo.reset()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        names = run(title)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    has_gradients(names["model"], plain_model())


def profiles(folder: str) -> None:
    names = run("torch.profiler")
    assert {f"scale_fsdp::{what} ({unit})" for what in ("forward", "backward") for unit in (0, 1)} <= names["names"]
    has_gradients(names["model"], plain_model())


def casts(folder: str) -> None:
    names = run("torch.autocast")
    assert all(param.dtype == param.grad.dtype == torch.float32 for param in names["model"].parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        has_gradients(names["model"], plain_model())


def averages(folder: str) -> None:
    names = run("EMA")
    plain = plain_model()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        plain_backward(plain)
        optimizer.step()
        average.update_parameters(plain)
    for name, weight in average.module.state_dict().items():
        assert torch.equal(names["averages"][name], weight)


def measures(folder: str) -> None:
    score = run("torchmetrics")["score"]
    inputs, labels = whole_data()
    right = plain_model()(inputs).argmax(-1) == labels
    torch.testing.assert_close(score, right.float().mean())


def loads(folder: str) -> None:
    names = run("a stateful data loader", folder=folder)
    expected = names["inputs"].split(16)[2:]
    assert len(names["rest"]) == 2 and all(map(torch.equal, names["rest"], expected))


NEEDS = {"torchmetrics": "torchmetrics", "a stateful data loader": "torchdata"}
CASES: dict[str, Callable[[str], None]] = {
    "torch.profiler": profiles,
    "torch.autocast": casts,
    "EMA": averages,
    "torchmetrics": measures,
    "a stateful data loader": loads,
}
COMPILED: dict[str, Callable[[str], None]] = {
    title: functools.partial(compiles, title) for title in ("compile the blocks", "compile the whole model")
}


def is_missing(title: str) -> bool:
    return title in NEEDS and find_spec(NEEDS[title]) is None


def run_block(title: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (CASES | COMPILED)[title](str(folder))


def skipped_if_missing(title: str) -> Any:
    reason = f"{NEEDS.get(title)} is not installed"
    return pytest.param(title, marks=pytest.mark.skip(reason)) if is_missing(title) else title


@pytest.mark.parametrize("title", [skipped_if_missing(title) for title in CASES])
@pytest.mark.ranks(2, in_turn=True)
def test_a_block_of_the_guide_does_what_it_says(title: str, tmp_path: Path) -> None:
    run_block(title, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("title", COMPILED)
@pytest.mark.ranks(2)
def test_a_block_that_compiles_does_what_it_says(title: str, tmp_path: Path) -> None:
    run_block(title, tmp_path)


def test_every_block_of_the_guide_is_run() -> None:
    assert BLOCKS.keys() == {"begin", *CASES, *COMPILED, RESTARTS}


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with torchrun's agent as Linux has it")
def test_the_guides_script_is_restarted_and_loses_nothing(tmp_path: Path) -> None:
    """A rank is killed in its third step; the second start goes on from the second one."""
    script, weights = tmp_path / "train.py", tmp_path / "weights.pt"
    script.write_text(
        "folder = 'snapshots'\n" + BLOCKS["begin"] + BLOCKS[RESTARTS] + "state = model.state_dict()\n"
        f"if group.rank == 0:\n    torch.save([begin, state], {str(weights)!r})\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.update(faults.to_environment(faults.kill_at("optimizer.step", rank=1, step=3)))
    ended = subprocess.run(
        [*command, "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, textwrap.shorten(ended.stderr, 3000)
    begin, state = torch.load(weights)
    plain = plain_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(6):
        plain_backward(plain)
        optimizer.step()
    assert begin == 2, "the last start went on from the snapshot of step 2"
    assert all(torch.equal(state[name], weight) for name, weight in plain.state_dict().items())
