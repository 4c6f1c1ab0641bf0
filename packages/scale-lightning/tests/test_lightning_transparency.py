"""The promise: under each strategy, what one process computes."""

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning_models import Block, Net, assert_equal, batches, loader, plain_training, trainer

from scale_core import ShardedGradScaler
from scale_core.testing import run_ranks
from scale_fsdp import ShardOptions, class_policy, fully_shard
from scale_lightning import ScaleFSDPStrategy, ScaleOSSStrategy, ScaleShardedDDPStrategy

pytestmark = [  # What Lightning says of few workers, and what it uses of torch that torch has deprecated
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
STRATEGIES = {
    "scale_fsdp": lambda **options: ScaleFSDPStrategy(class_policy(Block), **options),
    "scale_oss": ScaleOSSStrategy,
    "scale_sharded_ddp": ScaleShardedDDPStrategy,
}
VARIATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "plain": ({}, {}, 0.0),
    "accumulated": ({"accumulate_grad_batches": 2}, {"accumulate": 2}, 0.0),
    "clipped": ({"gradient_clip_val": 0.5}, {"clip": 0.5}, 1e-6),
    "bf16": ({"precision": "bf16-mixed"}, {"autocast": True}, 0.0),
}


def fit_and_save(name: str, folder: str) -> dict[str, float]:
    """Each variation, saved in a file; returns the losses of validation and test."""
    for variation, (options, _, _) in VARIATIONS.items():
        strategy = name if variation == "accumulated" else STRATEGIES[name]()
        fitted = trainer(strategy, **options)
        fitted.fit(Net(), loader(), loader())
        validated = float(fitted.callback_metrics["val_loss"])
        fitted.save_checkpoint(f"{folder}/{variation}.ckpt")
        if variation == "plain":
            (tested,) = fitted.test(fitted.lightning_module, loader(), verbose=False)
            losses = {"val_loss": validated, **tested}
    return losses


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fit_equals_one_process(name: str, tmp_path: Path) -> None:
    losses, others = run_ranks(fit_and_save, 2, name, str(tmp_path))
    assert losses == others
    for variation, (_, options, tolerance) in VARIATIONS.items():
        model, optimizer = plain_training([2], **options)
        saved = torch.load(tmp_path / f"{variation}.ckpt", weights_only=True)
        assert_equal(saved["state_dict"], dict(model.state_dict()), tolerance)
        assert_equal(saved["optimizer_states"][0]["state"], optimizer.state_dict()["state"], tolerance)
        assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]
        if variation == "plain":
            with torch.no_grad():
                expected = sum(float(model.loss((part,))) for step in batches(2) for part in step) / 4
            assert math.isclose(losses["val_loss"], expected, rel_tol=1e-6)
            assert losses["test_loss"] == losses["val_loss"]


def fit_in_epochs(name: str, kind: str, source: str | None, target: str, epochs: int) -> None:
    fitted = trainer(STRATEGIES[name](state_dict_type=kind), epochs)
    fitted.fit(Net(), loader(), ckpt_path=source)
    fitted.save_checkpoint(target)
    if source is not None:  # The weights alone, into a model that has not trained.
        tester = trainer(STRATEGIES[name](state_dict_type=kind))
        (tested,) = tester.test(Net(), loader(), ckpt_path=target, verbose=False)
        (again,) = fitted.test(fitted.lightning_module, loader(), verbose=False)
        assert tested == again


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fit_resumes_at_another_number_of_ranks(name: str, kind: str, tmp_path: Path) -> None:
    first, second, last = (str(tmp_path / f"{part}.ckpt") for part in ("first", "second", "last"))
    run_ranks(fit_in_epochs, 2, name, kind, None, first, 1)
    assert Path(first).is_dir() == (kind == "sharded")
    run_ranks(fit_in_epochs, 1, name, kind, first, second, 2)
    run_ranks(fit_in_epochs, 1, name, "full", second, last, 2)  # Nothing is left to do; one kind becomes the other.
    model, optimizer = plain_training([2, 1])
    saved = torch.load(last, weights_only=True)
    assert_equal(saved["state_dict"], dict(model.state_dict()))
    assert_equal(saved["optimizer_states"][0]["state"], optimizer.state_dict()["state"])
    assert_equal(dict(Net.load_from_checkpoint(last).state_dict()), dict(model.state_dict()))


class OwnUnits(Net):
    """Chooses its units itself, on the meta device."""

    def configure_model(self) -> None:
        if isinstance(self.net[0], Block) and hasattr(self.net[0], "no_sync"):
            return
        with torch.device("meta"):
            self.net = torch.nn.Sequential(Block(), Block())
        for block in self.net:
            fully_shard(block, options=ShardOptions(compute_device="cpu"))


def fit_own_units(folder: str) -> None:
    fitted = trainer("scale_fsdp")
    fitted.fit(OwnUnits(), loader(), loader())
    units = [name for name, module in fitted.lightning_module.named_modules() if hasattr(module, "no_sync")]
    assert units == ["", "net.0", "net.1"]
    assert all(param.device.type == "cpu" for param in fitted.lightning_module.parameters())


def test_configure_model_may_shard_itself(tmp_path: Path) -> None:
    run_ranks(fit_own_units, 2, str(tmp_path))


def fit_scaled(name: str) -> tuple[float, float]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))
    fitted = trainer(STRATEGIES[name](), plugins=[plugin])
    before = Net().factor.detach().clone()
    fitted.fit(model := Net(), loader())
    assert isinstance(plugin.scaler, ShardedGradScaler)
    state = fitted.strategy.lightning_module_state_dict()
    moved = float((state["factor"] - before).abs().max()) if state else 0.0
    assert model.automatic_optimization
    return plugin.scaler.get_scale(), moved


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # torch's, of each step that is skipped
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_skip_a_step_that_overflows(name: str) -> None:
    scales = run_ranks(fit_scaled, 2, name)
    assert scales == [(2.0**38, 0.0)] * 2  # Both steps were skipped.


def fit_manually() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    trainer("scale_sharded_ddp").fit(Manual(), loader())


def test_what_does_not_go_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="state_dict_type: expected"):
        ScaleOSSStrategy(state_dict_type="rank")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="flatten_parameters=True merges parameters"):
        ScaleFSDPStrategy(options=ShardOptions(flatten_parameters=True))
    with pytest.raises(ValueError, match="Manual sets automatic_optimization=False"):
        run_ranks(fit_manually, 1)


SCRIPT = """
from lightning_models import Net, loader
from lightning.pytorch import Trainer
import scale_lightning, sys

if __name__ == "__main__":
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="scale_fsdp", max_epochs=1, **options)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint(sys.argv[1])
"""


def test_lightnings_own_launcher_starts_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(script), str(tmp_path / "last.ckpt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert_equal(saved["state_dict"], dict(plain_training([2])[0].state_dict()))
