"""Values derived from options, and checks of them before any rank starts: wrong input costs a second and one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import torch

from scale_core import compat
from scale_pipe.schedules.registry import SOLVE, get_schedule
from scale_train.configuration.checks import option_problems
from scale_train.configuration.derived import budget_bytes, bytes_of, gpt_config, model_shape
from scale_train.errors import InputError
from scale_train.model.config import ModelConfig
from scale_train.options import Options, ParallelOptions

# Ranks can share a core, slowly; beyond this they mostly wait for each other.
MAX_RANKS_PER_CORE = 4


def resolve_device(asked: str) -> str:
    """Returns the device of `--device` on this machine, cpu or cuda.

    Raises:
        InputError: There is no CUDA device, or "auto" finds an accelerator that nothing here was tested on.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device that torch can use; take --device cpu")
    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "cuda"
    accelerator = compat.accelerator()
    if accelerator is not None and accelerator.type not in ("mps", compat.STAND_IN):
        raise InputError(
            f"--device auto: this machine has an accelerator of type {accelerator.type}, on which scale-train was not "
            "tested; take --device cpu"
        )
    return "cpu"


def num_local_ranks(options: Options) -> int:
    """Returns how many ranks to start on this machine."""
    num_ranks, kind = options.parallel.ranks, resolve_device(options.parallel.device)
    cores = os.cpu_count() or 1
    most = torch.cuda.device_count() if kind == "cuda" else cores * MAX_RANKS_PER_CORE
    if num_ranks is None:
        if options.parallel.parallel == "none":
            return 1
        return most if kind == "cuda" else min(2, cores)
    if num_ranks < 1:
        raise InputError(f"--ranks {num_ranks}: at least 1 is needed")
    if num_ranks > most:
        devices = f"{most} GPUs" if kind == "cuda" else f"{cores} cores, at most {MAX_RANKS_PER_CORE} ranks each"
        raise InputError(f"--ranks {num_ranks}: more ranks than this machine's devices ({devices}); at most {most}")
    return num_ranks


def model_config(options: Options) -> ModelConfig:
    """Returns the model's config."""
    try:
        return gpt_config(options)
    except ValueError as error:
        raise InputError(str(error)) from error


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


def parse_bytes(option: str, text: str) -> int:
    """Returns a number of bytes, as 5GB or 2GiB; an InputError names the option."""
    num_bytes = bytes_of(text)
    if not num_bytes:
        raise InputError(f"{option} {text}: a size is needed, as 5GB or 2GiB")
    return num_bytes


def check_options(options: Options, num_ranks: int) -> None:
    """Raises InputError where options make no training on `num_ranks` ranks, with all that is wrong."""
    if problems := option_problems(options) or list(_rank_problems(options, num_ranks)):
        raise InputError("; ".join(problems))


def _rank_problems(options: Options, num_ranks: int) -> Iterator[str]:
    """What does not go with the number of ranks."""
    parallel = options.parallel
    yield from _tensor_parallel_problems(options, num_ranks)
    if num_ranks % parallel.tensor_parallel:
        return  # There is no number of data-parallel ranks.
    num_data = num_ranks // parallel.tensor_parallel
    yield from _context_parallel_problems(options, num_data)
    if parallel.parallel != "pipe" and num_data % parallel.expert_parallel:
        yield expert_parallel_problem(parallel.expert_parallel, num_data, parallel.tensor_parallel)
    if num_data % parallel.context_parallel:
        return
    num_data //= parallel.context_parallel
    if parallel.parallel == "pipe":
        yield from _pipeline_problems(options, num_ranks)
        return
    if parallel.parallel == "none" and num_data > 1:
        yield (
            f"--parallel none is one process, but there are {num_ranks} ranks; take fsdp, sharded-ddp, oss, ddp, pipe, "
            "or --ranks 1"
        )
        return
    batch, accumulate = options.data.batch, parallel.accumulate
    parts = num_data * accumulate
    if batch % parts:
        below = batch // parts * parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        yield f"--batch {batch} does not divide into {num_data} ranks x {accumulate} micro-batches; take {nearest}"


def _tensor_parallel_problems(options: Options, num_ranks: int) -> Iterator[str]:
    number, parallel = options.parallel.tensor_parallel, options.parallel
    if num_ranks % number:
        yield f"--tensor-parallel {number} does not divide {num_ranks} ranks; take {_divisors(num_ranks)}"
        return
    if number == 1:
        return
    if budget_bytes(parallel.checkpoint_activations) is not None:
        yield (
            f"--checkpoint-activations {parallel.checkpoint_activations}: a plan is measured on whole layers, and "
            f"--tensor-parallel {number} divides them; take all or selective"
        )
    heads = model_shape(options).heads
    if number > heads > 0:
        yield f"--tensor-parallel {number}: the model has {heads} heads to divide; take at most {heads}"


def _divisors(number: int) -> str:
    return " or ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _context_parallel_problems(options: Options, num_data: int) -> Iterator[str]:
    parallel, number, sequence = options.parallel, options.parallel.context_parallel, options.data.sequence
    flag = f"--context-parallel {number}"
    if num_data % number:
        combination = _beside(parallel.tensor_parallel)
        yield f"{flag} does not divide {num_data} ranks{combination}; take {_divisors(num_data)}"
        return
    if number == 1:
        return
    if parallel.parallel in ("pipe", "none"):
        why = "the stages of a pipeline see" if parallel.parallel == "pipe" else "one plain process sees"
        yield f"{flag}: {why} full sequences; take --parallel fsdp, or --context-parallel 1"
    if options.optimizer.adascale:
        yield (
            f"{flag}: --adascale compares gradients of full sequences, and here each rank has a part of a sequence; "
            "leave one of them out"
        )
    if budget_bytes(parallel.checkpoint_activations) is not None:
        yield (
            f"--checkpoint-activations {parallel.checkpoint_activations}: a plan is measured on full sequences, and "
            f"{flag} divides them; take all or selective"
        )
    if sequence % number or sequence < 2 * number:
        nearest = max(2 * number, sequence // number * number)
        yield (
            f"--sequence {sequence}: {flag} needs a multiple of {number}, {2 * number} or more; take "
            f"--sequence {nearest}"
        )


def expert_parallel_problem(number: int, num_data: int, tensor_parallel: int = 1) -> str:
    """Returns what to say where so many ranks can't divide the experts."""
    ranks = f"{num_data} rank{'s' if num_data > 1 else ''}{_beside(tensor_parallel)}"
    return f"--expert-parallel {number} does not divide {ranks}; take {_divisors(num_data)}"


def _beside(tensor_parallel: int) -> str:
    return f" (of {tensor_parallel} that divide layers each)" if tensor_parallel > 1 else ""


def _pipeline_problems(options: Options, num_ranks: int) -> Iterator[str]:
    parallel, layers = options.parallel, model_config(options).layers
    try:
        shape = pipeline_shape(parallel, num_ranks)
    except InputError as error:
        yield str(error)
        return
    if shape.stages > layers:
        yield (
            f"--schedule {parallel.schedule} on {shape.ranks} ranks has {shape.stages} stages, but the model has "
            f"{layers} blocks; take fewer --ranks, or --layers {shape.stages}"
        )
    yield from _shared_weight_problems(options, shape)
    yield from _solve_problems(options, shape)
    if shape.replicas % parallel.expert_parallel:
        yield (
            f"--expert-parallel {parallel.expert_parallel}: ranks with the same stage divide its experts, and there "
            f"{'is 1 pipeline' if shape.replicas == 1 else f'are {shape.replicas} pipelines'}; take "
            f"{_divisors(shape.replicas)}, or fewer --stages or more --ranks"
        )
    if options.data.batch % shape.replicas:
        yield (
            f"--batch {options.data.batch} does not divide among {shape.replicas} pipelines beside each other "
            f"({num_ranks} ranks, {shape.stages} stages); take a multiple of {shape.replicas}"
        )


def _shared_weight_problems(options: Options, shape: PipelineShape) -> Iterator[str]:
    """A weight of two stages on one rank would be sharded, and reduced, twice."""
    parallel = options.parallel
    if options.model.untied_embeddings or parallel.data_parallel != "fsdp" or shape.replicas == 1 or shape.stages == 1:
        return
    placement = get_schedule(parallel.schedule, shape.ranks, parallel.chunks, shape.stages_per_rank).placement
    if placement.rank_of[0] == placement.rank_of[-1]:
        yield (
            f"--data-parallel fsdp with --schedule {parallel.schedule}: the first and the last stage share the "
            "embedding's weight and are on one rank, where it would be reduced twice; take --data-parallel ddp, or "
            "--schedule 1f1b"
        )


def _solve_problems(options: Options, shape: PipelineShape) -> Iterator[str]:
    """Each pipeline solves its own schedule; ranks that communicate in each micro-batch would wait for each other."""
    parallel = options.parallel
    if parallel.schedule != SOLVE:
        return
    reasons = []
    if parallel.tensor_parallel > 1:
        reasons.append((f"--tensor-parallel {parallel.tensor_parallel}", "--tensor-parallel 1"))
    if shape.replicas > 1 and options.model.experts:
        reasons.append((f"--experts {options.model.experts}", "as many --ranks as one pipeline has"))
    if shape.replicas > 1 and parallel.data_parallel == "fsdp":
        reasons.append(("--data-parallel fsdp", "--data-parallel ddp"))
    usual = {1: "zb_h1", 2: "zb_v"}.get(shape.stages_per_rank, "interleaved_1f1b")
    for flag, instead in reasons:
        yield (
            f"--schedule solve: each pipeline finds its own order of micro-batches, and {flag} needs the same order in "
            f"several; take --schedule {usual}, or {instead}"
        )


def options_without_effect(options: Options) -> list[str]:
    """Returns a line for each option that changes nothing."""
    lines, parallel = [], options.parallel
    if not parallel.sync_each_micro_batch and parallel.parallel not in ("fsdp", "sharded-ddp"):
        lines.append(f"--sync-each-micro-batch has no effect with --parallel {parallel.parallel}")
    elif not parallel.sync_each_micro_batch and parallel.accumulate == 1:
        lines.append("--sync-each-micro-batch has no effect without --accumulate 2 or more")
    shards = parallel.parallel == "fsdp" or (parallel.parallel == "pipe" and parallel.data_parallel == "fsdp")
    if not parallel.reshard_after_forward and not shards:
        combination = f" and --data-parallel {parallel.data_parallel}" if parallel.parallel == "pipe" else ""
        lines.append(f"--reshard-after-forward has no effect with --parallel {parallel.parallel}{combination}")
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
