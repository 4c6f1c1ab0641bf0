"""MEVO: can be imported, and is not offered; the plain loss that it was compared with is here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairscale._warnings import Refused


class MemoryEfficientVocabOutput(Refused, nn.Module):
    """FairScale's projection onto a vocabulary and its loss, tile by tile."""

    why = "it wrote gradients into the weight past autograd and past every wrapper, which sharding cannot see"
    instead = (
        "scale_tp.vocab_parallel_cross_entropy, which divides the vocabulary over ranks, or "
        "scale_checkpoint.checkpoint_wrapper around a module that computes projection and loss of a part of the tokens"
    )


class BaselineSoftmaxNllLoss(nn.Module):
    """The sum over tokens of the negative log-likelihood of a projection onto a vocabulary.

    Args:
        proj_weight: [V, D], of the projection.
        tile_factor: FairScale's; without effect, as there.
        log_softmax: False computes it from a softmax in fp32.
        margin: Taken from the score of the target, where `scale` is given.
        scale: Scores are cosines times this, as in the large margin cosine loss.
    """

    def __init__(
        self,
        proj_weight: nn.Parameter,
        tile_factor: int = 0,
        log_softmax: bool = True,
        margin: float = 0.35,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.proj_weight, self.log_softmax, self.margin, self.scale = proj_weight, log_softmax, margin, scale

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the summed loss, scalar, of tokens [..., D] and targets [...]."""
        tokens, target = input.reshape(-1, input.shape[-1]), target.reshape(-1)
        if self.scale is not None:
            scores = F.linear(F.normalize(tokens, dim=1), F.normalize(self.proj_weight, dim=1))
            margins = torch.zeros_like(scores).scatter_(1, target[:, None], self.margin)
            scores = (scores - margins) * self.scale
        else:
            scores = F.linear(tokens, self.proj_weight)
        if self.log_softmax:
            logs = F.log_softmax(scores, dim=-1, dtype=torch.float32)
        else:
            logs = F.softmax(scores, dim=-1, dtype=torch.float32).log()
        return F.nll_loss(logs, target, reduction="sum")


MEVO = MemoryEfficientVocabOutput

__all__ = ["MEVO", "BaselineSoftmaxNllLoss", "MemoryEfficientVocabOutput"]
