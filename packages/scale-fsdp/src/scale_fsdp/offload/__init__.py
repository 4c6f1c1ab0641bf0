"""Optimizer state on the host, and its update there, beside the backward pass.

Begin with `optimizer`, what users hold; `placement` says which elements go, `transfer` moves them, `host_update` steps.
"""
