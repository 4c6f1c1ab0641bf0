"""How the packages are put around a model: sharded, in stages, divided, with activation checkpointing and AdaScale.

Begin with `engine`.
"""
