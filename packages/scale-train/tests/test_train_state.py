from pathlib import Path
from types import SimpleNamespace

import torch

from scale_core.comm.group import Group
from scale_train.config.options import DataOptions, ModelOptions, Options, ParallelOptions
from scale_train.data.text import read_text
from scale_train.state import Clock, build


def test_the_same_seed_builds_the_same_weights(tmp_path: Path):
    text = tmp_path / "text"
    text.write_bytes(b"some text " * 100)
    options = Options(
        data=DataOptions(text=(text,), sequence=16),
        model=ModelOptions(layers=1, width=16, heads=2),
        parallel=ParallelOptions(parallel="none", device="cpu"),
    )
    first, second = (build(options, read_text((text,)), Group()) for _ in range(2))
    for one, other in zip(first.engine.plain.parameters(), second.engine.plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.step == 0 and first.saved_step == -1 and first.sampler.num_bytes == len(first.text.train)


def test_speed_leaves_out_what_is_no_training_and_the_time_left_does_not(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("scale_train.state.time", SimpleNamespace(monotonic=lambda: now.seconds))
    clock = Clock(started=100.0, _last=100.0)
    now.seconds, clock.steps = 110.0, 5
    assert clock.steps_per_second() == 0.5
    with clock.paused():
        now.seconds = 118.0
    now.seconds, clock.steps = 120.0, 10
    assert clock.steps_per_second() == 2.5
    assert clock.seconds_for(10) == 20.0
