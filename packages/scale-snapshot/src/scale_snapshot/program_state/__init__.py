"""What a snapshot saves: the objects of a program as one flat state of tensors and values, and back.

Begin with `objects`. `stateful` treats objects with a `state_dict` of their own, `extra_state` the extra state of
modules, `rng_state` the random generators.
"""
