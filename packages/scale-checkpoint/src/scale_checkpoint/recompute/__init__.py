"""One checkpointed call: what its forward keeps, and how its backward finds again what the forward had.

Begin with `recompute`; `selective` and `policy` keep the results of chosen operators.
"""
