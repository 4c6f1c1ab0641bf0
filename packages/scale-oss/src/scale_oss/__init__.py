"""Optimizer state sharding and ShardedDataParallel (ZeRO-1 and ZeRO-2) for PyTorch."""

__version__ = "2026.11.0"
__all__: list[str] = []
