"""Finds NaN and infinities in the tensors of a snapshot, in little memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from scale_snapshot.format.metadata import Manifest
from scale_snapshot.format.safetensors_io import memory_of
from scale_snapshot.format.stored_file import opened

_PIECE_BYTES = 1 << 20


def first_nonfinite(path: Path, manifest: Manifest, progress: Callable[[int], None] = lambda num_bytes: None) -> str:
    """The first tensor of a snapshot, by its key, that has a NaN or an infinity; "" where all numbers are finite.

    Infinities of a tensor whose other values are zeros are meant: it is a mask, for example of causal attention.
    """
    for key, saved in manifest.tensors.items():
        if not saved.dtype.is_floating_point and not saved.dtype.is_complex:
            continue
        has_infinity, has_others = False, math.prod(saved.shape) == 1
        for location in manifest.chunks[key]:
            num_bytes = math.prod(location.chunk.sizes) * saved.dtype.itemsize
            with opened(path / location.file, progress) as file:
                for begin in range(0, num_bytes, _PIECE_BYTES):
                    count = min(_PIECE_BYTES, num_bytes - begin) // saved.dtype.itemsize
                    piece = torch.empty(count, dtype=saved.dtype)
                    file.read_into([memory_of(piece)], location.begin + begin)
                    wide = piece.float() if saved.dtype.itemsize == 1 else piece  # Of 8 bits there is no isfinite.
                    finite = wide.isfinite()
                    if bool(wide.isnan().any()):
                        return key
                    has_infinity = has_infinity or not bool(finite.all())
                    has_others = has_others or bool((wide[finite] != 0).any())
        if has_infinity and has_others:
            return key
    return ""
