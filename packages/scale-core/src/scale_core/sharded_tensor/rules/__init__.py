"""Torch's functions on sharded tensors: one rule for each kind.

Begin with `dispatch`, which chooses the rule; `pointwise` decides whether a function computes each element by itself.
"""
