"""The training step of a sharded module: unshard, reshard, reduce, and abort on all ranks if one fails.

Begin with `step`, which torch and autograd call; then `root`, the order among units, and `unit`. `recovery`,
`nonfinite` and `checks` are entered where something is wrong or was asked for.
"""
