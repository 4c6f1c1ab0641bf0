"""What the ranks of a pipeline send each other: tensors of unknown shapes, packed in messages, matched by tag.

Begin with `p2p`.
"""
