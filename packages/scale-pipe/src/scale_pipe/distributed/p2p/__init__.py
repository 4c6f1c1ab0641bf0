"""Point-to-point messages between the ranks of a pipeline.

Begin with `channel`, which sends and receives; `messages` takes a pytree apart into tensors and puts it together.
"""
