"""What the package shows is what people write, and importing it loads no torch and starts nothing."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import scale_pipe
from scale_pipe import Costs, DeferredBatchNorm, DistributedPipe, Pipe, PipelineOptions, split
from scale_pipe.schedules.classic import one_forward_one_backward
from scale_pipe.schedules.solver.bounds import lower_bound

IMPORT_AND_LIST = """
import sys, threading
import scale_pipe
assert threading.active_count() == 1
print(*sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
"""

LOAD_PIPELINES = """
import sys
from scale_pipe import DistributedPipe, Pipe, split
print(*(name for name in sys.modules if name.startswith("scale_pipe.schedules.")))
"""


def test_its_names_are_found_where_people_import_them_from() -> None:
    for name in scale_pipe.__all__:
        assert getattr(scale_pipe, name).__module__ == "scale_pipe"


def test_importing_it_loads_the_standard_library_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-I", "-c", IMPORT_AND_LIST], capture_output=True, text=True, timeout=600, check=True
    )
    assert "scale_pipe" in run.stdout.split()
    assert not {"torch", "numpy", "scale_core", "scale_checkpoint"} & set(run.stdout.split())


def test_pipelines_load_no_solver_simulator_or_pictures() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOAD_PIPELINES], capture_output=True, text=True, timeout=600, check=True
    )
    loaded = {name.split(".")[2] for name in run.stdout.split()}
    assert "schedule" in loaded
    assert not {"solver", "simulation", "visualize"} & loaded


def test_a_wrong_argument_is_refused_before_building() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (PipelineOptions, (), {"deferred_batch_norm": "yes"}, "PipelineOptions: expected deferred_batch_norm to"),
        (PipelineOptions, (), {"check_replicas_every": -3}, "number of steps in check_replicas_every, got -3"),
        (DistributedPipe, (model,), {"limit_seconds": 3}, r"write options=PipelineOptions\(limit_seconds=...\)"),
        (
            Pipe,
            (model,),
            {"balance": [2], "deferred_batch_norm": None},
            "Pipe: expected deferred_batch_norm to be a bo",
        ),
        (split, (model, "1"), {}, "cuts are a list of names, as .* but got '1'"),
        (
            Costs,
            (1.0, (1.0,), (1.0,), ()),
            {},
            r"Costs: expected forward to be a sequence of number, got 1.0 \(float\)",
        ),
        (DeferredBatchNorm, (4,), {"eps": "1e-5"}, "DeferredBatchNorm: expected eps to be a number"),
    ]
    for call, args, kwargs, text in wrong:
        with pytest.raises((TypeError, ValueError), match=text):
            call(*args, **kwargs)
    assert type(model[1]) is nn.BatchNorm1d and not model._forward_hooks
    with pytest.raises(ValueError, match="num_micro_batches must be at least 1"):
        lower_bound(one_forward_one_backward(2, 4).placement, -3, Costs.uniform(2))


def test_integers_of_tensors_and_devices_by_number_are_taken() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = Pipe(model, balance=torch.tensor([1, 1]), devices=("cpu", torch.device("cpu")), chunks=torch.tensor(2))  # type: ignore[arg-type]
    assert pipe(torch.ones(4, 2)).shape == (4, 2)
