"""Values derived from options, and checks of them before any rank starts: wrong input costs a second and one line."""

from __future__ import annotations

import math
import os
import re
from typing import NamedTuple

import torch

from scale_pipe.schedules.registry import get_schedule
from scale_train.errors import InputError
from scale_train.model import SIZES, ModelConfig
from scale_train.options import OptimizerOptions, Options, ParallelOptions

# Implausible sizes: a typing error would fill the memory before anything is checked.
_MOST = {"--layers": 10_000, "--width": 1_000_000, "--heads": 100_000}

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
    for (flag, most), number in zip(_MOST.items(), (asked.layers, asked.width, asked.heads), strict=True):
        if number is not None and number > most:
            raise InputError(f"{flag} {number}: no model has so many; at most {most}")
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
        return self.ranks * self.stages_per_rank


def pipeline_shape(options: ParallelOptions, num_ranks: int) -> PipelineShape:
    """Returns how ranks form pipelines: of as many ranks as the stages and the schedule allow.

    With tensor parallelism the ranks that divide a stage's layers count as one.
    """
    num_ranks //= options.tensor_parallel
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
    return _bytes_of(choice.removeprefix("budget:")) if choice.startswith("budget:") else None


def parse_bytes(option: str, text: str) -> int:
    """Returns a number of bytes, as 5GB or 2GiB; an InputError names the option."""
    found = _bytes_of(text)
    if not found:
        raise InputError(f"{option} {text}: a size is needed, as 5GB or 2GiB")
    return found


def _bytes_of(text: str) -> int | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]i?B|B)", text)
    if found is None:
        return None
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(float(found[1]) * units[found[2]])


def check_options(options: Options, num_ranks: int) -> None:
    """Raises InputError where options make no training on `num_ranks` ranks."""
    _check_numbers(options)
    _check_adascale(options.optimizer)
    model_config(options)
    _check_activations(options.parallel)
    num_data = _check_context_parallel(options, _check_tensor_parallel(options, num_ranks))
    if options.parallel.parallel == "none" and num_data > 1:
        raise InputError(
            f"--parallel none is one process, but there are {num_ranks} ranks; take fsdp, sharded-ddp, oss, ddp, pipe, "
            "or --ranks 1"
        )
    if options.parallel.parallel == "pipe":
        _check_pipeline(options, num_ranks)
        return
    batch, accumulate = options.data.batch, options.parallel.accumulate
    parts = num_data * accumulate
    if batch % parts:
        below = batch // parts * parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        raise InputError(
            f"--batch {batch} does not divide into {num_data} ranks x {accumulate} micro-batches; take {nearest}"
        )


def _check_tensor_parallel(options: Options, num_ranks: int) -> int:
    """Returns how many data-parallel ranks there are."""
    number, parallel = options.parallel.tensor_parallel, options.parallel
    if number < 1 or num_ranks % number:
        raise InputError(
            f"--tensor-parallel {number} does not divide {num_ranks} ranks; take "
            f"{' or '.join(str(each) for each in range(1, num_ranks + 1) if num_ranks % each == 0)}"
        )
    if number == 1:
        return num_ranks
    if budget_bytes(parallel.checkpoint_activations) is not None:
        raise InputError(
            f"--checkpoint-activations {parallel.checkpoint_activations}: a plan is measured on whole layers, and "
            f"--tensor-parallel {number} divides them; take all or selective"
        )
    heads = model_config(options).heads
    if number > heads:
        raise InputError(f"--tensor-parallel {number}: the model has {heads} heads to divide; take at most {heads}")
    return num_ranks // number


def _check_context_parallel(options: Options, num_data: int) -> int:
    """Returns how many of the data-parallel ranks see other sequences."""
    parallel, number, sequence = options.parallel, options.parallel.context_parallel, options.data.sequence
    flag = f"--context-parallel {number}"
    if number < 1 or num_data % number:
        beside = f" (of {parallel.tensor_parallel} that divide layers each)" if parallel.tensor_parallel > 1 else ""
        raise InputError(
            f"{flag} does not divide {num_data} ranks{beside}; take "
            f"{' or '.join(str(each) for each in range(1, num_data + 1) if num_data % each == 0)}"
        )
    if number == 1:
        return num_data
    if parallel.parallel in ("pipe", "none"):
        why = "the stages of a pipeline see" if parallel.parallel == "pipe" else "one plain process sees"
        raise InputError(f"{flag}: {why} whole sequences; take --parallel fsdp, or --context-parallel 1")
    if options.optimizer.adascale:
        raise InputError(
            f"{flag}: --adascale compares gradients of whole sequences, and here each rank has those of a part; leave "
            "one of them out"
        )
    if budget_bytes(parallel.checkpoint_activations) is not None:
        raise InputError(
            f"--checkpoint-activations {parallel.checkpoint_activations}: a plan is measured on whole sequences, and "
            f"{flag} divides them; take all or selective"
        )
    if sequence % number or sequence < 2 * number:
        nearest = max(2 * number, sequence // number * number)
        raise InputError(
            f"--sequence {sequence}: {flag} needs a multiple of {number}, {2 * number} or more; take "
            f"--sequence {nearest}"
        )
    return num_data // number


def _check_pipeline(options: Options, num_ranks: int) -> None:
    parallel, layers = options.parallel, model_config(options).layers
    shape = pipeline_shape(parallel, num_ranks)
    if shape.stages > layers:
        raise InputError(
            f"--schedule {parallel.schedule} on {shape.ranks} ranks has {shape.stages} stages, but the model has "
            f"{layers} blocks; take fewer --ranks, or --layers {shape.stages}"
        )
    _check_shared_weight(options, shape)
    if options.data.batch % shape.replicas:
        raise InputError(
            f"--batch {options.data.batch} does not divide among {shape.replicas} pipelines beside each other "
            f"({num_ranks} ranks, {shape.stages} stages); take a multiple of {shape.replicas}"
        )
    if parallel.accumulate > 1:
        raise InputError(
            f"--accumulate {parallel.accumulate}: with --parallel pipe it is --chunks that cuts the batch; take "
            f"--chunks {parallel.accumulate * parallel.chunks}"
        )


def _check_shared_weight(options: Options, shape: PipelineShape) -> None:
    """A weight of two stages on one rank would be sharded, and reduced, twice."""
    parallel = options.parallel
    if not options.model.tied or parallel.data_parallel != "fsdp" or shape.replicas == 1 or shape.stages == 1:
        return
    placement = get_schedule(parallel.schedule, shape.ranks, parallel.chunks, shape.stages_per_rank).placement
    if placement.rank_of[0] == placement.rank_of[-1]:
        raise InputError(
            f"--data-parallel fsdp with --schedule {parallel.schedule}: the first and the last stage share the "
            "embedding's weight and are on one rank, where it would be reduced twice; take --data-parallel ddp, or "
            "--schedule 1f1b"
        )


def _check_activations(options: ParallelOptions) -> None:
    choice = options.checkpoint_activations
    if choice in ("none", "all", "selective"):
        return
    if budget_bytes(choice) is None:
        raise InputError(f"--checkpoint-activations {choice}: take all, selective, or a budget, as budget:2GiB")
    if options.parallel in ("fsdp", "pipe"):
        raise InputError(
            f"--checkpoint-activations {choice}: a plan is measured on a whole model, and {options.parallel} trains it "
            "whole nowhere; take all or selective, or --parallel sharded-ddp"
        )
    if options.offload_activations:
        raise InputError(f"--offload-activations: the plan of --checkpoint-activations {choice} says what is offloaded")


def _check_adascale(options: OptimizerOptions) -> None:
    scale = options.adascale_scale
    if scale and not options.adascale:
        raise InputError(f"--adascale-scale {scale:g} has no effect without --adascale")
    if scale and not 1 <= scale < math.inf:
        raise InputError(f"--adascale-scale {scale:g}: at least 1 is needed")


def _check_numbers(options: Options) -> None:
    at_least_one = {
        "--sequence": options.data.sequence,
        "--batch": options.data.batch,
        "--accumulate": options.parallel.accumulate,
        "--chunks": options.parallel.chunks,
        "--steps": options.optimizer.steps,
        "--log-every": options.run.log_every,
    }
    at_least_zero = {
        "--loss-chunk": options.model.loss_chunk,
        "--warmup": options.optimizer.warmup,
        "--weight-decay": options.optimizer.weight_decay,
        "--clip": options.optimizer.clip,
        "--held-out-tokens": options.data.held_out_tokens,
        "--save-every": options.run.save_every,
        "--evaluate-every": options.run.evaluate_every,
        "--sample-length": options.run.sample_length,
        "--seed": options.run.seed,
    }
    if options.parallel.overlap_pieces is not None:
        at_least_one["--overlap-pieces"] = options.parallel.overlap_pieces
    for flag, number in at_least_one.items():
        if number < 1:
            raise InputError(f"{flag} {number}: at least 1 is needed")
    for flag, quantity in at_least_zero.items():
        if not 0 <= quantity < math.inf:
            raise InputError(f"{flag} {quantity}: 0 or more is needed")
    if not 0 < options.optimizer.lr < math.inf:
        raise InputError(f"--lr {options.optimizer.lr}: a number above 0 is needed")
    if not 0 <= options.model.dropout < 1:
        raise InputError(f"--dropout {options.model.dropout}: a number from 0 to below 1 is needed")


def options_without_effect(options: Options) -> list[str]:
    """Returns a line for each option that changes nothing."""
    lines, parallel = [], options.parallel
    if parallel.no_sync and parallel.parallel not in ("fsdp", "sharded-ddp"):
        lines.append(f"--no-sync has no effect with --parallel {parallel.parallel}")
    elif parallel.no_sync and parallel.accumulate == 1:
        lines.append("--no-sync has no effect without --accumulate 2 or more")
    if not parallel.reshard_after_forward and parallel.parallel != "fsdp":
        lines.append(f"--no-reshard-after-forward has no effect with --parallel {parallel.parallel}")
    if parallel.sequence_parallel and parallel.tensor_parallel == 1:
        lines.append("--sequence-parallel has no effect without --tensor-parallel 2 or more")
    if parallel.context_attention != ParallelOptions.context_attention and parallel.context_parallel == 1:
        lines.append("--context-attention has no effect without --context-parallel 2 or more")
    if parallel.overlap_pieces is not None and parallel.tensor_parallel == 1:
        lines.append("--overlap-pieces has no effect without --tensor-parallel 2 or more")
    for flag, is_set in (
        ("--stages", parallel.stages is not None),
        ("--schedule", parallel.schedule != ParallelOptions.schedule),
        ("--chunks", parallel.chunks != ParallelOptions.chunks),
        ("--data-parallel", parallel.data_parallel != ParallelOptions.data_parallel),
    ):
        if is_set and parallel.parallel != "pipe":
            lines.append(f"{flag} has no effect with --parallel {parallel.parallel}")
    return lines
