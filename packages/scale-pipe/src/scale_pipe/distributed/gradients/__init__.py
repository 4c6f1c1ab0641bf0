"""Gradients that more than one rank has a part in: replicas of a stage, shared parameters, observers.

Begin with `data_parallel`; `shared_params` sums over the stages that hold one parameter, `microbatch_grads`
reports each.
"""
