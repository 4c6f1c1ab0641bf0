"""Collectives and flat parameters for sharded training."""

__version__ = "2026.11.0"
__all__: list[str] = []
