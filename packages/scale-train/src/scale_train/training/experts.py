"""Experts in training: the scale of their load balancing losses, and how even their work was."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import all_reduce
from scale_core.comm.group import Group
from scale_core.hooks.autograd import in_backward
from scale_moe import MoE


class ExpertBalance:
    """Counts where the tokens of this rank went since the last record, and scales the load balancing losses.

    Both at each forward of a layer, so that the micro-batches of a pipeline are seen as well. What a backward pass
    computes again is not counted again.
    """

    def __init__(self, layers: Mapping[int, MoE], num_blocks: int) -> None:
        """`layers` are the layers of this rank, by the number of their block in the whole model."""
        self._scale, self._sequences = 1.0, 1
        self._counts: Tensor | None = None  # [blocks, E + 1] int64: choices of each expert, and those dropped
        for block, layer in layers.items():
            if self._counts is None:
                self._counts = torch.zeros(num_blocks, layer.num_experts + 1, dtype=torch.int64)
            layer.register_forward_pre_hook(self._scale_loss)
            layer.register_forward_hook(partial(self._count, block))

    def scale_losses(self, scale: float, sequences: int) -> None:
        """Before a step: what the loss of its batch is multiplied by, and how many sequences of it this rank has."""
        self._scale, self._sequences = scale, sequences

    def _scale_loss(self, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        """A micro-batch counts in the loss of the batch by its sequences, and so does its load balancing loss."""
        assert isinstance(layer, MoE)
        layer.aux_loss_scale = self._scale * len(inputs[0]) / self._sequences

    @torch.no_grad()
    def _count(self, block: int, layer: nn.Module, inputs: object, output: object) -> None:
        assert isinstance(layer, MoE) and self._counts is not None
        if not layer.training or in_backward():
            return
        assert layer.tokens_per_expert is not None and layer.dropped is not None
        self._counts = self._counts.to(layer.dropped.device)
        self._counts[block] += torch.cat([layer.tokens_per_expert, layer.dropped.view(1)])

    def stats(self, group: Group) -> dict[str, float]:
        """Returns the fields of a `StepRecord` on experts, over all ranks, and starts over; all ranks call it.

        Ranks that divide layers have the same tokens, and each of them counts these. All tokens are counted equally
        often, and the fields are ratios of counts.
        """
        if self._counts is None:
            return {}
        counts, self._counts = self._counts, torch.zeros_like(self._counts)
        all_reduce(counts.view(-1), group).wait()
        return balance_of(counts)


def balance_of(counts: Tensor) -> dict[str, float]:
    """Returns imbalance and dropped tokens of counts [layers, E + 1], those dropped in the last column.

    >>> balance_of(torch.tensor([[6, 2, 0], [4, 4, 2]]))
    {'expert_imbalance': 1.5, 'dropped_tokens': 0.125}
    """
    chosen, dropped = counts[:, :-1].double(), counts[:, -1].double()
    imbalance = chosen.amax(dim=1) / chosen.mean(dim=1)
    return {
        "expert_imbalance": imbalance.max().item(),
        "dropped_tokens": (dropped.sum() / chosen.sum()).item(),
    }
