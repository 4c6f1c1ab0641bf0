"""Mixture of experts by FairScale's names, on scale_moe's dispatch and combine. Begin with `moe_layer.py`."""

from fairscale.nn.moe.moe_layer import MOELayer
from fairscale.nn.moe.top2gate import Top2Gate

__all__ = ["MOELayer", "Top2Gate"]
