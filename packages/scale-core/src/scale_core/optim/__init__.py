"""What an optimizer needs to know of shards: the norm of all gradients, one verdict on inf and NaN, checks of a step.

Begin with `clip_grad`; `torch_patches` beside this folder makes torch's own functions call it.
"""
