"""Balances by time and by memory. Begin with `balance_by_time`, of `fairscale.nn.pipe.balance`."""

from fairscale.nn.pipe.balance import balance_by_size, balance_by_time
from torchgpipe.balance import blockpartition

__all__ = ["balance_by_size", "balance_by_time", "blockpartition"]
