"""`MOELayer`: a gate and this rank's experts, over scale_moe's dispatch and combine."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fairscale.internal.process_group import unwrap_process_group
from fairscale.nn.moe.top2gate import MOEInputError
from scale_core.comm.group import group_of
from scale_moe.token_dispatcher import combine, dispatch, plan_dispatch


class MOELayer(nn.Module):
    """Sends each token to the ranks of its experts and adds up what comes back, by the weights of a gate.

    In new code: `scale_moe.MoE`.

        >>> import torch
        >>> from fairscale.nn import MOELayer, Top2Gate
        >>> layer = MOELayer(Top2Gate(8, 4), torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> layer(torch.randn(4, 2, 8)).shape, layer.l_aux.shape
        (torch.Size([4, 2, 8]), torch.Size([]))

    The experts' parameters have `expert = True`. Their gradients are sums over the tokens of all ranks, as in
    FairScale: where other gradients are averaged over the ranks, divide these by the number of ranks.

    Rows are sent as they are and none is padded: an expert gets [1, 1, rows, M], where FairScale's got [ranks, 1, C, M]
    with zeros between; what it makes of a row must not depend on the others.

    Args:
        gate: Returns for tokens [S, M] an auxiliary loss, combine weights [S, E, C], and [S, E, C] bool, which tokens
            go to which experts; `Top2Gate`, or one of your own.
        experts: This rank's experts, or the only one. All ranks have equally many.
        group: The ranks; None is all of them.
    """

    def __init__(self, gate: nn.Module, experts: nn.Module, group: Any = None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts if isinstance(experts, nn.ModuleList) else nn.ModuleList([experts])
        for param in self.experts.parameters():
            cast(Any, param).expert = True
        self.group = group
        self._ranks = group_of(unwrap_process_group(group))
        self.world_size = self._ranks.size
        self.num_local_experts = len(self.experts)
        self.l_aux: Any = None

    def forward(self, *input: Tensor, **kwargs: Any) -> Tensor:  # FairScale's name
        """Returns what the experts make of the tokens [s, t, M], and sets `l_aux`; all ranks call it together.

        Raises:
            ValueError: It is not a single tensor of three dimensions, an AssertionError, too; or the gate is of another
                number of experts.
        """
        if len(input) != 1:
            raise MOEInputError(f"only single input Tensor supported, got {len(input)}")
        if input[0].dim() != 3:
            raise MOEInputError(
                f"input Tensor must have dimensions: (s)equence, (t)oken, (m)odel, got {list(input[0].shape)}"
            )
        tokens = input[0].flatten(0, 1)
        self.l_aux, combine_weights, dispatch_mask = self.gate(tokens)
        num_experts = self.world_size * self.num_local_experts
        if combine_weights.shape[1] != num_experts:
            raise ValueError(
                f"expected a gate of {num_experts} experts, {self.num_local_experts} on each of {self.world_size} "
                f"ranks, got combine weights of {combine_weights.shape[1]}: write Top2Gate(model_dim, {num_experts})"
            )
        expert, weight = _choices(combine_weights, dispatch_mask)
        plan = plan_dispatch(tokens, expert, weight, num_experts, self._ranks, "MOELayer")
        rows = dispatch(tokens, plan).split(plan.counts)
        outputs = [expert(part[None, None])[0, 0] for part, expert in zip(rows, self.experts, strict=True)]
        return combine(torch.cat(outputs), weight, plan).view(input[0].shape)


def _choices(combine_weights: Tensor, dispatch_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The experts [S, k] of each token, -1 where it has fewer than k, and their weights [S, k]."""
    goes = dispatch_mask.bool().any(-1)
    num_choices = max(1, int(goes.sum(1).max())) if len(goes) else 1
    order = goes.to(torch.int8).sort(dim=1, descending=True, stable=True)
    expert, is_choice = order.indices[:, :num_choices], order.values[:, :num_choices].bool()
    weight = combine_weights.sum(-1).gather(1, expert).masked_fill(~is_choice, 0.0)
    return expert.masked_fill(~is_choice, -1), weight


__all__ = ["MOELayer"]
