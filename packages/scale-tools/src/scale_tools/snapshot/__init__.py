"""`scale-train snapshot`: lists, verifies, compares, converts and prunes checkpoints.

Begin with `commands`; `options` is the command line, `listing` and `comparison` make the results.
"""
