"""The ways to train that a plan compares, each with what to type and what to write."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from scale_tools.plan.options import PlanOptions
from scale_train.errors import InputError
from scale_train.options import ParallelOptions

Parallel = Literal[
    "none", "ddp", "oss", "sharded-ddp", "fsdp", "fsdp-offload", "tensor-parallel", "context-parallel", "pipe"
]
Checkpointing = Literal["none", "selective", "all"]
"""What is recomputed in the backward pass, in the words of `scale-train lm --checkpoint-activations`."""

NAMED_BLOCKS = "scale_fsdp.class_policy('Block')"
"""Which modules of a model by name are sharded one by one."""

MAX_MODEL_RANKS = 8
"""Tensor and pipeline parallelism stay inside a machine of so many devices."""


@dataclass(frozen=True)
class Strategy:
    """One way to train.

    Attributes:
        parallel: The technique; "tensor-parallel" has fsdp between its groups, "context-parallel" fsdp over all ranks,
            and "fsdp-offload" keeps shards, gradients and optimizer state on the host.
        ranks: All ranks.
        model_ranks: Ranks that divide layers, or have the stages of one pipeline.
        chunks: Micro-batches of a pipeline.
        checkpoint: What blocks recompute.
        offload: Whether what blocks keep for the backward pass goes to the host.
        expert_ranks: Ranks that divide the experts of a block; each expert is sharded over those that have it.
        tensor_ranks: Of a pipeline, ranks that divide the layers of each stage.
        shards_stages: Of several pipelines, whether they shard each stage, as fsdp, or have it whole, as ddp.
        context_ranks: Ranks that divide each sequence.
        stages_per_rank: Of a pipeline; with several its schedule is interleaved 1F1B. Then only its time is planned.
    """

    parallel: Parallel
    ranks: int
    model_ranks: int = 1
    chunks: int = 1
    checkpoint: Checkpointing = "none"
    offload: bool = False
    expert_ranks: int = 1
    tensor_ranks: int = 1
    shards_stages: bool = False
    context_ranks: int = 1
    stages_per_rank: int = 1

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of them, that have a part of the batch each."""
        return self.ranks // (self.model_ranks * self.tensor_ranks * self.context_ranks)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The arguments of a `ParallelDims` of its ranks; the other axes have one rank, or what is left."""
        stages, tensor = (self.model_ranks, self.tensor_ranks) if self.parallel == "pipe" else (1, self.model_ranks)
        sizes = {"cp": self.context_ranks, "tp": tensor, "pp": stages, "ep": self.expert_ranks}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def has_host_memory(self) -> bool:
        """Whether something of it is kept on the host."""
        return self.offload or self.parallel == "fsdp-offload"

    @property
    def title(self) -> str:
        name = {"none": "one process", "tensor-parallel": f"tensor-parallel {self.model_ranks} x fsdp"}.get(
            self.parallel, self.parallel
        )
        if self.parallel == "tensor-parallel" and self.data_ranks == 1:
            name = f"tensor-parallel {self.model_ranks}"
        if self.parallel == "context-parallel":
            name = f"tensor-parallel {self.model_ranks} x " if self.model_ranks > 1 else ""
            name += f"context-parallel {self.context_ranks} x fsdp"
        if self.parallel == "pipe":
            name = f"tensor-parallel {self.tensor_ranks} x " if self.tensor_ranks > 1 else ""
            name += f"pipe of {self.model_ranks}"
            kind = "fsdp of " if self.shards_stages else ""
            name += f" x {kind}{self.data_ranks}" if self.data_ranks > 1 else ""
        name += f", experts over {self.expert_ranks}" if self.expert_ranks > 1 else ""
        name += {"none": "", "all": ", checkpointed", "selective": ", selectively checkpointed"}[self.checkpoint]
        return f"{name}, activations offloaded" if self.offload else name

    def parallel_options(self, precision: Literal["fp32", "bf16", "fp16"]) -> ParallelOptions:
        """Returns the strategy as `scale-train lm` has it."""
        is_pipe = self.parallel == "pipe"
        # Layers that all ranks divide leave nothing to shard: ddp of one rank is the plain model.
        others: dict[str, Any] = {"tensor-parallel": "fsdp" if self.data_ranks > 1 else "ddp"}
        others |= {"fsdp-offload": "fsdp", "context-parallel": "fsdp"}
        return ParallelOptions(
            ranks=self.ranks,
            parallel=others.get(self.parallel, self.parallel),
            precision=precision,
            checkpoint_activations=self.checkpoint,
            offload_activations=self.offload,
            tensor_parallel=self.tensor_ranks if is_pipe else self.model_ranks,
            context_parallel=self.context_ranks,
            expert_parallel=self.expert_ranks,
            stages=self.model_ranks if is_pipe else None,
            chunks=self.chunks if is_pipe else ParallelOptions.chunks,
            data_parallel="fsdp" if self.shards_stages else "ddp",
            cpu_offload=self.parallel == "fsdp-offload",
        )

    def command(self, options: PlanOptions, size: str | None) -> str | None:
        """What to type; None where `scale-train lm` has no such model."""
        if options.config is not None:
            words = ["scale-train lm", f"--model {shlex.quote(str(options.config))}"]
        elif size is not None:
            words = ["scale-train lm", f"--size {size}"]
        else:
            return None
        for flag, value in (("--layers", options.layers), ("--width", options.width), ("--heads", options.heads)):
            words += [f"{flag} {value}"] if value is not None else []
        words += [f"--experts {options.experts} --top-k {options.top_k}"] if options.experts else []
        words += [f"--expert-parallel {self.expert_ranks}"] if self.expert_ranks > 1 else []
        words += [f"--ranks {self.ranks}"]
        match self.parallel:
            case "tensor-parallel":
                # Alone it has nothing to shard: ddp of one rank is the plain model.
                words += [f"--parallel {'fsdp' if self.data_ranks > 1 else 'ddp'}"]
                words += [f"--tensor-parallel {self.model_ranks}"]
            case "context-parallel":
                words += [f"--parallel fsdp --context-parallel {self.context_ranks}"]
                words += [f"--tensor-parallel {self.model_ranks}"] if self.model_ranks > 1 else []
            case "pipe":
                words += [f"--parallel pipe --stages {self.model_ranks} --chunks {self.chunks}"]
                words += [f"--tensor-parallel {self.tensor_ranks}"] if self.tensor_ranks > 1 else []
                words += ["--data-parallel fsdp"] if self.shards_stages else []
            case "fsdp-offload":
                words += ["--parallel fsdp --cpu-offload"]
            case _:
                words += [f"--parallel {self.parallel}"]
        words += [f"--batch {options.batch} --sequence {options.sequence} --precision {options.precision}"]
        words += [f"--loss-chunk {options.loss_chunk}"] if options.loss_chunk else []
        words += {"none": [], "all": ["--checkpoint-activations"]}.get(
            self.checkpoint, [f"--checkpoint-activations {self.checkpoint}"]
        )
        words += ["--offload-activations"] if self.offload else []
        return " ".join(words)

    def python(self, precision: str, *, with_experts: bool = False, policy: str = NAMED_BLOCKS) -> list[str]:
        """What to write around a model, with experts or without, line by line; `policy` names its blocks."""
        lines = [line.replace(NAMED_BLOCKS, policy) for line in self._techniques(precision)]
        sizes = self.axis_sizes
        if with_experts and ("ep" in sizes or "tp" in sizes):
            lines = ["model = build()  # its layers with MoE(..., process_group=dims)", *lines]
        if sizes:
            arguments = ", ".join(f"{name}={size}" for name, size in sizes.items())
            lines = [f"dims = scale_core.ParallelDims({arguments})", *lines]
        return [*self._checkpointing(), *lines]

    def _techniques(self, precision: str) -> list[str]:
        match self.parallel:
            case "none" | "ddp" | "oss" | "sharded-ddp":
                lines = self._replicated(precision)
            case "pipe":
                lines = self._pipeline(precision)
            case "tensor-parallel" if self.data_ranks == 1:
                lines = [_DIVIDED_LAYERS, _ADAMW, *_scaler(precision), *_autocast(precision)]
            case _:
                lines = self._sharded(precision)
        return lines

    def _checkpointing(self) -> list[str]:
        kept = {"none": "offload" if self.offload else "", "all": "recompute", "selective": "selective"}
        how = [f"'{kept[self.checkpoint]}'", *["offload_inputs=True"] * (self.offload and self.checkpoint != "none")]
        lines = [f"for block in blocks: scale_checkpoint.apply_checkpointing(block, {', '.join(how)})"]
        return lines if kept[self.checkpoint] else []

    def _replicated(self, precision: str) -> list[str]:
        """Each rank has all parameters."""
        ddp = "model = DistributedDataParallel(model, gradient_as_bucket_view=True)"
        oss = "optimizer = scale_oss.OSS(model.parameters(), torch.optim.AdamW, lr=lr, fused=True)"
        wrapped = {
            "ddp": [ddp, _ADAMW],
            "oss": [oss, ddp],
            "sharded-ddp": [oss, "model = scale_oss.ShardedDataParallel(model, optimizer)"],
        }
        return [*wrapped.get(self.parallel, [_ADAMW]), *_scaler(precision), *_autocast(precision)]

    def _pipeline(self, precision: str) -> list[str]:
        lines = [_DIVIDED_LAYERS] * (self.tensor_ranks > 1)
        lines += [
            f"pipe = scale_pipe.DistributedPipe(scale_pipe.split(model, cuts), '1f1b', chunks={self.chunks}, "
            "process_group=dims)"
        ]
        step = f"loss = pipe.step(tokens, targets{', loss_fn=scaler.scale' * (precision == 'fp16')})"
        if self.shards_stages:
            units = ", ".join(["stage", NAMED_BLOCKS, "mesh=dims", *_policy(precision)])
            lines += self._sharded_experts(_policy(precision))
            lines += [f"for stage in pipe.stages.values(): scale_fsdp.fully_shard_modules({units})"]
        else:
            average = "scale_moe.average_replicated_gradients(stage, dims)"
            lines += [f"for stage in pipe.stages.values(): {average}"] * (self.expert_ranks > 1)
            replica = "DistributedDataParallel(pipe.stages[index], process_group=dims.process_group('edp'))"
            replicas = self.data_ranks // self.expert_ranks
            lines += [f"for index in pipe.stages: pipe.stages[index] = {replica}"] * (replicas > 1)
        steps = [step] if self.shards_stages else _autocast(precision, step) or [step]
        return [*lines, _ADAMW.replace("model", "pipe"), *_scaler(precision), *steps]

    def _sharded(self, precision: str) -> list[str]:
        """fsdp, by itself or between ranks that divide layers, sequences or experts."""
        lines = [_DIVIDED_LAYERS] * (self.model_ranks > 1)
        mesh = ["mesh=dims"] * bool(self.axis_sizes)
        policies = _policy(precision) + ["offload_policy=CPUOffloadPolicy()"] * (self.parallel == "fsdp-offload")
        lines += self._sharded_experts(policies)
        units = ", ".join(["model", NAMED_BLOCKS, *mesh, *policies])
        lines += [f"scale_fsdp.fully_shard_modules({units})", _ADAMW, *_scaler(precision)]
        if self.context_ranks > 1:
            loss = "model(tokens, targets, positions=positions)"
            lines += [
                "tokens, targets = (scale_tp.split_sequence(each, dims) for each in (tokens, targets))",
                "positions = scale_tp.position_ids(sequence, dims, device=device)",
                "with scale_tp.context_parallel(dims):",
                f"    {f'scaler.scale({loss})' if precision == 'fp16' else loss}.backward()",
            ]
        return lines

    def _sharded_experts(self, policies: list[str]) -> list[str]:
        """Experts that ranks divide are sharded among those that have the same ones."""
        experts = ", ".join(["block.moe.experts", "dims", *policies])
        return [f"for block in blocks: scale_fsdp.fully_shard({experts})"] * (self.expert_ranks > 1)


_ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)"
_DIVIDED_LAYERS = "scale_tp.parallelize(model, plan, dims)  # plan None: the model's _tp_plan"
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def _policy(precision: str) -> list[str]:
    """The argument by which sharded units compute in a lower precision."""
    if precision not in _DTYPES:
        return []
    return [f"mp_policy=MixedPrecisionPolicy(param_dtype={_DTYPES[precision]}, reduce_dtype=torch.float32)"]


def _scaler(precision: str) -> list[str]:
    line = "scaler = scale_core.ShardedGradScaler()  # its scale(loss), step(optimizer) and update()"
    return [line] * (precision == "fp16")


def _autocast(precision: str, step: str = "loss = loss_of(model, batch)") -> list[str]:
    """The step of a model that does not cast by itself."""
    return [f"with torch.autocast(device.type, {_DTYPES[precision]}): {step}"] if precision in _DTYPES else []


def strategies(options: PlanOptions, num_layers: int | None) -> list[Strategy]:
    """Returns what can be compared: each technique on each number of ranks, with each way to keep activations.

    Offloaded activations are not among them: `with_offload` gives them, where they are needed.

    Raises:
        InputError: Nothing is left: the batch divides among none of them, or `only` names none.
    """
    names = ("ddp", "oss", "sharded-ddp", "fsdp", "fsdp-offload", "tensor-parallel", "context-parallel", "pipe")
    for name in options.only:
        if name not in names:
            raise InputError(f"--only {name}: no such way of training; there are {', '.join(names)}")
    possible = [each for ranks in options.ranks for each in _all(options, ranks, num_layers)]
    found = [each for each in possible if not options.only or each.parallel in options.only]
    ranks = " ".join(map(str, options.ranks))
    if not found and possible:
        raise InputError(
            f"--only {' '.join(options.only)}: not possible for this model on {ranks} ranks with --batch "
            f"{options.batch}; there are {', '.join(sorted({each.parallel for each in possible}))}"
        )
    if not found:
        raise InputError(
            f"--batch {options.batch} with --ranks {ranks}: nothing to compare; take a batch that the ranks "
            f"divide, such as {options.ranks[0]}"
        )
    return found


def with_offload(strategy: Strategy) -> Strategy | None:
    """Returns the same with activations on the host; None where that is not planned, or is so already.

    It is planned where `fully_shard` casts the parameters, and sequences are whole.
    """
    casts_itself = strategy.parallel in ("fsdp", "fsdp-offload")
    casts_itself |= strategy.parallel == "tensor-parallel" and strategy.data_ranks > 1
    return replace(strategy, offload=True) if casts_itself and not strategy.offload else None


def _all(options: PlanOptions, ranks: int, num_layers: int | None) -> Iterator[Strategy]:
    kept: dict[str, Checkpointing] = {"keep": "none", "selective": "selective", "all": "all"}
    for checkpoint in (kept[each] for each in ("keep", "selective", "all") if each in options.activations):
        for each in _techniques(options, ranks, num_layers):
            yield replace(each, checkpoint=checkpoint)
            if divided := _with_divided_experts(each, options.expert_parallel):
                yield replace(divided, checkpoint=checkpoint)


def _with_divided_experts(strategy: Strategy, expert_ranks: int) -> Strategy | None:
    """Returns the same with experts that so many ranks divide; None where that is not planned, or they can't."""
    ways = ("fsdp", "fsdp-offload", "tensor-parallel", "context-parallel", "pipe")
    if expert_ranks == 1 or strategy.parallel not in ways:
        return None
    # The ranks of the context axis see other tokens, and divide experts as well.
    axis = strategy.data_ranks * strategy.context_ranks
    return None if axis % expert_ranks else replace(strategy, expert_ranks=expert_ranks)


def _techniques(options: PlanOptions, ranks: int, num_layers: int | None) -> Iterator[Strategy]:
    batch = options.batch
    if ranks == 1:
        yield Strategy("none", 1)
        yield Strategy("fsdp-offload", 1)
        return
    if batch % ranks == 0:
        for parallel in ("ddp", "oss", "sharded-ddp", "fsdp", "fsdp-offload"):
            yield Strategy(parallel, ranks)
    inside = min(ranks_per_host(options, ranks), MAX_MODEL_RANKS)
    for model_ranks in sorted({2, inside}):
        if model_ranks > 1 and ranks % model_ranks == 0 and batch % (ranks // model_ranks) == 0:
            yield Strategy("tensor-parallel", ranks, model_ranks)
    if num_layers is not None:  # A model by name, which takes positions, and has blocks to cut at.
        yield from _divided_sequences(options, ranks, inside)
        yield from _pipelines(options, ranks, num_layers)


def _divided_sequences(options: PlanOptions, ranks: int, inside: int) -> Iterator[Strategy]:
    """Sequences that two ranks, all of a machine, or two with layers that two ranks divide, have a part of each."""
    for model_ranks, context_ranks in sorted({(1, 2), (1, inside), (2, 2)}):
        divided = model_ranks * context_ranks
        if context_ranks == 1 or ranks % divided or options.batch % (ranks // divided) or divided > inside:
            continue
        if options.sequence % context_ranks == 0 and options.sequence >= 2 * context_ranks:
            yield Strategy("context-parallel", ranks, model_ranks, context_ranks=context_ranks)


def _pipelines(options: PlanOptions, num_ranks: int, num_layers: int) -> Iterator[Strategy]:
    """Pipelines of as many stages as a machine has room for, and of half as many with layers that two ranks divide.

    Where there are several pipelines, stages are whole, or sharded among them.
    """
    for tensor_ranks in (1, 2):
        ranks = num_ranks // tensor_ranks
        stages = largest_divisor(ranks, min(MAX_MODEL_RANKS // tensor_ranks, num_layers))
        if num_ranks % tensor_ranks or stages == 1 or options.batch % (ranks // stages):
            continue
        chunks = largest_divisor(options.batch * stages // ranks, 4 * stages)
        for shards_stages in (False, True) if ranks > stages else (False,):
            yield Strategy("pipe", num_ranks, stages, chunks, tensor_ranks=tensor_ranks, shards_stages=shards_stages)
    # The three axes of eight ranks and more.
    ranks = num_ranks // 4
    if num_ranks % 8 == 0 and num_ranks <= MAX_MODEL_RANKS and num_layers > 1 and options.batch % ranks == 0:
        chunks = largest_divisor(options.batch // ranks, 8)
        yield Strategy("pipe", num_ranks, 2, chunks, tensor_ranks=2, shards_stages=True)


def ranks_per_host(options: PlanOptions, ranks: int) -> int:
    """Returns how many devices share the memory of one machine."""
    return min(options.ranks_per_host or MAX_MODEL_RANKS, ranks)


def largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number that is at most `most`.

    >>> largest_divisor(12, 8), largest_divisor(7, 4)
    (6, 1)
    """
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
