"""Large batches without retuning: AdaScale for PyTorch."""

__version__ = "2026.11.0"
__all__: list[str] = []
