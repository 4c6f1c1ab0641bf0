"""Tensors that know that they are a part, and what functions of torch do with them.

Begin with `tensor` (`ShardedParameter` and `ShardedTensor`), then `dispatch` (which rule a function of torch follows).
`elements` is the arithmetic of which elements a rank has; `pointwise` decides whether a function computes each element
by itself; `reductions` are exact over the ranks.
"""

from scale_core.sharded_tensor import dispatch as dispatch  # It answers for the types of `tensor`.
