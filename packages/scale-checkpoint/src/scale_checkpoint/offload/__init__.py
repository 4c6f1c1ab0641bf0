"""Tensors that autograd saves, kept on the host or in a file until the backward needs them.

Begin with `offload`; `store` is the queue with prefetch, `storage` the host's memory and files.
"""
