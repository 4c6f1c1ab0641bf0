"""Flat parameters and buckets. Begin with `flatten_params_wrapper.py`."""

from fairscale.nn.checkpoint import checkpoint_wrapper  # its older path
from fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper
from fairscale.nn.misc.param_bucket import GradBucket, ParamBucket

__all__ = ["FlattenParamsWrapper", "GradBucket", "ParamBucket", "checkpoint_wrapper"]
