"""The names of `fairscale.nn.pipe.balance.blockpartition` by torchgpipe's path."""

from fairscale.nn.pipe.balance.blockpartition import solve

__all__ = ["solve"]
