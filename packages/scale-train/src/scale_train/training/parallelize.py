"""The GPT under each `--parallel`: mesh axes, tensor parallelism, pipeline stages, checkpointed blocks, and the engine.

The trainer reads the same for all: call the model, go backward, clip, step. What differs is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from scale_checkpoint import BudgetError, apply_checkpointing, apply_plan, plan_memory
from scale_checkpoint.planner.plan import MemoryPlan
from scale_checkpoint.wrapper import How
from scale_core.comm.collectives import all_reduce, broadcast
from scale_core.comm.group import Group, group_of
from scale_core.consistency.all_ranks import CollectiveCall
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.parameters import copy_attributes
from scale_core.shard import full_shape
from scale_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardOptions,
    class_policy,
    fully_shard,
    fully_shard_modules,
    no_split_policy,
)
from scale_fsdp.wrapping.policy import Candidate, Policy
from scale_moe import Experts, MoE, average_replicated_gradients
from scale_moe.mesh_info import ExpertMesh, resolve_expert_mesh
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe, PipelineOptions, split
from scale_tp import context_parallel, position_ids, record_sequence_lengths, split_sequence
from scale_tp.attention_heads import AttentionRule
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import Plan, Style
from scale_tp.split import even_sizes
from scale_train.configuration.derived import budget_bytes
from scale_train.errors import InputError
from scale_train.huggingface.model import TransformersSource
from scale_train.model import GPT, IGNORED, Block, ExpertGroups
from scale_train.model_config import ModelConfig
from scale_train.options import OptimizerOptions, Options, ParallelOptions
from scale_train.resolve import pipeline_shape
from scale_train.training.reporters import ProgressCallback


def tensor_plan(config: ModelConfig) -> Plan:
    """Tensor parallelism of the blocks: two all-reduces in the forward and two in the backward of each.

    The embedding of bytes is small, and is replicated. Experts divide themselves (`ExpertGroups`); shared ones, which
    all tokens pass, are layers like others.
    """
    plan: dict[str, str | Style] = {
        "blocks.*.attention.qkv": Style("outputs", output="part", stacked=3),
        "blocks.*.attention.out": "rowwise",
        r"blocks\.\d+\.(attention|feed)_norm": "replicate",
    }
    if config.experts and not config.shared_experts:
        return plan
    layer = "blocks.*.moe.shared_expert" if config.experts else "blocks.*"
    return plan | {f"{layer}.feed_in": "colwise", f"{layer}.feed_out": "rowwise"}


COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

ATTENTION_RULE = AttentionRule("scale-train's GPT", fused=("qkv",), heads=("heads",))


class MeshAxes(NamedTuple):
    """The groups of a rank on the axes of a mesh: ranks next to each other share the batch of their data rank."""

    data: Group  # averages gradients; has the ranks of the context axis in it, next to each other
    model: Group  # divides layers
    context: Group = Group()  # divides sequences
    stages: Group = Group()  # has the stages of one pipeline
    expert: Group = Group()  # divides experts; a part of the data axis
    expert_data: Group = Group()  # where experts are divided, has the same ones
    expert_mesh: ExpertMesh | None = None  # (expert, model), where layers beside experts are divided

    @property
    def wrapped(self) -> Group:
        """What a wrapper averages over that knows one group: where experts are divided, the ranks with the same ones.

        The rest is then averaged over the expert axis beforehand.
        """
        return self.data if self.expert.size == 1 else self.expert_data

    @property
    def expert_groups(self) -> ExpertGroups:
        """What layers of experts are made with."""
        return ExpertGroups(self.expert if self.expert_mesh is None else self.expert_mesh, self.data)

    @property
    def num_data(self) -> int:
        """How many parts the batch has."""
        return self.data.size // self.context.size

    @property
    def data_rank(self) -> int:
        """Which of these this rank sees."""
        return self.data.rank // self.context.size

    @property
    def dropout_rank(self) -> int:
        """Differs between ranks that draw other numbers: those that divide layers need the same ones."""
        return self.data.rank * self.stages.size + self.stages.rank

    @property
    def adds_loss(self) -> bool:
        """Whether this rank's loss enters the sum over all ranks: one rank for each part of the batch."""
        return self.model.rank == 0 and self.stages.rank == 0


def mesh_axes(group: Group, num_model: int, num_context: int = 1) -> MeshAxes:
    """Returns the axes of this rank, so many ranks on the model and the context axis; called on all ranks."""
    if num_context > 1:
        axes = mesh_axes(group, num_model)
        if num_context == axes.data.size:
            return axes._replace(context=axes.data)
        by_context = torch.tensor(group.ranks).view(-1, num_context, num_model).transpose(1, 2).reshape(-1, num_context)
        return axes._replace(context=group_of(_mesh(group, by_context, ("others", "context"))["context"]))
    if num_model == 1:
        return MeshAxes(group, Group())
    if num_model == group.size:
        return MeshAxes(Group(), group)
    mesh = _mesh(group, torch.tensor(group.ranks).view(-1, num_model), ("data", "model"))
    return MeshAxes(group_of(mesh["data"]), group_of(mesh["model"]))


def parallel_axes(group: Group, options: ParallelOptions, *, with_experts: bool = False) -> MeshAxes:
    """Returns the axes of this rank by the options, and those of experts, if there are any; called on all ranks."""
    if options.parallel == "pipe":
        axes = pipeline_axes(group, options)
    else:
        axes = mesh_axes(group, options.tensor_parallel, options.context_parallel)
    num_expert, num_model = options.expert_parallel, options.tensor_parallel
    if not with_experts or num_expert == num_model == 1:
        return axes
    if num_expert == axes.data.size and num_model == 1:
        return axes._replace(expert=axes.data)
    ranks = torch.tensor(group.ranks).view(-1, num_expert, axes.stages.size, num_model)
    mesh = _mesh(group, ranks, ("expert_data", "expert", "stages", "model"))
    expert_data, expert = (group_of(mesh[name]) for name in ("expert_data", "expert"))
    axes = axes._replace(expert=expert if expert.size > 1 else Group())
    axes = axes._replace(expert_data=expert_data if expert_data.size > 1 else Group())
    return axes if num_model == 1 else axes._replace(expert_mesh=resolve_expert_mesh(mesh["expert", "model"]))


def pipeline_axes(group: Group, options: ParallelOptions) -> MeshAxes:
    """Returns the axes of this rank, data x stages x tensor, the last one of neighbors; called on all ranks."""
    shape = pipeline_shape(options, group.size)
    sizes = {"data": shape.replicas, "stages": shape.ranks, "model": options.tensor_parallel}
    axes = dict.fromkeys(sizes, Group())
    if group.size in sizes.values():
        axes[next(name for name, size in sizes.items() if size == group.size)] = group
    else:
        mesh = _mesh(group, torch.tensor(group.ranks).view(*sizes.values()), tuple(sizes))
        axes |= {name: group_of(mesh[name]) for name, size in sizes.items() if size > 1}
    return MeshAxes(axes["data"], axes["model"], stages=axes["stages"])


def _mesh(group: Group, ranks: Tensor, names: tuple[str, ...]) -> DeviceMesh:
    return DeviceMesh("cpu" if group.backend == "gloo" else "cuda", ranks, mesh_dim_names=names)


def parallelize_blocks(
    model: nn.Module, axes: MeshAxes, *, sequence_parallel: bool, overlap_pieces: int | None = None
) -> None:
    """Shards the layers of the blocks, in place, of a full model that is equal on all ranks.

    A model of transformers is divided by the plan that it carries.
    """
    if axes.model.size > 1:
        parallelize(
            model,
            tensor_plan(model.config) if isinstance(model, GPT) else None,
            axes.model,
            sequence_parallel=sequence_parallel,
            overlap_pieces=overlap_pieces,
            attention_rules=(ATTENTION_RULE,),
        )


class PipelineEngine(nn.Module):
    """A GPT in stages on several ranks; methods are called on all ranks, those of a pipeline with the same batch.

    The model is split at blocks, and each rank materializes its own stages; a model whose layers are divided is given
    with values. Several pipelines have each their part of the batch, and the ranks that have the same stage in all of
    them average its gradients once per step, or shard it. Checkpoints have the names of the whole model, a tied weight
    its first one, so that any number of stages, and any other --parallel, resumes from them.
    """

    def __init__(self, model: GPT, options: ParallelOptions, axes: MeshAxes, device: torch.device) -> None:
        super().__init__()
        self.config, self.device, self.group = model.config, device, axes.stages
        self._divides_sequence = axes.model if options.sequence_parallel else Group()
        stages_per_rank = pipeline_shape(options, axes.num_data * axes.stages.size * axes.model.size).stages_per_rank
        self._experts = axes.expert if options.data_parallel == "ddp" else Group()
        self.shapes = {name: list(full_shape(param)) for name, param in model.named_parameters()}
        # In a checkpoint a tied parameter is there once.
        first = {param: name for name, param in model.named_parameters()}
        self._saved_names = {name: first[param] for name, param in model.named_parameters(remove_duplicate=False)}
        self.pipe = DistributedPipe(
            split(model, stage_boundaries(len(model.blocks), stages_per_rank * self.group.size)),
            options.schedule,
            chunks=options.chunks,
            options=PipelineOptions(stages_per_rank=stages_per_rank),
            process_group=self.group,
            device=device,
        )
        materialize_stages(model, self.pipe.stages.values(), device)
        for index, stage in self.pipe.stages.items():
            if options.data_parallel == "fsdp" and axes.data.size > 1:
                shard_stage(stage, model, axes, options)
            elif options.data_parallel == "ddp" and axes.wrapped.size > 1:
                self.pipe.stages[index] = DistributedDataParallel(stage, process_group=axes.wrapped.process_group)

    def step(self, tokens: Tensor, targets: Tensor, scaler: ShardedGradScaler) -> Tensor:
        """Computes the gradients of a batch's mean loss, scaled, where there are none yet; returns the loss, a scalar.

        They are those of this rank's parameters, averaged over all pipelines.
        """
        self._record_lengths(tokens)
        batch = tokens.to(self.device), targets.to(self.device)
        if scaler.is_enabled():
            loss = self.pipe.step(*batch, loss_fn=scaler.scale) / scaler.get_scale()
        else:
            loss = self.pipe.step(*batch)
        self._average_replicated_gradients()
        return loss

    @torch.no_grad()
    def _average_replicated_gradients(self) -> None:
        """Averages gradients of what is not divided over the expert axis: once in a step, not in each micro-batch."""
        if self._experts.size == 1:
            return
        experts = {param for stage in self.pipe.stages.values() for param in _expert_params(stage)}
        for param in self.pipe.parameters():
            if param.grad is not None and param not in experts:
                all_reduce(param.grad.view(-1), self._experts).wait()
                param.grad.div_(self._experts.size)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Logits or loss of a batch, without gradients, the same on all ranks of the pipeline; see `GPT.forward`."""
        self._record_lengths(tokens)
        if targets is not None:
            tensors = tokens.to(self.device), targets.to(self.device)
            mean: Tensor = self.pipe.evaluate(*tensors, loss_fn=lambda loss: loss)
            return mean if reduction == "mean" else mean * targets.numel()
        outputs = self.pipe.evaluate(tokens.to(self.device))
        shape = (*tokens.shape, self.config.vocabulary)
        logits = torch.empty(shape, device=self.device) if outputs is None else outputs.float().contiguous()
        if self.group.size > 1:
            broadcast(logits, self.group, source=self.pipe.schedule.placement.rank_of[-1]).wait()
        return logits

    def _record_lengths(self, tokens: Tensor) -> None:
        """The sequence is divided in the first stage; the ranks of the others do not see how."""
        group = self._divides_sequence
        if group.size > 1:
            record_sequence_lengths(even_sizes(tokens.shape[1], group.size), group.process_group)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters by their names in checkpoints."""
        for name, param in self.pipe.named_parameters(remove_duplicate=remove_duplicate):
            yield f"{prefix}.{self._saved_names[name]}".lstrip("."), param


def _expert_params(module: nn.Module) -> Iterator[nn.Parameter]:
    for submodule in module.modules():
        if isinstance(submodule, Experts):
            yield from submodule.parameters()


def materialize_stages(model: GPT, stages: Iterable[nn.Module], device: torch.device) -> None:
    """Allocates and initializes stages of a model on the meta device; a tied weight stays one tensor."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for stage in stages for module in stage.modules()):
        on_meta = [(name, param) for name, param in module._parameters.items() if param is not None and param.is_meta]
        for name, param in on_meta:
            if param not in replacements:
                replacements[param] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                copy_attributes(param, replacements[param])
            module.register_parameter(name, replacements[param])  # Of experts, it stays a shard.
        if on_meta:
            model.init_weights(module)


@dataclass(frozen=True)
class _StageUnits(Policy):
    """Each block of a stage is a unit; and so are the layers of tokens.

    These may share a weight, whose shards are then the same in the first and in the last stage.
    """

    layers_of_tokens: tuple[nn.Module, ...]

    def selects(self, candidate: Candidate) -> bool:
        is_one = isinstance(candidate.module, Block) or any(
            candidate.module is layer for layer in self.layers_of_tokens
        )
        return is_one and candidate.num_params > 0  # Of what other stages have there are placeholders.


def shard_stage(stage: nn.Module, model: GPT, axes: MeshAxes, options: ParallelOptions) -> None:
    """Shards a stage of a model among pipelines beside each other, in place."""
    shard_units(stage, _StageUnits((model.embedding, model.head)), axes, **sharding_of(options))


def sharding_of(options: ParallelOptions) -> dict[str, Any]:
    """Returns how `fully_shard` casts, releases and offloads."""
    policy = None
    if options.precision != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[options.precision], reduce_dtype=torch.float32)
    return {
        "reshard_after_forward": options.reshard_after_forward,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else None,
    }


def shard_units(
    model: nn.Module, units: Policy, axes: MeshAxes, progress: ProgressCallback | None = None, **how: Any
) -> None:
    """Shards the units of a model, in place: experts that ranks divide among those that have the same ones."""
    if axes.expert.size > 1:
        for experts in [module for module in model.modules() if isinstance(module, Experts)]:
            fully_shard(experts, axes.expert_data, **how)
    fully_shard_modules(model, units, progress=progress, mesh=axes.data, **how)


def stage_boundaries(num_blocks: int, num_stages: int) -> list[str]:
    """Returns the blocks at which stages begin: as even as possible, the later ones with one more.

    >>> stage_boundaries(10, 4)
    ['blocks.2', 'blocks.5', 'blocks.7']
    """
    return [f"blocks.{stage * num_blocks // num_stages}" for stage in range(1, num_stages)]


def blocks_policy(model: nn.Module) -> Policy:
    """Returns which modules are sharded and recomputed one by one."""
    return class_policy(Block) if isinstance(model, GPT) else no_split_policy(model)


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, GPT):
        return list(model.blocks)
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_blocks(model: nn.Module, choice: str, *, offload: bool) -> None:
    """Checkpoints each block, before or after it is sharded; a budget is for `plan_blocks`."""
    if budget_bytes(choice) is None:
        hows: dict[str, How] = {"none": "offload" if offload else "keep", "all": "recompute", "selective": "selective"}
        for block in _blocks_of(model):
            apply_checkpointing(block, hows[choice], offload_inputs=offload)


def plan_blocks(model: GPT, options: Options, axes: MeshAxes, group: Group) -> None:
    """With a budget, plans what each block keeps, the same on all ranks; an InputError on all.

    It is measured on rank 0; with experts, whose layers exchange tokens, on all ranks together: tokens are drawn, since
    equal ones would all go to the same experts.
    """
    budget = budget_bytes(options.parallel.checkpoint_activations)
    if budget is None:
        return
    sequences = max(1, options.data.batch // (axes.num_data * options.parallel.accumulate))
    generator = torch.Generator().manual_seed(group.rank)
    drawn = torch.randint(model.config.vocabulary, (sequences, options.data.sequence), generator=generator)
    tokens = drawn.to(model.embedding.weight.device)
    together = axes.data if model.config.experts else Group()
    # fp32 master weights are the model's own; Adam keeps two more numbers for each, sharded or not.
    shared = options.parallel.parallel in ("oss", "sharded-ddp")
    adam_bytes = sum(8 * param.numel() for param in model.parameters()) // (axes.wrapped.size if shared else 1)
    plan: MemoryPlan | None = None
    problem = ""
    if group.rank == 0 or together.size > 1:
        try:
            plan = plan_memory(model, (tokens, tokens), budget, other_bytes=adam_bytes, process_group=together)
        except BudgetError as error:
            problem = (
                f"no plan fits: a step, with Adam's state, takes at least {error.minimum_bytes} bytes; write "
                f"--checkpoint-activations budget:{error.minimum_bytes}B, or take a smaller --batch or --sequence"
            )
    block_plan = plan
    plan, problem = CollectiveCall(group, "planning memory", InputError).rank0(lambda: (plan, problem))
    if plan is None:
        raise InputError(f"--checkpoint-activations {options.parallel.checkpoint_activations}: {problem}")
    # Experts that do not divide evenly have other shapes on other ranks; what is done with each block is the same.
    if block_plan is not None and together.size > 1:
        plan = replace(plan, profile=block_plan.profile)
    apply_plan(model, plan)


@dataclass(frozen=True)
class Engine:
    """A model and its optimizer on the ranks of a group."""

    model: nn.Module  # what is called: `raw_model`, or DDP or ShardedDataParallel around it
    raw_model: nn.Module  # with the plain names; local shards with fsdp, this rank's stages with pipe
    optimizer: Optimizer
    options: ParallelOptions
    device: torch.device
    axes: MeshAxes

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model; 0 for a model of transformers."""
        return self.raw_model.config.layers if isinstance(self.raw_model, GPT | PipelineEngine) else 0

    def expert_layers(self) -> dict[int, MoE]:
        """The layers of experts that this rank has, by the number of their block."""
        stages = [self.raw_model] if self.pipeline is None else list(self.pipeline.pipe.stages.values())
        named = [
            named_module
            for stage in stages
            for named_module in stage.named_modules()
            if isinstance(named_module[1], MoE)
        ]
        # A stage has placeholders, without parameters, for the layers of other stages.
        local_layers = [(name, layer) for name, layer in named if next(layer.parameters(), None) is not None]
        return {int(name.removesuffix(".moe").rpartition(".")[2]): layer for name, layer in local_layers}

    @property
    def pipeline(self) -> PipelineEngine | None:
        """The model, if it is a pipeline: then the ranks of each see the same batch."""
        return self.raw_model if isinstance(self.raw_model, PipelineEngine) else None

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean", positions: Tensor | None = None) -> Tensor:
        """The loss of a batch in nats, fp32, a scalar, as `GPT.forward` has it."""
        if isinstance(self.raw_model, GPT | PipelineEngine):
            position_kwargs = {} if positions is None else {"positions": positions}
            loss: Tensor = self.model(tokens, targets, reduction, **position_kwargs)
            return loss
        logits = self.model(input_ids=tokens, use_cache=False).logits.float().flatten(0, 1)
        total = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / targets.numel() if reduction == "mean" else total

    def attention(self) -> AbstractContextManager[object]:
        """Around each forward and backward: attention over full sequences, where ranks divide them."""
        return context_parallel(self.axes.context, attention=self.options.context_attention)

    def part_of(self, tokens: Tensor, targets: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """This rank's part of sequences [batch, sequence] on the device, and its positions, if it is not the whole."""
        context = self.axes.context
        if context.size == 1:
            return (tokens.to(self.device), targets.to(self.device)), None
        positions = position_ids(tokens.shape[1], context, device=self.device)
        tokens, targets = (split_sequence(tensor, context).to(self.device) for tensor in (tokens, targets))
        return (tokens, targets), positions

    def autocast(self) -> AbstractContextManager[object]:
        """Around each forward: the precision, where the model does not cast itself."""
        if self.options.precision != "fp32" and not self._casts_itself:
            return torch.autocast(self.device.type, dtype=COMPUTE_DTYPES[self.options.precision])
        return nullcontext()

    @property
    def _casts_itself(self) -> bool:
        if self.options.parallel == "pipe":
            return self.options.data_parallel == "fsdp" and self.axes.data.size > 1
        return self.options.parallel == "fsdp"

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """Around each micro-batch: reduces gradients at the last one only, where that costs no memory."""
        if last:
            return nullcontext()
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        if self.options.parallel in ("fsdp", "sharded-ddp") and not self.options.sync_each_micro_batch:
            context: AbstractContextManager[object] = self.model.no_sync()  # type: ignore[operator]
            return context
        return nullcontext()

    def params(self) -> list[nn.Parameter]:
        """The parameters as they are after the last step; local shards with fsdp."""
        if isinstance(self.optimizer, OSS):
            self.optimizer.wait()  # Gathers of what other ranks have updated may still run.
        return list(self.raw_model.parameters())

    def params_with_gradients(self) -> list[nn.Parameter]:
        """The parameters that have gradients when the optimizer steps."""
        return self.optimizer.params_with_gradients if isinstance(self.optimizer, OSS) else self.params()


def make_engine(
    model: nn.Module,
    options: ParallelOptions,
    optimizer_options: OptimizerOptions,
    axes: MeshAxes,
    device: torch.device,
    progress: ProgressCallback | None = None,
    source: TransformersSource | None = None,
) -> Engine:
    """Moves a model, equal on all ranks, to the device, parallelizes it and makes its optimizer.

    With pipe or fsdp it may be on the meta device, but not with tensor parallelism. With fsdp each block is a unit, the
    rest (embedding, last norm, head) is the root unit, and `progress` is called after each was initialized.
    """
    checkpoint_blocks(model, options.checkpoint_activations, offload=options.offload_activations)
    pieces = options.overlap_pieces
    parallelize_blocks(model, axes, sequence_parallel=options.sequence_parallel, overlap_pieces=pieces)
    if options.parallel == "pipe":
        assert isinstance(model, GPT)
        pipeline = PipelineEngine(model, options, axes, device)
        optimizer = _make_optimizer(pipeline, options, optimizer_options, axes.data)
        return Engine(pipeline, pipeline, optimizer, options, device, axes)
    if options.parallel != "fsdp" or not next(model.parameters()).is_meta:
        model.to(device)
    if options.parallel == "fsdp":
        shard_options = ShardOptions(init=_init_of(model, source), compute_device=device)
        shard_units(model, blocks_policy(model), axes, progress, options=shard_options, **sharding_of(options))
    elif axes.expert.size > 1:
        average_replicated_gradients(model, axes.expert)
    if source is not None:
        source.load(model, torch.device("cpu") if options.cpu_offload else device, axes.data)
    group = axes.wrapped
    optimizer = _make_optimizer(model, options, optimizer_options, group)
    called: nn.Module = model
    if isinstance(optimizer, OSS) and options.parallel == "sharded-ddp":
        called = ShardedDataParallel(model, optimizer)
    elif options.parallel in ("ddp", "oss") and group.process_group is not None:
        called = DistributedDataParallel(model, process_group=group.process_group, gradient_as_bucket_view=True)
    return Engine(called, model, optimizer, options, device, axes)


def _init_of(model: nn.Module, source: TransformersSource | None) -> Callable[[nn.Module], None] | Literal[False]:
    """What initializes the modules of a model on the meta device; False where weights are loaded afterwards."""
    if source is None:
        assert isinstance(model, GPT)
        return model.init_weights
    return False if source.has_weights else source.initializer(model)


def _make_optimizer(
    model: nn.Module, parallel: ParallelOptions, options: OptimizerOptions, group: Group
) -> AdamW | OSS:
    """AdamW, with weight decay on matrices only."""
    params = list(model.parameters())
    # The full shape: a local shard may have fewer dimensions.
    matrices = [param for param in params if len(full_shape(param)) >= 2]
    vectors = [param for param in params if len(full_shape(param)) < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    arguments: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.95)}
    arguments |= (
        {"fused": True} if options.optimizer_kernel == "fused" else {"foreach": options.optimizer_kernel == "foreach"}
    )
    if parallel.parallel in ("oss", "sharded-ddp"):
        return OSS(groups, AdamW, group, **arguments)
    return AdamW(groups, **arguments)
