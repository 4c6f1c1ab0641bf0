"""`patch_batchnorm`, for code that recomputes in another way; `checkpoint_wrapper` does not need it."""

from scale_checkpoint.recompute.batch_norm import patch_batchnorm

__all__ = ["patch_batchnorm"]
