"""Optimizer state on the host.

`optimizer` is what users hold, `plan` says which elements go, `parts` where they stand; `backward`, `copies` and
`update` are the way of a gradient through one step.
"""
