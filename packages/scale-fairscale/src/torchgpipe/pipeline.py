"""The names of `fairscale.nn.pipe.pipeline` by torchgpipe's path."""

from fairscale.nn.pipe.pipeline import clock_cycles

__all__ = ["clock_cycles"]
