"""Transports of a unit's flat buffers, for those whose messages are not plain: see `scale_core.flat.transport`.

Begin with `policy`, which chooses one. `quantized` sends 8 or 4 bits between all ranks, `hierarchical` between
nodes only, `float8` the weights that torchao computes with. `blocks` is the arithmetic of quantized messages, and
`quantized_collectives` sends these.
"""
