"""Parameters in one flat buffer: where they stand, its shards, its gathers and the reduction of its gradients.

Begin with `layout` (integers only), then `buffer` (the life of one buffer), `gradient` and `reduction`.
"""
