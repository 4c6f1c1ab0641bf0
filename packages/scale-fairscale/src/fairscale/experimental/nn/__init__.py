"""Modules that FairScale called experimental. Begin with `offload.py`."""

from fairscale.experimental.nn.mevo import MEVO, BaselineSoftmaxNllLoss
from fairscale.experimental.nn.offload import OffloadModel
from fairscale.experimental.nn.sync_batchnorm import SyncBatchNorm

__all__ = ["MEVO", "BaselineSoftmaxNllLoss", "OffloadModel", "SyncBatchNorm"]
