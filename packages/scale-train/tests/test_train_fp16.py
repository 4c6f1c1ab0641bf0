"""`--precision fp16` and `--cpu-offload`: the same training as a plain loop with torch's own scaler."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_trainings import options_for, start, train_to
from torch.optim import AdamW

from scale_core.testing import run_ranks
from scale_train.configuration.resolve import model_config
from scale_train.data.text import Sampler, read_text, windows_at
from scale_train.model.gpt import GPT
from scale_train.options import Options
from scale_train.training.checkpoint import load, save
from scale_train.training.state import LRSchedule
from scale_train.training.trainer import train_step

STEPS = 3
FIRST_SCALE = 2.0**16


def options(text: Path, parallel: str, precision: str = "fp16", **more: Any) -> Options:
    sizes = {"batch": 8, "layers": 2, "width": 32, "steps": STEPS, "clip": 0.5, "optimizer_kernel": "plain", "seed": 1}
    return options_for(text, parallel, precision=precision, **sizes, **more)


def plain_training(options: Options, first_scale: float = FIRST_SCALE) -> tuple[list[float], GPT, float]:
    """The same steps in plain PyTorch on one process, with torch's own autocast and scaler."""
    torch.manual_seed(options.run.seed)
    model, content = GPT(model_config(options)), read_text(options.data.text).train
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=1.0, betas=(0.9, 0.95), foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
    sampler = Sampler(len(content), options.data.sequence, options.run.seed)
    schedule, losses = LRSchedule(options.optimizer.lr, options.optimizer.warmup, STEPS), []
    for step in range(STEPS):
        tokens, targets = windows_at(content, sampler.starts(options.data.batch), options.data.sequence)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(tokens, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, scaler.get_scale()


def test_fp16_on_one_process_is_torchs_own_scaler_to_the_bit(text: Path) -> None:
    expected, plain, scale = plain_training(options(text, "none"))
    training = start(options(text, "none"))
    losses = train_to(training).losses
    assert losses == expected and len(set(losses)) == STEPS
    assert training.scaler.get_scale() == scale
    params = dict(training.engine.raw_model.named_parameters())
    assert all(torch.equal(param, params[name]) for name, param in plain.named_parameters())
    assert train_to(start(options(text, "none", "fp32"))).losses != expected


def test_a_step_of_infinite_gradients_is_skipped_and_saved(text: Path, tmp_path: Path) -> None:
    too_large = 2.0**30
    expected, plain, scale = plain_training(options(text, "none"), too_large)
    training = start(options(text, "none"))
    training.scaler = type(training.scaler)(init_scale=too_large)
    before = [param.clone() for param in training.engine.params()]
    train_step(training)
    assert training.norm is None and training.skipped_steps == 1
    assert all(map(torch.equal, before, training.engine.params()))
    save(training, tmp_path / "checkpoints")
    resumed = start(options(text, "none"))
    load(resumed, training.checkpoint)
    records = [*training.reporter.steps, *train_to(resumed).steps]
    assert [record.loss for record in records] == expected
    assert (resumed.scaler.get_scale(), records[-1].loss_scale) == (scale, scale) and scale < too_large
    assert records[0].skipped_steps == 1
    assert all(map(torch.equal, plain.parameters(), resumed.engine.params()))


def several(*ways: Options) -> list[tuple[list[float], float, int]]:
    trained = []
    for way in ways:
        training = start(way)
        losses = train_to(training).losses
        trained.append((losses, training.scaler.get_scale(), training.skipped_steps))
    return trained


def test_two_ranks_train_in_fp16_as_one(text: Path) -> None:
    expected = plain_training(options(text, "none"))[0]
    ways = [options(text, way) for way in ("fsdp", "ddp", "sharded-ddp")]
    ways += [options(text, "pipe", chunks=2), options(text, "fsdp", cpu_offload=True)]
    ways += [options(text, "ddp", precision, adascale=True) for precision in ("fp16", "fp32")]
    for fsdp, ddp, sharded, pipe, offloaded, adascale, exact in run_ranks(several, 2, *ways):
        assert fsdp == offloaded and fsdp != ddp  # fsdp casts the weights, and autocast each operation.
        for losses, scale, skipped in (fsdp, ddp, sharded, pipe):
            assert losses == pytest.approx(expected, rel=2e-3) and (scale, skipped) == (FIRST_SCALE, 0)
        assert sharded[0] == pytest.approx(ddp[0], rel=1e-5)
        assert adascale[0] != exact[0] and adascale[0] == pytest.approx(exact[0], rel=2e-3)
