"""Tensor parallel layers for PyTorch."""

__version__ = "2026.11.0"
__all__: list[str] = []
