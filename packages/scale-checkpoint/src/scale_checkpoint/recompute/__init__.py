"""One checkpointed call: the tensors its forward keeps, and how its backward restores the state of the forward.

Begin with `recompute`; `selective` and `policy` keep the results of chosen operators.
"""
