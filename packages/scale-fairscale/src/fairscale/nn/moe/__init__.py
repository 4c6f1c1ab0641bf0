"""Mixture of experts: refused until scale has a layer of its own. Begin with `moe_layer.py`."""

from fairscale.nn.moe.moe_layer import MOELayer
from fairscale.nn.moe.top2gate import Top2Gate

__all__ = ["MOELayer", "Top2Gate"]
