"""Conversion of checkpoints of other libraries into snapshots, and of snapshots into theirs, tensor by tensor.

Begin with `converter`. A format that is read is a file here that gives the tree of what was saved with tensors that are
still in their files (`lazy_tensor`); `naming` gives them scale's keys, and `writers` writes them.
"""

from scale_snapshot.convert.converter import ConversionReport, convert_checkpoint, open_checkpoint

__all__ = ["ConversionReport", "convert_checkpoint", "open_checkpoint"]
