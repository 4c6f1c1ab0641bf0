"""The names of `fairscale.nn.pipe.balance.profile` by torchgpipe's path."""

from fairscale.nn.pipe.balance.profile import layerwise_sandbox

__all__ = ["layerwise_sandbox"]
