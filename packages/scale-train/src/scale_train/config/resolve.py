"""Values derived from options: device, number of ranks, model, pipelines, budget of bytes; errors are InputErrors."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import torch

from scale_pipe.schedules.registry import get_schedule
from scale_train.config.options import Options, ParallelOptions
from scale_train.errors import InputError
from scale_train.model import SIZES, ModelConfig

# Ranks can share a core, slowly; beyond this they mostly wait for each other.
MAX_RANKS_PER_CORE = 4


def device_type(options: Options) -> str:
    """Returns the device to compute on, cpu or cuda."""
    asked = options.parallel.device
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device that torch can use; take --device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def num_local_ranks(options: Options) -> int:
    """Returns how many ranks to start on this machine."""
    asked, kind = options.parallel.ranks, device_type(options)
    cores = os.cpu_count() or 1
    most = torch.cuda.device_count() if kind == "cuda" else cores * MAX_RANKS_PER_CORE
    if asked is None:
        if options.parallel.parallel == "none":
            return 1
        return most if kind == "cuda" else min(2, cores)
    if asked < 1:
        raise InputError(f"--ranks {asked}: at least 1 is needed")
    if asked > most:
        devices = f"{most} GPUs" if kind == "cuda" else f"{cores} cores, at most {MAX_RANKS_PER_CORE} ranks each"
        raise InputError(f"--ranks {asked}: more ranks than this machine's devices ({devices}); at most {most}")
    return asked


def model_config(options: Options) -> ModelConfig:
    """Returns the model's config."""
    asked = options.model
    shape = SIZES.get(asked.size)
    if shape is None:
        raise InputError(f"--size {asked.size}: no such size; there are {', '.join(SIZES)}")
    try:
        return ModelConfig(
            layers=shape.layers if asked.layers is None else asked.layers,
            width=shape.width if asked.width is None else asked.width,
            heads=shape.heads if asked.heads is None else asked.heads,
            tied=asked.tied,
            dropout=asked.dropout,
            loss_chunk=asked.loss_chunk,
        )
    except ValueError as error:
        raise InputError(f"--size {asked.size} with --layers, --width, --heads: {error}") from error


class PipelineShape(NamedTuple):
    """How ranks form pipelines."""

    ranks: int  # in each pipeline
    replicas: int  # pipelines with the same stages and other parts of the batch
    stages_per_rank: int  # on each rank

    @property
    def stages(self) -> int:
        """Of the model."""
        return self.ranks * self.stages_per_rank


def pipeline_shape(options: ParallelOptions, num_ranks: int) -> PipelineShape:
    """Returns how ranks form pipelines: as few as the stages and the schedule allow."""
    stages, refused = options.stages, None
    for ranks in range(num_ranks, min(num_ranks, 2) - 1, -1):
        if num_ranks % ranks or (stages is None and ranks < num_ranks) or (stages is not None and stages % ranks):
            continue
        try:
            schedule = get_schedule(options.schedule, ranks, options.chunks, stages and stages // ranks)
        except ValueError as error:
            refused = refused or error
            continue
        return PipelineShape(ranks, num_ranks // ranks, schedule.num_stages // ranks)
    if refused is not None:
        raise InputError(f"--schedule {options.schedule}, --stages {stages}: {refused}") from refused
    raise InputError(
        f"--stages {stages} does not divide among {num_ranks} ranks; take {num_ranks} or a multiple of it, or, for "
        "several pipelines, a divisor of it"
    )


def budget_bytes(choice: str) -> int | None:
    """Returns the bytes of `--checkpoint-activations budget:2GiB`; None for another choice."""
    found = re.fullmatch(r"budget:(\d+(?:\.\d+)?)([KMG]i?B|B)", choice)
    if found is None:
        return None
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(float(found[1]) * units[found[2]])
