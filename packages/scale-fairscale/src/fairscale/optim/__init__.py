"""Optimizers and scalers of losses by FairScale's names. Begin with `oss.py`."""

from fairscale.optim.adam import Adam, Precision
from fairscale.optim.adascale import AdaScale, AdaScaleWrapper
from fairscale.optim.grad_scaler import GradScaler
from fairscale.optim.oss import OSS

__all__ = ["OSS", "AdaScale", "AdaScaleWrapper", "Adam", "GradScaler", "Precision"]
