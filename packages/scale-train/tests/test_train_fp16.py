"""`--precision fp16` and `--cpu-offload`: the same training as a plain loop with torch's own scaler."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from scale_core.comm.group import Group, group_of
from scale_core.testing import run_ranks
from scale_train.configuration.checks import option_problems
from scale_train.data import Sampler, read_text, windows_at
from scale_train.model import GPT
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.resolve import model_config
from scale_train.training.checkpoint import load, save
from scale_train.training.reporters import Reporter, StepRecord
from scale_train.training.state import LRSchedule, TrainState, build_state
from scale_train.training.trainer import train_step

STEPS = 3
FIRST_SCALE = 2.0**16


class Recorder(Reporter):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def options_for(text: Path, parallel: str, precision: str = "fp16", *, adascale: bool = False, **more) -> Options:
    return Options(
        data=DataOptions(text=(text,), sequence=16, batch=8),
        model=ModelOptions(layers=2, width=32, heads=2),
        parallel=ParallelOptions(parallel=parallel, device="cpu", precision=precision, **more),
        optimizer=OptimizerOptions(steps=STEPS, clip=0.5, warmup=2, optimizer_kernel="plain", adascale=adascale),
        run=RunOptions(log_every=1, seed=1),
    )


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(97, 123, (3_000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


def trained(options: Options, group: Group, steps: int = STEPS) -> tuple[list[float], TrainState]:
    training = build_state(options, read_text(options.data.text), group)
    training.reporter = recorder = Recorder()
    while training.step < steps and not training.is_over:
        train_step(training)
    return [record.loss for record in recorder.records], training


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


def test_fp16_on_one_process_is_torchs_own_scaler_to_the_bit(text):
    options = options_for(text, "none")
    expected, plain, scale = plain_training(options)
    losses, training = trained(options, Group())
    assert losses == expected and len(set(losses)) == STEPS
    assert training.scaler.get_scale() == scale
    own = dict(training.engine.raw_model.named_parameters())
    assert all(torch.equal(param, own[name]) for name, param in plain.named_parameters())
    assert trained(replace(options, parallel=replace(options.parallel, precision="fp32")), Group())[0] != expected


def test_a_step_of_infinite_gradients_is_skipped_as_by_torchs_scaler_and_survives_a_checkpoint(text, tmp_path):
    options, too_large = options_for(text, "none"), 2.0**30
    expected, plain, scale = plain_training(options, too_large)
    training = build_state(options, read_text(options.data.text), Group())
    training.scaler = type(training.scaler)(init_scale=too_large)
    training.reporter = recorder = Recorder()
    before = [param.clone() for param in training.engine.params()]
    train_step(training)
    assert training.norm is None and training.skipped_steps == 1
    assert all(map(torch.equal, before, training.engine.params()))
    save(training, tmp_path / "checkpoints")
    resumed = build_state(options, training.text, Group())
    resumed.reporter = recorder
    load(resumed, training.checkpoint)
    while not resumed.is_over:
        train_step(resumed)
    assert [record.loss for record in recorder.records] == expected
    assert (resumed.scaler.get_scale(), recorder.records[-1].loss_scale) == (scale, scale) and scale < too_large
    assert recorder.records[0].skipped_steps == 1
    assert all(map(torch.equal, plain.parameters(), resumed.engine.params()))


def several(*asked: Options) -> list[tuple[list[float], float, int]]:
    found = []
    for options in asked:
        losses, training = trained(options, group_of())
        found.append((losses, training.scaler.get_scale(), training.skipped_steps))
    return found


def test_two_ranks_train_in_fp16_as_one_and_on_the_host_as_on_the_device(text):
    expected = plain_training(options_for(text, "none"))[0]
    ways = [options_for(text, way) for way in ("fsdp", "ddp", "sharded-ddp")]
    ways += [options_for(text, "pipe", chunks=2), options_for(text, "fsdp", cpu_offload=True)]
    ways += [options_for(text, "ddp", precision, adascale=True) for precision in ("fp16", "fp32")]
    for fsdp, ddp, sharded, pipe, offloaded, adascale, exact in run_ranks(several, 2, *ways):
        assert fsdp == offloaded and fsdp != ddp  # fsdp casts the weights, and autocast each operation.
        for losses, scale, skipped in (fsdp, ddp, sharded, pipe):
            assert losses == pytest.approx(expected, rel=2e-3) and (scale, skipped) == (FIRST_SCALE, 0)
        assert sharded[0] == pytest.approx(ddp[0], rel=1e-5)
        assert adascale[0] != exact[0] and adascale[0] == pytest.approx(exact[0], rel=2e-3)


def test_only_shards_are_kept_on_the_host():
    (problem,) = option_problems(Options(parallel=ParallelOptions(parallel="oss", cpu_offload=True)))
    assert problem == "--cpu-offload: --parallel oss keeps its state on the device; take --parallel fsdp"
