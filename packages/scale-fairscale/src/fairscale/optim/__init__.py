"""Optimizers and scalers of losses by FairScale's names. Begin with `oss.py`."""
