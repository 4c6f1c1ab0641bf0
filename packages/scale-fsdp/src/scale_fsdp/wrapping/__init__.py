"""Which modules become units, and how a whole model is wrapped by one call.

Begin with `policy`, then `auto_wrap`.
"""
