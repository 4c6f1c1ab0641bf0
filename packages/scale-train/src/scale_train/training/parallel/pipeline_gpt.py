"""A GPT in stages, each on a rank of a pipeline; several pipelines average or shard their stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.comm.collectives import all_reduce, broadcast
from scale_core.comm.group import Group, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.parameters import copy_attributes
from scale_core.shard import full_shape
from scale_moe import Experts
from scale_pipe import DistributedPipe, PipelineOptions, split
from scale_tp import record_sequence_lengths
from scale_tp.split import even_sizes
from scale_train.configuration.resolve import pipeline_shape
from scale_train.model.gpt import GPT
from scale_train.options import ParallelOptions
from scale_train.training.parallel.parallelize_gpt import shard_stage


class PipelineEngine(nn.Module):
    """A GPT in stages on several ranks. All ranks call its methods, and the ranks of a pipeline give the same batch.

    The model is split at blocks, and each rank materializes its own stages; a model whose layers are divided is given
    with values. Several pipelines have each their part of the batch, and the ranks that have the same stage in all of
    them average its gradients once per step, or shard it. Checkpoints have the names of the full model, and a tied
    weight has its first name. So you can resume with any number of stages, and any other --parallel.
    """

    def __init__(self, model: GPT, options: ParallelOptions, dims: ParallelDims, device: torch.device) -> None:
        super().__init__()
        self.config, self.device, self.group = model.config, device, group_of(dims, "pp")
        self._divides_sequence = group_of(dims, "tp") if options.sequence_parallel else Group()
        stages_per_rank = pipeline_shape(options, dims.world_size).stages_per_rank
        self._experts = group_of(dims, "ep") if options.data_parallel == "ddp" else Group()
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
        _materialize_stages(model, self.pipe.stages.values(), device)
        for index, stage in self.pipe.stages.items():
            if options.data_parallel == "fsdp" and dims.size("fsdp") > 1:
                shard_stage(stage, model, dims, options)
            elif options.data_parallel == "ddp" and dims.size("edp") > 1:
                self.pipe.stages[index] = DistributedDataParallel(stage, process_group=dims.process_group("edp"))

    def step(self, tokens: Tensor, targets: Tensor, scaler: ShardedGradScaler) -> Tensor:
        """Computes the gradients of a batch's mean loss, scaled, where there are none yet; returns the loss, a scalar.

        The gradients of this rank's parameters are averaged over all pipelines.
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


def stage_boundaries(num_blocks: int, num_stages: int) -> list[str]:
    """Returns the blocks at which stages begin: as even as possible, the later ones with one more.

    >>> stage_boundaries(10, 4)
    ['blocks.2', 'blocks.5', 'blocks.7']
    """
    return [f"blocks.{stage * num_blocks // num_stages}" for stage in range(1, num_stages)]


def _materialize_stages(model: GPT, stages: Iterable[nn.Module], device: torch.device) -> None:
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
