"""A small decoder in the style of Llama's reference code, which imports FairScale's layers and their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fairscale.nn.model_parallel.initialize as fs_init
from fairscale.nn.model_parallel.initialize import (
    get_model_parallel_rank,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from fairscale.nn.model_parallel.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)


@dataclass(frozen=True)
class Sizes:
    dim: int = 16
    num_layers: int = 2
    num_heads: int = 4
    num_key_value_heads: int = 2
    hidden_dim: int = 24
    vocab_size: int = 32
    words_divided: bool = False  # The embedding is divided by words, as from Llama 3 on, and otherwise by features.


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, plain: bool) -> None:
        super().__init__()
        ranks = 1 if plain else fs_init.get_model_parallel_world_size()
        self.head_dim = sizes.dim // sizes.num_heads
        self.num_heads, self.num_key_value_heads = sizes.num_heads // ranks, sizes.num_key_value_heads // ranks
        self.wq = column(sizes.dim, sizes.num_heads * self.head_dim, plain)
        self.wk = column(sizes.dim, sizes.num_key_value_heads * self.head_dim, plain)
        self.wv = column(sizes.dim, sizes.num_key_value_heads * self.head_dim, plain)
        self.wo = row(sizes.num_heads * self.head_dim, sizes.dim, plain)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.wq(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key, value = (
            weight(x)
            .view(batch, length, self.num_key_value_heads, self.head_dim)
            .transpose(1, 2)
            .repeat_interleave(self.num_heads // self.num_key_value_heads, dim=1)
            for weight in (self.wk, self.wv)
        )
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.wo(output.transpose(1, 2).reshape(batch, length, -1))
        return result


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes, plain: bool) -> None:
        super().__init__()
        self.w1 = column(sizes.dim, sizes.hidden_dim, plain)
        self.w2 = row(sizes.hidden_dim, sizes.dim, plain)
        self.w3 = column(sizes.dim, sizes.hidden_dim, plain)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    def __init__(self, sizes: Sizes, plain: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(sizes, plain), FeedForward(sizes, plain)
        self.attention_norm, self.ffn_norm = Norm(sizes.dim), Norm(sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class Decoder(nn.Module):
    """With `plain` of torch's own layers, without ranks."""

    def __init__(self, sizes: Sizes, plain: bool = False) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module
        if plain:
            self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.dim)
        else:
            embedding: Any = VocabParallelEmbedding if sizes.words_divided else ParallelEmbedding
            self.tok_embeddings = embedding(sizes.vocab_size, sizes.dim, init_method=lambda x: x)
        self.layers = nn.ModuleList(Block(sizes, plain) for _ in range(sizes.num_layers))
        self.norm = Norm(sizes.dim)
        self.output = column(sizes.dim, sizes.vocab_size, plain, gather_output=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.output(self.norm(x)).float()
        return result


def column(inputs: int, outputs: int, plain: bool, gather_output: bool = False) -> nn.Module:
    if plain:
        return nn.Linear(inputs, outputs, bias=False)
    return ColumnParallelLinear(inputs, outputs, bias=False, gather_output=gather_output, init_method=lambda x: x)


def row(inputs: int, outputs: int, plain: bool) -> nn.Module:
    if plain:
        return nn.Linear(inputs, outputs, bias=False)
    return RowParallelLinear(inputs, outputs, bias=False, input_is_parallel=True, init_method=lambda x: x)


DIMS = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
"""Along which dimension a weight is divided, by the name of its layer; norms are whole on all ranks."""


def write_consolidated(folder: Path, sizes: Sizes, num_files: int) -> Decoder:
    """Writes a checkpoint as the reference code has it, a file for each rank; returns the plain model of it."""
    torch.manual_seed(4)
    model = Decoder(sizes, plain=True)
    dims = {**DIMS, "tok_embeddings": 0 if sizes.words_divided else 1}
    folder.mkdir()
    for rank in range(num_files):
        part = {
            name: value.chunk(num_files, dims[kind])[rank].clone() if (kind := name.split(".")[-2]) in dims else value
            for name, value in model.state_dict().items()
        }
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    return model


def build(folder: Path, sizes: Sizes, num_ranks: int) -> tuple[Decoder, dict[str, Tensor]]:
    """Loads a checkpoint as the reference code does; returns the model and what its rank's file holds."""
    if num_ranks > 1 and not model_parallel_is_initialized():
        initialize_model_parallel(num_ranks)
    files = sorted(folder.glob("*.pth"))
    assert len(files) == num_ranks
    held = torch.load(files[get_model_parallel_rank()], map_location="cpu")
    model = Decoder(sizes)
    model.load_state_dict(held, strict=False)
    return model, held
