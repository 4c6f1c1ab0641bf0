"""A GPT over bytes in plain PyTorch, from 0.8 million parameters to the shapes of GPT-3.

Nothing here depends on ranks but the experts that they divide; each `Block` is a unit to shard or recompute.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), for the pre-norm block and the
smaller weights of deep residual branches; Su et al., arXiv 2104.09864, for positions as rotations; Nguyen and Salazar,
arXiv 1910.05895, for the width of the initial weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scale_core.comm.collectives import fingerprint_of
from scale_core.comm.group import Group, GroupLike
from scale_core.shard import on_local_tensors
from scale_moe import Balance, Experts, MoE, TokenChoice
from scale_train.model.config import ModelConfig as ModelConfig

IGNORED = -1


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Turns pairs of features by an angle that grows with the position (arXiv 2104.09864, eq. 15).

    The angles are made again in fp32 at each call: as a buffer they would be rounded where a model is cast to bf16, and
    then positions beyond a few hundred coincide.

    Args:
        x: `[batch, heads, sequence, features]`, with an even number of features.
        positions: `[sequence]`, int64; None is 0, 1, 2 and so on.

    Returns:
        The same shape and dtype.
    """
    sequence, features = x.shape[-2:]
    if positions is None:
        positions = torch.arange(sequence, dtype=torch.float32, device=x.device)
    slowness = torch.arange(0, features, 2, dtype=torch.float32, device=x.device) / features
    angles = positions.unsqueeze(1) * 10_000.0**-slowness
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention, queries, keys and values from one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.features = config.heads, config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mixes each position with those before it.

        Args:
            x: `[batch, sequence, width]`.
            positions: As in `rotate`.

        Returns:
            `[batch, sequence, width]`.
        """
        batch, sequence, _ = x.shape
        query, key, value = (
            part.view(batch, sequence, self.heads, self.features).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        query, key = rotate(query, positions), rotate(key, positions)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, self.heads * self.features))
        return y


class SharedExperts(nn.Module):
    """The experts that all tokens go through, side by side in one layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.feed_in = nn.Linear(config.width, config.shared_experts * config.feed_width)
        self.feed_out = nn.Linear(config.shared_experts * config.feed_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.feed_out(functional.gelu(self.feed_in(x)))
        return y


class FeedForwardExperts(MoE):
    """The mixture of experts of a block.

    The capacity is one of training: an evaluation would depend on which texts are evaluated together.
    """

    def __init__(self, config: ModelConfig, mesh: GroupLike) -> None:
        super().__init__(
            config.width,
            config.feed_width,
            config.experts,
            self._rule(config),
            balance=Balance(aux_loss_coef=config.aux_loss_coef),
            gated=False,
            activation=functional.gelu,
            shared_expert=SharedExperts(config) if config.shared_experts else None,
            process_group=mesh,
            batch_process_group=mesh,
        )
        self._training_rule = self._rule(config)

    @staticmethod
    def _rule(config: ModelConfig) -> TokenChoice:
        """A single choice has its score for a weight: divided by itself it would train no router."""
        rule = TokenChoice(config.top_k, normalize=config.top_k > 1)
        if not config.capacity_factor:
            return rule
        # By their weights, the same choices are dropped however ranks divide the tokens.
        return replace(rule, capacity_factor=config.capacity_factor, drop_order="weight")

    def train(self, mode: bool = True) -> Self:
        """As any module's; the capacity is for training."""
        super().train(mode)
        rule = self._training_rule
        self.routing = rule if mode else replace(rule, capacity_factor=None, drop_order="token")
        return self


class Block(nn.Module):
    """One pre-norm block: attention, then a feed-forward layer four times as wide, or experts that each are so wide.

    It is the unit that is sharded.
    """

    def __init__(self, config: ModelConfig, mesh: GroupLike = Group()) -> None:  # noqa: B008  # immutable
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_norm = nn.LayerNorm(config.width)
        if config.experts:
            self.moe: MoE = FeedForwardExperts(config, mesh)
        else:
            self.feed_in = nn.Linear(config.width, config.feed_width)
            self.feed_out = nn.Linear(config.feed_width, config.width)
        self.has_experts = config.experts > 0
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """`[batch, sequence, width]` to the same shape; positions as in `rotate`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        y: Tensor = x + self.dropout(self._feed_forward(self.feed_norm(x)))
        return y

    def _feed_forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(x) if self.has_experts else self.feed_out(functional.gelu(self.feed_in(x)))
        return y


class GPT(nn.Module):
    """A decoder-only transformer; gives logits, or the loss where targets are given.

    A `ParallelDims` as `mesh` divides its experts.
    """

    def __init__(self, config: ModelConfig, mesh: GroupLike = Group()) -> None:  # noqa: B008  # immutable
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, mesh) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._seed = torch.initial_seed()
        for path, module in self.named_modules():
            self._init_weights(path, module)
        if config.tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Initializes the parameters that one module of the model holds directly, but for those on meta.

        Normal weights; those that end in the residual stream are smaller, so that depth does not widen the stream.
        Each is drawn on the host from the seed and its name, so that values are the same in any order and on any
        device.
        """
        if not all(param.is_meta for param in module.parameters(recurse=False)):
            self._init_weights(next(path for path, candidate in self.named_modules() if candidate is module), module)

    @torch.no_grad()
    @on_local_tensors
    def _init_weights(self, path: str, module: nn.Module) -> None:
        std = math.sqrt(2 / (5 * self.config.width))
        residual_std = std / math.sqrt(2 * self.config.layers)
        if module is self.head and self.config.tied:
            path = "embedding"  # One weight has one name.
        for attribute, param in module.named_parameters(recurse=False):
            if param.is_meta:
                continue
            if param.ndim < 2:
                param.fill_(0.0 if attribute == "bias" else 1.0)
                continue
            generator = torch.Generator().manual_seed(fingerprint_of(self._seed, f"{path}.{attribute}"))
            ends_in_stream = path.endswith(("attention.out", "feed_out")) or attribute == "down_proj"
            draw = partial(_draw_normal, std=residual_std if ends_in_stream else std, generator=generator)
            if not isinstance(module, Experts):
                param.copy_(draw(param.shape, param.dtype))
                continue
            sharding, rank = module.shardings[attribute], module.group.rank
            (first, last), *_ = sharding.local_ranges(rank)[0]
            for expert in range(sharding.shape[0]):  # Of those of other ranks nothing is kept.
                drawn = draw(sharding.shape[1:], param.dtype)
                if first <= expert < last:
                    param[expert - first].copy_(sharding.local_features(drawn, rank, sharding.dim - 1))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        positions: Tensor | None = None,
    ) -> Tensor:
        """Predicts the token after each position.

        Args:
            tokens: `[batch, sequence]`, int64.
            targets: `[batch, sequence]`, int64, the token after each position; `IGNORED` where none counts.
            reduction: "mean" over all positions, or "sum" over those that count.
            positions: `[sequence]`, int64, where the tokens are a part of a sequence; None is from 0.

        Returns:
            Logits `[batch, sequence, vocabulary]` without targets; otherwise the loss in nats, fp32, a scalar.
        """
        x = self.embedding(tokens)
        position_args = () if positions is None else (positions,)
        for block in self.blocks:
            if self.config.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, *position_args, use_reentrant=False)
            else:
                x = block(x, *position_args)
        x = self.norm(x)
        if targets is None:
            logits: Tensor = self.head(x)
            return logits
        return self._loss(x.flatten(0, 1), targets.flatten(), reduction)

    def _loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """The cross-entropy of `x` `[tokens, width]` against `targets` `[tokens]`, with few logits alive at a time."""
        chunk = self.config.loss_chunk
        if not chunk or chunk >= len(targets):
            total = self._loss_sum(x, targets)
        else:
            pieces = zip(x.split(chunk), targets.split(chunk), strict=True)
            total = torch.stack(
                [checkpoint(self._loss_sum, part, target, use_reentrant=False) for part, target in pieces]
            ).sum()
        return total / len(targets) if reduction == "mean" else total

    def _loss_sum(self, x: Tensor, targets: Tensor) -> Tensor:
        # fp32 whatever the model computes in: a sum of thousands of bf16 terms has no digits left.
        logits = self.head(x).float()
        return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def _draw_normal(shape: Sequence[int], dtype: torch.dtype, std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu").normal_(std=std, generator=generator)


def num_parameters(model: nn.Module) -> int:
    """The number of elements of a plain model's parameters, tied ones once."""
    return sum(param.numel() for param in model.parameters())


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Returns the arguments by which a model keeps no keys and values for a next token."""
    return {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, length: int, *, context: int, seed: int, temperature: float) -> Tensor:
    """Continues a prompt, one token at a time.

    Every rank of a sharded model has to call it: each token is one forward pass of all. The draw is made from a
    generator of its own, on the CPU, so that all ranks draw the same token and the training's random state stays.

    Args:
        model: Maps tokens `[1, sequence]` to logits `[1, sequence, vocabulary]`, or to an output that has them.
        prompt: `[sequence]`, int64, at least one token.
        length: Number of tokens to add.
        context: Tokens that the model looks back on; earlier ones are dropped.
        seed: Of the draw.
        temperature: Above 0; small values choose likely tokens.

    Returns:
        `[sequence + length]`, int64.
    """
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    tokens = prompt
    for _ in range(length):
        output = model(tokens[-context:].unsqueeze(0), **without_cache(model))
        logits = getattr(output, "logits", output)[0, -1].float().cpu()
        drawn = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(tokens.device)])
    model.train(was_training)
    return tokens
