"""The layers whose weights are divided over the ranks of the model axis, as Megatron's and FairScale's.

Begin with `linear`, then `base`, their common part.
"""
