"""Optimizers on shards: what they see, the norm of all gradients, gradient scaling, checks of a step.

Begin with `step_hooks`, around the step. An optimizer sees the shards of this rank: `FlatBuffer.sharded_params`, which
`model.parameters()` yields, or `Bucket.optimizer_params` under `OSS`. `clip_grad` has the norm of their gradients, and
`torch_patches` next to this folder makes torch's own functions call it.
"""
