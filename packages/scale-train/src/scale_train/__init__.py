"""The training program of scale: every technique behind one command."""

__version__ = "2026.11.0"
__all__: list[str] = []
