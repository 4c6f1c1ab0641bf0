"""The older path of `fairscale.internal.containers`, as of FairScale before 0.4.6."""

from fairscale.internal.containers import (
    apply_to_tensors,
    pack_kwargs,
    split_non_tensors,
    unpack_kwargs,
    unpack_non_tensors,
)

__all__ = ["apply_to_tensors", "pack_kwargs", "split_non_tensors", "unpack_kwargs", "unpack_non_tensors"]
