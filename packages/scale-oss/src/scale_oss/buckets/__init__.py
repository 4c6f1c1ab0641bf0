"""Which rank updates which elements, and the flat memory of these.

Begin with `bucketing`, which makes a bucket for each dtype, device and group of ranks; `partition` is the arithmetic.
"""
