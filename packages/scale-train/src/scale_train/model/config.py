"""The numbers that define the GPT of `scale-train lm`, and its sizes by name; nothing here loads torch.

Sources: Brown et al., arXiv 2005.14165, Table 2.1, for the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NUM_BYTES = 256


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that define a GPT.

    Attributes:
        layers: Number of blocks.
        width: Features of the residual stream; an even multiple of `heads`.
        heads: Attention heads.
        vocabulary: Number of different tokens; 256 for bytes.
        tied: Whether the output layer uses the embedding's weight.
        dropout: Probability, in [0, 1), with which an output of a residual branch is zeroed in training.
        recompute: Whether each block's activations are recomputed in the backward pass.
        loss_chunk: Tokens whose logits exist at one time; 0 for all.
        experts: Experts in place of each block's feed-forward layer; 0 for none.
        top_k: How many of them a token goes to.
        shared_experts: Further ones that all tokens go through.
        capacity_factor: How many times its even share of the choices an expert takes in training; 0 for all.
        aux_loss_coef: The factor of the load balancing loss.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = NUM_BYTES
    tied: bool = True
    dropout: float = 0.0
    recompute: bool = False
    loss_chunk: int = 0
    experts: int = 0
    top_k: int = 2
    shared_experts: int = 0
    capacity_factor: float = 0.0
    aux_loss_coef: float = 0.01

    @property
    def feed_width(self) -> int:
        """Features inside a feed-forward layer, and inside an expert."""
        return 4 * self.width

    @property
    def expert_parameters(self) -> int:
        """Elements of the parameters of all experts, but for the shared ones."""
        return self.layers * self.experts * 2 * self.width * self.feed_width

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, but width is {self.width} and heads is {self.heads}")
        if self.width // self.heads % 2:
            features = self.width // self.heads
            raise ValueError(f"width / heads must be even: positions turn pairs of features, but it is {features}")


class ModelSize(NamedTuple):
    """The shape of a size that has a name."""

    layers: int
    width: int
    heads: int


# The GPT-3 rows have the shapes of the paper's table; with bytes for tokens their embeddings are small, so that
# gpt3-125m counts some 86 million parameters. The paper's 13B row prints a width of 5140, which 40 heads of 128 do not
# give; 5120 is what they give.
SIZES: dict[str, ModelSize] = {
    "tiny": ModelSize(4, 128, 4),
    "small": ModelSize(6, 512, 8),
    "gpt3-125m": ModelSize(12, 768, 12),
    "gpt3-350m": ModelSize(24, 1024, 16),
    "gpt3-760m": ModelSize(24, 1536, 16),
    "gpt3-1.3b": ModelSize(24, 2048, 16),
    "gpt3-2.7b": ModelSize(32, 2560, 32),
    "gpt3-6.7b": ModelSize(32, 4096, 32),
    "gpt3-13b": ModelSize(40, 5120, 40),
    "gpt3-175b": ModelSize(96, 12288, 96),
}
