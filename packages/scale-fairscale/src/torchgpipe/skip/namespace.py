"""The names of `fairscale.nn.pipe.skip.namespace` by torchgpipe's path."""

from fairscale.nn.pipe.skip.namespace import Namespace

__all__ = ["Namespace"]
