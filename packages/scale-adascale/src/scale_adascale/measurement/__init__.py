"""Measures the gradients of a step: of each rank before they are averaged, and of all ranks.

Support of pipelines, divided experts and context parallelism is frozen: it gets corrections only (see DESIGN.md).
Begin with `step_statistics`, the estimates of one step; `local_grad_norms` listens to the backward pass,
`norm_reduction` sums over ranks, `param_info` has the parts of each rank, `errors` the texts that are raised.
"""
