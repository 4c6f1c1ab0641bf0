"""The names of `fairscale.nn.pipe.batchnorm` by torchgpipe's path."""

from fairscale.nn.pipe.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
