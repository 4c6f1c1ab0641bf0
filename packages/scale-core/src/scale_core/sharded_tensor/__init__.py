"""Tensors that know that they are a part, and torch's functions on them.

Begin with `tensor` (`ShardedParameter` and `ShardedTensor`), then `rules.dispatch`, which handles a function of torch.
`elements` and `chunks` are the arithmetic of a rank's elements; `reductions` are exact over the ranks.
"""

from scale_core.sharded_tensor.rules import dispatch as dispatch  # It handles functions for the types of `tensor`.
