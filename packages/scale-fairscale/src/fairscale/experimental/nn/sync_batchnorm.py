"""`SyncBatchNorm`: torch's, which scale-checkpoint recomputes with equal statistics."""

from torch.nn import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
