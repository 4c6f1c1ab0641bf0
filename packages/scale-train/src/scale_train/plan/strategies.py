"""The ways to train that a plan compares, each with what to type and what to write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from scale_train.errors import InputError
from scale_train.plan.options import PlanOptions

Parallel = Literal["none", "ddp", "oss", "sharded-ddp", "fsdp", "fsdp-offload", "tensor-parallel", "pipe"]

MAX_MODEL_RANKS = 8
"""Tensor and pipeline parallelism stay inside a machine of so many devices."""


@dataclass(frozen=True)
class Strategy:
    """One way to train.

    Attributes:
        parallel: The technique; "tensor-parallel" has fsdp between its groups, and "fsdp-offload" keeps shards,
            gradients and optimizer state on the host.
        ranks: All ranks.
        model_ranks: Ranks that divide layers, or have the stages of one pipeline.
        chunks: Micro-batches of a pipeline.
        recompute: Whether blocks are checkpointed.
        expert_ranks: Ranks that divide the experts of a block; each expert is sharded over the others.
        tensor_ranks: Of a pipeline, ranks that divide the layers of each stage.
        shards_stages: Of several pipelines, whether they shard each stage, as fsdp, or have it whole, as ddp.
    """

    parallel: Parallel
    ranks: int
    model_ranks: int = 1
    chunks: int = 1
    recompute: bool = False
    expert_ranks: int = 1
    tensor_ranks: int = 1
    shards_stages: bool = False

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of them, that have a part of the batch each."""
        return self.ranks // (self.model_ranks * self.tensor_ranks)

    @property
    def title(self) -> str:
        name = {"none": "one process", "tensor-parallel": f"tensor-parallel {self.model_ranks} x fsdp"}.get(
            self.parallel, self.parallel
        )
        if self.parallel == "tensor-parallel" and self.data_ranks == 1:
            name = f"tensor-parallel {self.model_ranks}"
        if self.parallel == "pipe":
            name = f"tensor-parallel {self.tensor_ranks} x " if self.tensor_ranks > 1 else ""
            name += f"pipe of {self.model_ranks}"
            kind = "fsdp of " if self.shards_stages else ""
            name += f" x {kind}{self.data_ranks}" if self.data_ranks > 1 else ""
        name += f", experts over {self.expert_ranks}" if self.expert_ranks > 1 else ""
        return f"{name}, checkpointed" if self.recompute else name

    def command(self, options: PlanOptions, size: str | None) -> str | None:
        """What to type; None where `scale-train lm` has no such model."""
        if size is None:
            return None
        words = ["scale-train lm", f"--size {size}"]
        for flag, value in (("--layers", options.layers), ("--width", options.width), ("--heads", options.heads)):
            words += [f"{flag} {value}"] if value is not None else []
        words += [f"--experts {options.experts} --top-k {options.top_k}"] if options.experts else []
        words += [f"--expert-parallel {self.expert_ranks}"] if self.expert_ranks > 1 else []
        words += [f"--ranks {self.ranks}"]
        match self.parallel:
            case "tensor-parallel":
                words += [f"--parallel fsdp --tensor-parallel {self.model_ranks}"]
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
        words += ["--checkpoint-activations"] if self.recompute else []
        return " ".join(words)

    def python(self, precision: str) -> list[str]:
        """What to write around a model, line by line."""
        lines = ["for block in blocks: scale_checkpoint.apply_checkpointing(block, 'recompute')"] * self.recompute
        bf16 = precision == "bf16"
        policy = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        sharding = [policy] * bf16
        autocast = ["with torch.autocast(device.type, torch.bfloat16): loss = loss_of(model, batch)"] * bf16
        adamw = "optimizer = torch.optim.AdamW(model.parameters(), lr=lr)"
        ddp = "model = DistributedDataParallel(model, gradient_as_bucket_view=True)"
        oss = "optimizer = scale_oss.OSS(model.parameters(), torch.optim.AdamW, lr=lr)"
        match self.parallel:
            case "none":
                return [*lines, adamw, *autocast]
            case "ddp":
                return [
                    *lines,
                    "model = DistributedDataParallel(model, gradient_as_bucket_view=True)",
                    adamw,
                    *autocast,
                ]
            case "oss":
                return [*lines, oss, ddp, *autocast]
            case "sharded-ddp":
                return [*lines, oss, "model = scale_oss.ShardedDataParallel(model, optimizer)", *autocast]
            case "pipe":
                lines += ["scale_tp.parallelize(model, plan, mesh['tensor'])"] * (self.tensor_ranks > 1)
                lines += [
                    f"pipe = scale_pipe.DistributedPipe(scale_pipe.split(model, cuts), '1f1b', chunks={self.chunks}, "
                    "process_group=mesh['pipe'].get_group())"
                ]
                call = "loss = pipe.step(tokens, targets)"
                if self.shards_stages:
                    units = ", ".join(["stage", "scale_fsdp.class_policy(Block)", "mesh=mesh['data']", *sharding])
                    lines += [f"for stage in pipe.stages.values(): scale_fsdp.fully_shard_modules({units})"]
                else:
                    replica = "DistributedDataParallel(pipe.stages[index], process_group=mesh['data'].get_group())"
                    lines += [f"for index in pipe.stages: pipe.stages[index] = {replica}"] * (self.data_ranks > 1)
                    call = f"with torch.autocast(device.type, torch.bfloat16): {call}" if bf16 else call
                return [*lines, adamw.replace("model", "pipe"), call]
            case "tensor-parallel":
                lines += ["scale_tp.parallelize(model, plan, mesh['model'])"]
                sharding = ["mesh=mesh['data']", *sharding]
                if self.data_ranks == 1:
                    return [*lines, adamw, *autocast]
            case "fsdp-offload":
                sharding += ["offload_policy=CPUOffloadPolicy()"]
        if self.expert_ranks > 1:
            experts = ", ".join(["block.moe.experts", "mesh['replica']", *[policy] * bf16])
            sizes = f"({self.ranks // self.expert_ranks}, {self.expert_ranks})"
            lines += [
                f"mesh = init_device_mesh(device.type, {sizes}, mesh_dim_names=('replica', 'expert'))",
                "model = build()  # its layers with MoE(..., process_group=mesh['expert'])",
                f"for block in blocks: scale_fsdp.fully_shard({experts})",
            ]
        units = ", ".join(["model", "scale_fsdp.class_policy(Block)", *sharding])
        return [*lines, f"scale_fsdp.fully_shard_modules({units})", adamw]


def strategies(options: PlanOptions, num_layers: int | None) -> list[Strategy]:
    """Returns what can be compared: each technique, with blocks kept and with blocks checkpointed.

    Raises:
        InputError: Nothing is left: the batch divides among none of them, or `only` names none.
    """
    names = ("ddp", "oss", "sharded-ddp", "fsdp", "fsdp-offload", "tensor-parallel", "pipe")
    for name in options.only:
        if name not in names:
            raise InputError(f"--only {name}: no such way of training; there are {', '.join(names)}")
    found = [
        strategy
        for strategy in _all(options, num_layers)
        if not options.only or strategy.parallel in options.only or (strategy.parallel == "none" and not options.only)
    ]
    if not found and options.only and list(_all(options, num_layers)):
        raise InputError(
            f"--only {' '.join(options.only)}: not possible for this model on {options.ranks} ranks with --batch "
            f"{options.batch}; there are {', '.join(sorted({each.parallel for each in _all(options, num_layers)}))}"
        )
    if not found:
        raise InputError(
            f"--batch {options.batch} with --ranks {options.ranks}: nothing to compare; take a batch that the ranks "
            f"divide, such as {options.ranks}"
        )
    return found


def _all(options: PlanOptions, num_layers: int | None) -> Iterator[Strategy]:
    ranks, batch = options.ranks, options.batch
    for recompute in (False, True):
        if ranks == 1:
            yield Strategy("none", 1, recompute=recompute)
            if not options.experts:
                yield Strategy("fsdp-offload", 1, recompute=recompute)
            continue
        if batch % ranks == 0:
            for parallel in ("ddp", "oss", "sharded-ddp", "fsdp", "fsdp-offload"):
                if parallel == "fsdp-offload" and options.experts:
                    continue  # Grouped products have no kernel for what stands in for a device beside the host.
                yield Strategy(parallel, ranks, recompute=recompute)
            if options.expert_parallel > 1:
                yield Strategy("fsdp", ranks, recompute=recompute, expert_ranks=options.expert_parallel)
        if options.experts:
            continue  # What divides layers, and cuts models, knows no experts here.
        inside = ranks_per_host(options)
        for model_ranks in sorted({2, min(inside, MAX_MODEL_RANKS)}):
            if model_ranks > 1 and ranks % model_ranks == 0 and batch % (ranks // model_ranks) == 0:
                yield Strategy("tensor-parallel", ranks, model_ranks, recompute=recompute)
        if num_layers is not None:
            yield from _pipelines(options, num_layers, recompute)


def _pipelines(options: PlanOptions, num_layers: int, recompute: bool) -> Iterator[Strategy]:
    """Pipelines of as many stages as a machine has room for, and of half as many with layers that two ranks divide.

    Where there are several pipelines, stages are whole, or sharded among them.
    """
    for tensor_ranks in (1, 2):
        ranks = options.ranks // tensor_ranks
        stages = largest_divisor(ranks, min(MAX_MODEL_RANKS // tensor_ranks, num_layers))
        if options.ranks % tensor_ranks or stages == 1 or options.batch % (ranks // stages):
            continue
        chunks = largest_divisor(options.batch * stages // ranks, 4 * stages)
        for shards_stages in (False, True) if ranks > stages else (False,):
            yield Strategy(
                "pipe", options.ranks, stages, chunks, recompute, tensor_ranks=tensor_ranks, shards_stages=shards_stages
            )
    # The three axes of eight ranks and more.
    ranks = options.ranks // 4
    if options.ranks % 8 == 0 and options.ranks <= MAX_MODEL_RANKS and num_layers > 1 and options.batch % ranks == 0:
        chunks = largest_divisor(options.batch // ranks, 8)
        yield Strategy("pipe", options.ranks, 2, chunks, recompute, tensor_ranks=2, shards_stages=True)


def ranks_per_host(options: PlanOptions) -> int:
    """Returns how many devices share the memory of one machine."""
    return options.ranks_per_host or min(options.ranks, MAX_MODEL_RANKS)


def largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number that is at most `most`.

    >>> largest_divisor(12, 8), largest_divisor(7, 4)
    (6, 1)
    """
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
