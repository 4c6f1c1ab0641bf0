"""The outputs of all micro-batches, put together as if there had been one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scale_core.nested import map_tensors
from scale_pipe.leaves import described, leaves_of


def gather(outputs: Sequence[Any]) -> Any:
    """Puts the outputs of all micro-batches together: tensors along dimension 0, everything else as it is in each.

    Args:
        outputs: One or more, nested alike. A single one is returned as it is.

    Raises:
        ValueError: They are not nested alike; tensors without dimensions, or of shapes that do not go together; what
            is no tensor differs.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(type(output) is Tensor for output in outputs):
        return _joined("the output", outputs)
    columns = [dict(leaves_of(output)) for output in outputs]
    joined: dict[int, Tensor] = {}
    places: dict[int, tuple[int, ...]] = {}
    for number, column in enumerate(columns):
        if column.keys() != columns[0].keys():
            differing = sorted(column.keys() ^ columns[0].keys())
            raise ValueError(
                f"expected outputs that are nested alike for every micro-batch; those of micro-batches 0 and {number} "
                f"differ at output{differing[0]}: let the model return the same structure whatever its input is"
            )
    for path, leaf in columns[0].items():
        row = [column[path] for column in columns]
        if not isinstance(leaf, Tensor):
            _check_equal(f"output{path}", row)
            continue
        ids = tuple(map(id, row))
        if places.setdefault(id(leaf), ids) != ids:
            raise ValueError(
                f"output{path} is one tensor with another output for micro-batch 0, and not for all others: let the "
                "model return a copy there"
            )
        if id(leaf) not in joined:
            joined[id(leaf)] = _joined(f"output{path}", row)
    return map_tensors(lambda tensor: joined[id(tensor)], first)


def _joined(name: str, tensors: Sequence[Any]) -> Tensor:
    """Concatenates a tensor [n_i, ...] of each micro-batch into [N, ...]."""
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a Tensor for micro-batch 0, and a {type(tensor).__name__} for {number}")
        if tensor.dim() == 0:
            raise ValueError(
                f"{name} is a tensor without dimensions for each of {len(tensors)} micro-batches, so they cannot be "
                "concatenated along dimension 0: return a value per sample [N], and reduce it after the pipeline"
            )
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise ValueError(
                f"{name} of micro-batch 0 is {described(first)}, and of micro-batch {number} {described(tensor)}: to "
                "be concatenated along dimension 0 they have to agree in all but that"
            )
    return torch.cat(list(tensors))


def _check_equal(name: str, values: Sequence[Any]) -> None:
    for number, value in enumerate(values):
        if value is values[0]:
            continue
        try:
            both_nan = value != value and values[0] != values[0]
            same = type(value) is type(values[0]) and bool(both_nan or value == values[0])
        except (TypeError, ValueError, RuntimeError):  # What cannot be compared, as arrays of some libraries.
            same = False
        if not same:
            raise ValueError(
                f"{name} is no tensor and differs between micro-batches: {values[0]!r} for 0, {value!r} for {number}; "
                "return a tensor [N, ...], or what is the same for all samples"
            )
