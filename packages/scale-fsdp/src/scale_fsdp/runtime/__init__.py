"""What a sharded module does in a training step: unshard, reshard, reduce, and abort together where one rank fails.

Begin with `step`, which torch and autograd call; then `root`, the order among units, and `unit`. `recovery`,
`nonfinite` and `checks` are entered where something is wrong or was asked for.
"""
