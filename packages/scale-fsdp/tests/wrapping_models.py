"""Small models whose modules policies choose from: lists, attention, shared weights, and nothing but linears."""

from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, 1)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def linears(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for size in sizes))
