"""Pipeline: the model in stages on several ranks, with the methods that trainer, evaluation and checkpoints use.

The model is split at blocks, and each rank materializes its own stages. All ranks of a pipeline see its whole batch.
More ranks than stages form several pipelines, each with its part of the batch, and every stage averages its gradients
over them once per step. Checkpoints have the names of the whole model, a tied weight its first one, so that any number
of stages, and any other --parallel, resumes from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from scale_core.comm.group import Group, group_of
from scale_pipe import DistributedPipe, split
from scale_train.config.options import ParallelOptions
from scale_train.config.resolve import PipelineShape, pipeline_shape
from scale_train.model import GPT


class PipelineEngine(nn.Module):
    """A GPT in stages; methods are called on all ranks, those of a pipeline with the same batch.

    `group` has one pipeline after the other, each in the order of the stages.
    """

    def __init__(self, model: GPT, options: ParallelOptions, group: Group, device: torch.device) -> None:
        super().__init__()
        self.config, self.device = model.config, device
        shape = pipeline_shape(options, group.size)
        self.replica, self.num_replicas = group.rank // shape.ranks, shape.replicas
        # The ranks of this pipeline, and those with the same stages in all pipelines.
        self.group, self.replicas = _mesh_groups(group, shape)
        self.shapes = {name: list(param.shape) for name, param in model.named_parameters()}
        # In a checkpoint a tied parameter is there once.
        first = {param: name for name, param in model.named_parameters()}
        self._saved_names = {name: first[param] for name, param in model.named_parameters(remove_duplicate=False)}
        self.pipe = DistributedPipe(
            split(model, stage_boundaries(len(model.blocks), shape.stages)),
            options.schedule,
            chunks=options.chunks,
            stages_per_rank=shape.stages_per_rank,
            group=self.group,
            device=device,
        )
        _materialize(model, list(self.pipe.stages.values()), device)
        for index, stage in self.pipe.stages.items():
            if self.replicas.process_group is not None and shape.replicas > 1:
                self.pipe.stages[index] = DistributedDataParallel(stage, process_group=self.replicas.process_group)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Adds the gradients of a batch's mean loss to this rank's parameters; returns the loss, a scalar."""
        return self.pipe.step(tokens.to(self.device), targets.to(self.device))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Logits or loss of a batch, without gradients, the same on all ranks of the pipeline; see `GPT.forward`."""
        if targets is not None:
            of = tokens.to(self.device), targets.to(self.device)
            mean: Tensor = self.pipe.evaluate(*of, loss_fn=lambda loss: loss)
            return mean if reduction == "mean" else mean * targets.numel()
        found = self.pipe.evaluate(tokens.to(self.device))
        shape = (*tokens.shape, self.config.vocabulary)
        logits = torch.empty(shape, device=self.device) if found is None else found.float().contiguous()
        if self.group.size > 1:
            last = self.group.ranks[self.pipe.schedule.placement.rank_of[-1]]
            dist.broadcast(logits, last, group=self.group.process_group)
        return logits

    def clip(self, max_norm: float) -> Tensor:
        """Scales the gradients of all ranks by their common norm; returns the norm before, a scalar."""
        return self.pipe.clip_grad_norm_(max_norm)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters by their names in checkpoints."""
        for name, param in self.pipe.named_parameters(remove_duplicate=remove_duplicate):
            yield f"{prefix}.{self._saved_names[name]}".lstrip("."), param


def _mesh_groups(group: Group, shape: PipelineShape) -> tuple[Group, Group]:
    """Returns the groups of this rank's pipeline, and of the same stages in all pipelines."""
    if shape.replicas == 1:
        return group, Group()
    numbers = torch.tensor(group.ranks).view(shape.replicas, shape.ranks)
    mesh = DeviceMesh("cpu" if group.backend == "gloo" else "cuda", numbers, mesh_dim_names=("replica", "stage"))
    return group_of(mesh["stage"]), group_of(mesh["replica"])


def _materialize(model: GPT, stages: Sequence[nn.Module], device: torch.device) -> None:
    """Allocates and initializes stages of a model on the meta device; a tied weight stays one tensor."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for stage in stages for module in stage.modules()):
        on_meta = [(name, param) for name, param in module._parameters.items() if param is not None and param.is_meta]
        for name, param in on_meta:
            if param not in made:
                made[param] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
            module._parameters[name] = made[param]
        if on_meta:
            model.init_weights(module)


def stage_boundaries(num_blocks: int, num_stages: int) -> list[str]:
    """Returns the blocks at which stages begin: as even as possible, the later ones with one more.

    >>> stage_boundaries(10, 4)
    ['blocks.2', 'blocks.5', 'blocks.7']
    """
    return [f"blocks.{stage * num_blocks // num_stages}" for stage in range(1, num_stages)]
