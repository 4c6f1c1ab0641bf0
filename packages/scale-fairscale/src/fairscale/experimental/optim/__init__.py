"""A scaler of losses. Begin with `dynamic_loss_scaler.py`."""

from fairscale.experimental.optim.dynamic_loss_scaler import DynamicLossScaler

__all__ = ["DynamicLossScaler"]
