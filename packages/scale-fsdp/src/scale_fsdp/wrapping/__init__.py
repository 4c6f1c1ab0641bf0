"""Auto wrap: which modules become units, and calls that wrap or shard all of them.

Begin with `policy`, then `auto_wrap`.
"""
