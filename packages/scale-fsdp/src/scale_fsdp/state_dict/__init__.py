"""What is saved and loaded by one's own means: full and local state dicts, of weights and of optimizers.

Begin with `full`.
"""
