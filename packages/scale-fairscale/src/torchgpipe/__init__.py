"""torchgpipe's names for programs that import them, by `fairscale.nn.pipe`."""

from fairscale.nn.pipe.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.gpipe import GPipe

__version__ = "0.0.7"

__all__ = ["GPipe", "__version__", "is_checkpointing", "is_recomputing"]
