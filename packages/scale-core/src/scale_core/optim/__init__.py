"""Optimizers on shards: what they see, the norm of all gradients, gradient scaling, checks of a step.

An optimizer sees this rank's shards: `model.parameters()` yields `FlatBuffer.sharded_params` under scale-fsdp, and
`OSS` gives its inner optimizer `Bucket.optimizer_params`. `step_hooks` has what happens around its step, and
`clip_grad` the norm; `torch_patches` next to this folder makes torch's own functions call it.
"""
