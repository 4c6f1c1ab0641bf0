"""Everything that can be asked of a training, as frozen dataclasses, and the checks that need no tensor.

The command line is made from these classes, and every rank gets them whole. `check` runs before any rank starts, so
that wrong input costs a second and one line, not a start-up and one traceback per rank.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from scale_pipe.distributed.building import schedule_for
from scale_train.errors import InputError
from scale_train.model import SIZES, ModelConfig

# A core can play several ranks, slowly; beyond this the ranks mostly wait for each other.
MAX_RANKS_PER_CORE = 4


@dataclass(frozen=True)
class DataOptions:
    """What is read, and how much of it in a step."""

    text: tuple[Path, ...] = ()
    """Files or folders to learn from (folders in them named test or tests are skipped); by default
    the sources of Python's own standard library."""
    sequence: int = 128
    """Tokens (bytes) in a sequence."""
    batch: int = 32
    """Sequences in a step, of all ranks together."""
    held_out_tokens: int = 65_536
    """Most tokens of the held-out text that one evaluation reads; 0 for all."""


@dataclass(frozen=True)
class ModelOptions:
    """The model: a size by name, any number of it changed."""

    size: str = "tiny"
    """tiny, small, gpt3-125m, -350m, -760m, -1.3b, -2.7b, -6.7b, -13b or -175b."""
    layers: int | None = None
    """Blocks, if not the size's."""
    width: int | None = None
    """Features, if not the size's."""
    heads: int | None = None
    """Attention heads, if not the size's."""
    tied: bool = True
    """Use the embedding's weight for the output layer too."""
    dropout: float = 0.0
    """Part of each residual branch that is zeroed in training."""
    loss_chunk: int = 0
    """Tokens whose logits exist at one time; 0 for all."""


@dataclass(frozen=True)
class ParallelOptions:
    """How the work is divided."""

    ranks: int | None = None
    """Local ranks to start; by default every GPU, or two ranks on a CPU of several cores. Not under torchrun."""
    parallel: Literal["fsdp", "sharded-ddp", "oss", "ddp", "pipe", "none"] = "fsdp"
    """fsdp shards parameters, gradients and optimizer state; sharded-ddp gradients and state; oss the state alone; ddp
    keeps all of it whole on each rank; pipe puts some of the blocks on each rank; none is one plain process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What the model computes in; the optimizer always works in fp32."""
    accumulate: int = 1
    """Micro-batches that a rank's part of the batch is cut into."""
    no_sync: bool = False
    """With fsdp or sharded-ddp, and --accumulate: keep whole gradients until the last micro-batch. Fewer bytes sent,
    more memory."""
    checkpoint_activations: str = "none"
    """Recompute blocks' activations in the backward pass instead of keeping them: all, or selective, which keeps the
    results of linear layers and attention, or budget:2GiB, which plans what fits into that much memory of a device.
    Without a word it means all."""
    offload_activations: bool = False
    """Move the activations that blocks keep to the memory of the host until the backward pass."""
    tensor_parallel: int = 1
    """Ranks that divide the layers of each block between them; --parallel says what the others do. With fsdp, a rank
    then makes the whole model before it is divided."""
    sequence_parallel: bool = False
    """With --tensor-parallel: between the divided layers each rank has a part of the sequence. Less memory."""
    stages: int | None = None
    """pipe: parts that the model is cut into; by default what the schedule is made for, on all ranks. With more ranks
    than those take there are several pipelines beside each other, each with its part of the batch."""
    schedule: str = "1f1b"
    """pipe: gpipe, 1f1b, interleaved_1f1b, looped_breadth_first, zb_h1, zb_v, v_half, v_min, dual_pipe_v; or solve,
    which measures a step and finds one for it."""
    chunks: int = 8
    """pipe: micro-batches that the batch is cut into."""
    reshard_after_forward: bool = True
    """fsdp: release each block's parameters between its forward and its backward pass."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW and its learning rate."""

    steps: int = 400
    """Steps of the whole training, those before a resume included."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup: int = 20
    """Steps until the peak; half a cosine follows, down to a tenth."""
    weight_decay: float = 0.1
    """Of the matrices; norms and biases have none."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    fused: bool = True
    """torch's fused kernel: much faster, and equal to the plain one to some 2 units in the last place."""
    adascale: bool = False
    """Take --lr, --warmup and --steps for those of a smaller batch, and as many useful steps of the whole one as these
    are worth. The smaller batch is a micro-batch of one rank."""
    adascale_scale: float = 0.0
    """With --adascale: how many times --batch is as large as the smaller batch; 0 is ranks times --accumulate."""


@dataclass(frozen=True)
class RunOptions:
    """What is kept and what is shown."""

    seed: int = 0
    """Of the initial weights, the order of the data, and dropout."""
    out: Path | None = None
    """New folder for checkpoints, metrics.jsonl and loss.png; by default scale-runs/lm-N, or that of --resume."""
    resume: Path | None = None
    """Folder of an earlier run, or one of its checkpoints, to go on from."""
    save_every: int = 100
    """Steps between checkpoints; 0 for one at the end only."""
    evaluate_every: int = 100
    """Steps between evaluations; 0 for one at the end only."""
    log_every: int = 10
    """Steps between lines, and between entries of metrics.jsonl."""
    log_format: Literal["auto", "rich", "plain", "json"] = "auto"
    """rich is a progress bar, json is one object per line; auto is rich on a terminal and plain elsewhere."""
    prompt: str = ""
    """What the sample of text at the end continues; by default the start of a file."""
    sample_length: int = 300
    """Bytes of that sample; 0 for none."""


@dataclass(frozen=True)
class Options:
    """Train a GPT on the bytes of real text, and report how well it predicts text that it has not seen."""

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunOptions = field(default_factory=RunOptions)


def device_type(options: Options) -> str:
    """The device to compute on, cpu or cuda.

    Raises:
        InputError: If cuda was asked for and there is none.
    """
    asked = options.parallel.device
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device that torch can use; take --device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def num_local_ranks(options: Options) -> int:
    """How many ranks to start on this machine.

    Raises:
        InputError: If it has fewer devices than that.
    """
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
    """The model that is asked for.

    Raises:
        InputError: If the size has no such name, or its numbers do not fit each other.
    """
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


def check(options: Options, num_ranks: int) -> None:
    """Finds what is wrong before anything starts.

    Raises:
        InputError: If the numbers make no training on `num_ranks` ranks.
    """
    _check_numbers(options)
    model_config(options)
    _check_activations(options.parallel)
    num_data = _check_tensor_parallel(options, num_ranks)
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


class PipelineShape(NamedTuple):
    """How ranks make pipelines.

    Attributes:
        ranks: In each pipeline.
        replicas: Pipelines beside each other, with the same stages and other parts of the batch.
        stages_per_rank: On each rank.
    """

    ranks: int
    replicas: int
    stages_per_rank: int

    @property
    def stages(self) -> int:
        """Of the model."""
        return self.ranks * self.stages_per_rank


def pipeline_shape(options: ParallelOptions, num_ranks: int) -> PipelineShape:
    """How the ranks make pipelines: as few as the stages and the schedule allow.

    Raises:
        InputError: There is no such schedule, or the stages do not suit it.
    """
    stages, refused = options.stages, None
    for ranks in range(num_ranks, min(num_ranks, 2) - 1, -1):
        if num_ranks % ranks or (stages is None and ranks < num_ranks) or (stages is not None and stages % ranks):
            continue
        try:
            schedule = schedule_for(options.schedule, ranks, options.chunks, stages and stages // ranks)
        except ValueError as error:
            refused = refused or error
            continue
        return PipelineShape(ranks, num_ranks // ranks, schedule.num_stages // ranks)
    if refused is not None:
        raise InputError(f"--schedule {options.schedule}, --stages {stages}: {refused}") from refused
    raise InputError(
        f"--stages {stages} does not divide among {num_ranks} ranks; take {num_ranks} or a multiple of it, or, for "
        "several pipelines beside each other, a divisor of it"
    )


def _check_tensor_parallel(options: Options, num_ranks: int) -> int:
    """Returns how many ranks, or groups of ranks that divide layers, see different parts of the batch."""
    number, parallel = options.parallel.tensor_parallel, options.parallel
    if number < 1 or num_ranks % number:
        raise InputError(
            f"--tensor-parallel {number} does not divide {num_ranks} ranks; take "
            f"{' or '.join(str(each) for each in range(1, num_ranks + 1) if num_ranks % each == 0)}"
        )
    if number == 1:
        return num_ranks
    if parallel.parallel == "pipe":
        raise InputError(
            f"--tensor-parallel {number}: layers of a pipeline's stages are not divided; take --parallel fsdp, or "
            "--tensor-parallel 1"
        )
    if budget_bytes(parallel.checkpoint_activations) is not None:
        raise InputError(
            f"--checkpoint-activations {parallel.checkpoint_activations}: a plan is measured on whole layers, and "
            f"--tensor-parallel {number} divides them; take all or selective"
        )
    heads = model_config(options).heads
    if number > heads:
        raise InputError(f"--tensor-parallel {number}: the model has {heads} heads to divide; take at most {heads}")
    return num_ranks // number


def _check_pipeline(options: Options, num_ranks: int) -> None:
    parallel, layers = options.parallel, model_config(options).layers
    shape = pipeline_shape(parallel, num_ranks)
    if shape.stages > layers:
        raise InputError(
            f"--schedule {parallel.schedule} on {num_ranks} ranks has {shape.stages} stages, but the model has "
            f"{layers} blocks; take fewer --ranks, or --layers {shape.stages}"
        )
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


def budget_bytes(choice: str) -> int | None:
    """The bytes of `--checkpoint-activations budget:2GiB`, or None where the choice is another word."""
    found = re.fullmatch(r"budget:(\d+(?:\.\d+)?)([KMG]i?B|B)", choice)
    if found is None:
        return None
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(float(found[1]) * units[found[2]])


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


def without_effect(options: Options) -> list[str]:
    """What was asked for and changes nothing, a line for each."""
    lines, parallel = [], options.parallel
    if parallel.no_sync and parallel.parallel not in ("fsdp", "sharded-ddp"):
        lines.append(f"--no-sync has no effect with --parallel {parallel.parallel}")
    elif parallel.no_sync and parallel.accumulate == 1:
        lines.append("--no-sync has no effect without --accumulate 2 or more")
    if not parallel.reshard_after_forward and parallel.parallel != "fsdp":
        lines.append(f"--no-reshard-after-forward has no effect with --parallel {parallel.parallel}")
    if parallel.sequence_parallel and parallel.tensor_parallel == 1:
        lines.append("--sequence-parallel has no effect without --tensor-parallel 2 or more")
    for flag, is_set in (
        ("--stages", parallel.stages is not None),
        ("--schedule", parallel.schedule != ParallelOptions.schedule),
        ("--chunks", parallel.chunks != ParallelOptions.chunks),
    ):
        if is_set and parallel.parallel != "pipe":
            lines.append(f"{flag} has no effect with --parallel {parallel.parallel}")
    return lines
