"""Modules that FairScale called experimental. Begin with `offload.py`."""

from fairscale.experimental.nn.offload import OffloadModel
from fairscale.experimental.nn.sync_batchnorm import SyncBatchNorm
from fairscale.experimental.not_offered import ampnet_pipe, distributed_pipeline, mevo

MEVO, BaselineSoftmaxNllLoss = mevo.MEVO, mevo.BaselineSoftmaxNllLoss

__all__ = [
    "MEVO",
    "BaselineSoftmaxNllLoss",
    "OffloadModel",
    "SyncBatchNorm",
    "ampnet_pipe",
    "distributed_pipeline",
    "mevo",
]
