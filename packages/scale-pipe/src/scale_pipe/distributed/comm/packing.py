"""Small messages in one piece: header and tensors together, since each message costs more than copying so few bytes.

    bytes      0      40   64              192            320
               header      tensor 0        tensor 1

Tensors begin at multiples of 64 bytes. On the way in they stay where they arrive, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scale_pipe.distributed.comm.messages import HEADER_LENGTH, Form, as_bytes

LARGEST = 1 << 17
"""Bytes; to copy so many takes about as long as to send a message of its own."""

_ALIGNMENT = 64
_HEADER_BYTES = 8 * HEADER_LENGTH


def fits(form: Form) -> bool:
    """Whether tensors of these forms travel with their header.

    Args:
        form: Known to both sides.
    """
    return form.num_bytes <= LARGEST


def empty_for(form: Form | None) -> Tensor:
    """Returns memory for a header, and for tensors behind it.

    Args:
        form: Of tensors that fit; None for a header alone.
    """
    return torch.empty(_HEADER_BYTES if form is None else _places(form)[-1], dtype=torch.uint8)


def header_of(memory: Tensor) -> Tensor:
    """Returns the header in a message, as [HEADER_LENGTH] int64.

    Args:
        memory: [num_bytes] uint8.
    """
    return memory[:_HEADER_BYTES].view(torch.int64)


def tensors_of(memory: Tensor, form: Form) -> list[Tensor]:
    """Returns the tensors in a message. Each has a counter of changes of its own, as tensors apart from others have.

    Args:
        memory: As `empty_for` returns it.
        form: Of the tensors.
    """
    found = []
    for one, start in zip(form.tensors, _places(form), strict=False):
        part = memory[start : start + one.num_bytes].view(one.dtype)
        found.append(part.as_strided(one.shape, one.strides).data)
    return found


def packed(header: Sequence[int], form: Form, tensors: Sequence[Tensor]) -> Tensor:
    """Returns a message, [num_bytes] uint8.

    Args:
        header: HEADER_LENGTH integers.
        form: Of the tensors.
        tensors: Dense, on the host.
    """
    memory = empty_for(form)
    header_of(memory).copy_(torch.tensor(header))
    for one, tensor, start in zip(form.tensors, tensors, _places(form), strict=False):
        if one.num_bytes:
            memory[start : start + one.num_bytes].copy_(as_bytes(tensor))
    return memory


def _places(form: Form) -> list[int]:
    """Where each tensor begins, and where the message ends."""
    places, end = [], _ALIGNMENT
    for one in form.tensors:
        places.append(end)
        end += -(-one.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return [*places, end]
