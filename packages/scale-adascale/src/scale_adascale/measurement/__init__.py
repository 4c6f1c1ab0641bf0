"""Measures the gradients of a step: of each rank before they are averaged, and of all ranks.

Begin with `step_statistics`, what one step gives; `local_grad_norms` listens to the backward pass, `norm_reduction`
sums over ranks, `param_info` says which rank holds what, `gradient_checks` what may not change, `errors` what is
raised.
"""
