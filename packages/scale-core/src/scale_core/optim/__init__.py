"""Optimizers on shards: the norm of all gradients, gradient scaling, checks of a step.

Begin with `clip_grad`; `torch_patches` next to this folder makes torch's own functions call it.
"""
