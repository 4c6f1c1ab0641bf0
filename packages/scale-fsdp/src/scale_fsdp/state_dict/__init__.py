"""State dicts of models and optimizers: full tensors, or this rank's shards.

Begin with `full`; `optimizer` has the optimizer's, `naming` the plain model's names.
"""
