"""`Top2Gate` and `top2gating`: GShard's rule of two experts for each token (arXiv 2006.16668, algorithm 1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_moe.routing import router_scores


class MOEInputError(AssertionError, ValueError):
    """Tokens of a shape that the layer does not take; an AssertionError as in FairScale."""


def top2gating(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses two experts for each token: the best one, and of the others one with the odds of its score.

    An expert takes C = 2 S / E choices: first ones of all tokens in their order, and then second ones. What a token has
    left is weighted by its scores, which then add up to 1. The second choice is drawn, also in evaluation.

    Args:
        logits: [S, E], what the gate computes for the tokens of this rank.

    Returns:
        The auxiliary loss, a scalar, the mean over experts of mean score times part of the first choices; the combine
        weights [S, E, C]; and where they are not 0, [S, E, C] bool.

    Raises:
        ValueError: The number of tokens can't be divided by the number of experts; an AssertionError, too.
    """
    num_tokens, num_experts = logits.shape
    if num_tokens % num_experts:
        raise MOEInputError(
            f"expected a number of tokens that {num_experts} experts divide, for capacities of 2 * tokens / experts, "
            f"got {num_tokens}: pad the batch, or use scale_moe.MoE, which takes any number"
        )
    capacity = 2 * num_tokens // num_experts
    scores = router_scores(logits)
    first = scores.argmax(1, keepdim=True)
    zero, one = scores.new_zeros(()), scores.new_ones(())
    drawn = logits.detach() + torch.distributions.Gumbel(zero, one).rsample(logits.shape)
    second = drawn.scatter(1, first, float("-inf")).argmax(1, keepdim=True)

    expert = torch.cat([first, second], dim=1)
    goes = F.one_hot(expert, num_experts)  # [S, 2, E]
    ranked = goes.transpose(0, 1).flatten(0, 1).cumsum(0) - 1  # of all first choices and then all second ones
    position = ranked.view(2, num_tokens, num_experts).transpose(0, 1).gather(2, expert[..., None])[..., 0]
    weight = scores.gather(1, expert).masked_fill(position >= capacity, 0.0)
    weight = weight / weight.sum(1, keepdim=True).clamp_min(torch.finfo(weight.dtype).eps)

    slot = F.one_hot(position.clamp_max(capacity), capacity + 1)[..., :capacity]  # [S, 2, C]
    combine = (weight[..., None, None] * goes[..., None] * slot[:, :, None]).sum(1)
    loss = (scores.mean(0) * goes[:, 0].to(scores.dtype).mean(0)).mean()
    return loss.to(logits.dtype), combine.to(logits.dtype), combine.bool()


class Top2Gate(nn.Module):
    """The gate of `MOELayer`: a projection without bias, and `top2gating`.

    In new code: the router of `scale_moe.MoE(..., TokenChoice(2, capacity_factor=1.0, drop_order="choice",
    normalize_kept=True))`, whose second choice is not drawn.

    Args:
        model_dim: M, of a token.
        num_experts: E, of all ranks.
    """

    def __init__(self, model_dim: int, num_experts: int) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # FairScale's name
        """Returns `top2gating` of tokens [S, M]."""
        return top2gating(self.wg(input))


__all__ = ["MOEInputError", "Top2Gate", "top2gating"]
