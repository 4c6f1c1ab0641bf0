"""Parameters in one flat buffer: its layout, its shards, its gathers and the reduction of its gradients.

Begin with `layout` (integers only), then `buffer` (the states of one buffer, and its work in a step) and `gradient`
(from autograd to the reduced shard). `storage` makes and moves the memory, `transport` is the interface of messages.
"""
