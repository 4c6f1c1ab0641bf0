"""Hooks on modules and gradients that outlive a wrapper: where the techniques meet in one backward pass.

Begin with `autograd`: before and after a module's backward, and per gradient. `gradients` has the hooks around the
reduction of gradients. `microbatch_grads` reports gradients per micro-batch, `source_grads` per rank whose samples they
are of; `module_parts` registers hooks on the parts that a module is cut into.
"""
