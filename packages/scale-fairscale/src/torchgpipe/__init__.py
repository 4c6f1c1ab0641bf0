"""torchgpipe's names for programs that import them."""

__version__ = "0.0.7"

__all__ = ["__version__"]
