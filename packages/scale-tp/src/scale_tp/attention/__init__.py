"""Attention over sequences that are divided between ranks.

Begin with `context_parallel`, which puts it into models as they are; `ring` passes keys and values round, `ulysses`
divides heads, `load_balance` says who has which positions, and `batch` cuts the inputs of a model.
"""
