"""Experts in training: the scale of their load balancing losses, and how even their work was."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import all_reduce
from scale_core.comm.group import Group
from scale_moe import MoE


class ExpertBalance:
    """Counts where the tokens of this rank went since the last record."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, MoE)]
        self._counts: Tensor | None = None  # [layers, E + 1] int64: choices of each expert, and those dropped

    def scale_losses(self, scale: float) -> None:
        """Before a micro-batch: by what the loss is multiplied, and so the load balancing losses of the layers."""
        for layer in self._layers:
            layer.aux_loss_scale = scale

    @torch.no_grad()
    def count(self) -> None:
        """After the forward pass of a micro-batch."""
        rows = []
        for layer in self._layers:
            assert layer.tokens_per_expert is not None and layer.dropped is not None
            rows.append(torch.cat([layer.tokens_per_expert, layer.dropped.view(1)]))
        if rows:
            counts = torch.stack(rows)
            self._counts = counts if self._counts is None else self._counts + counts

    def stats(self, group: Group) -> dict[str, float]:
        """Returns the fields of a `StepRecord` on experts, over all ranks, and begins anew; all ranks call it."""
        counts, self._counts = self._counts, None
        if counts is None:
            return {}
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
