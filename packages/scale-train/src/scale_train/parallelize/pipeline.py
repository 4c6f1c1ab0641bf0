"""The model in stages on several ranks, with the face that the loop, the evaluation and the checkpoints know.

The model is cut at blocks, and each rank makes its stages alone: built on the meta device, the model is whole nowhere.
All ranks of a pipeline see its whole batch and cut it into micro-batches. Where there are more ranks than stages take,
there are several pipelines beside each other, each with its part of the batch, and every stage averages its gradients
over them once per step. What a checkpoint holds has the names of the whole model, a tied weight its first
one, so that any number of stages goes on from it, and any other way to spread a model too.
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


class Pipeline(nn.Module):
    """A GPT in stages. All ranks call its methods together, those of a pipeline with the same batch.

    Args:
        model: On the meta device, or whole and equal on all ranks.
        options: Say the schedule, the stages and the micro-batches.
        group: All ranks: one pipeline after the other, each in the order of the stages.
        device: Of this rank.

    Attributes:
        config: Of the model.
        group: The ranks of this pipeline.
        replica: Which of the pipelines beside each other this is.
        num_replicas: How many there are.
        replicas: The ranks that have the same stages in all of them.
        device: Of this rank.
        shapes: Of all parameters of the model.
        pipe: What runs.
    """

    def __init__(self, model: GPT, options: ParallelOptions, group: Group, device: torch.device) -> None:
        super().__init__()
        self.config, self.device = model.config, device
        shape = pipeline_shape(options, group.size)
        self.replica, self.num_replicas = group.rank // shape.ranks, shape.replicas
        self.group, self.replicas = _two_axes(group, shape)
        self.shapes = {name: list(param.shape) for name, param in model.named_parameters()}
        # The name under which a checkpoint has each parameter: a tied one stands there once.
        first = {param: name for name, param in model.named_parameters()}
        self._saved_names = {name: first[param] for name, param in model.named_parameters(remove_duplicate=False)}
        self.pipe = DistributedPipe(
            split(model, cuts(len(model.blocks), shape.stages)),
            options.schedule,
            chunks=options.chunks,
            stages_per_rank=shape.stages_per_rank,
            group=self.group,
            device=device,
        )
        _give_values(model, list(self.pipe.stages.values()), device)
        for index, stage in self.pipe.stages.items():
            if self.replicas.process_group is not None and shape.replicas > 1:
                self.pipe.stages[index] = DistributedDataParallel(stage, process_group=self.replicas.process_group)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Adds the gradients of a batch's mean loss to this rank's parameters; returns the loss, a scalar.

        Args:
            tokens: `[batch, sequence]`, int64.
            targets: The same shape.
        """
        return self.pipe.step(tokens.to(self.device), targets.to(self.device))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Logits or loss of a batch, without gradients, the same on all ranks of the pipeline; see `GPT.forward`.

        Args:
            tokens: `[batch, sequence]`, int64.
            targets: The same shape.
            reduction: Of the loss.
        """
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
        """Yields this rank's parameters by the names that checkpoints know."""
        for name, param in self.pipe.named_parameters(remove_duplicate=remove_duplicate):
            yield f"{prefix}.{self._saved_names[name]}".lstrip("."), param


def _two_axes(group: Group, shape: PipelineShape) -> tuple[Group, Group]:
    """Returns the ranks of this rank's pipeline, and those that have the same stages in all pipelines."""
    if shape.replicas == 1:
        return group, Group()
    numbers = torch.tensor(group.ranks).view(shape.replicas, shape.ranks)
    mesh = DeviceMesh("cpu" if group.backend == "gloo" else "cuda", numbers, mesh_dim_names=("replica", "stage"))
    return group_of(mesh["stage"]), group_of(mesh["replica"])


def _give_values(model: GPT, stages: Sequence[nn.Module], device: torch.device) -> None:
    """Gives stages of a model on the meta device their memory and first values; a tied weight stays one tensor."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for stage in stages for module in stage.modules()):
        lacking = [(name, param) for name, param in module._parameters.items() if param is not None and param.is_meta]
        for name, param in lacking:
            if param not in made:
                made[param] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
            module._parameters[name] = made[param]
        if lacking:
            model.initialise(module)


def cuts(num_blocks: int, num_stages: int) -> list[str]:
    """Returns the blocks at which stages begin: as even as can be, the later ones with one more.

        >>> cuts(10, 4)
        ['blocks.2', 'blocks.5', 'blocks.7']

    Args:
        num_blocks: Of the model.
        num_stages: At most as many.
    """
    return [f"blocks.{stage * num_blocks // num_stages}" for stage in range(1, num_stages)]
