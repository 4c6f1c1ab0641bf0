"""The names of `fairscale.nn.pipe.microbatch` by torchgpipe's path."""

from fairscale.nn.pipe.microbatch import Batch, check, gather, scatter

__all__ = ["Batch", "check", "gather", "scatter"]
