"""Whether an input has the features that a layer expects, divided between the ranks as its weight is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scale_core.compat import untraced
from scale_core.exchange import exchange
from scale_core.group import Group
from scale_tp.arrivals import Arrival
from scale_tp.crossings import entered_with
from scale_tp.split_sizes import Split


def check_features(layer: str, input_: Any, expected: int, *, mend: str = "") -> None:
    """Refuses what is no tensor, and an input of another last dimension.

    Args:
        layer: In an error.
        input_: [..., features].
        expected: How many features there have to be.
        mend: What to write instead, in an error.

    Raises:
        TypeError: It is no tensor, and none on its way.
        ValueError: It has another last dimension.
    """
    if not isinstance(input_, Tensor | Arrival):
        raise TypeError(f"{layer}: expected a tensor [..., {expected}], got {type(input_).__name__}")
    if not input_.shape or input_.shape[-1] != expected:
        hint = f": {mend}" if mend else ""
        raise ValueError(f"{layer}: expected an input [..., {expected}], got {list(input_.shape)}{hint}")


@untraced
def check_parts(what: str, input_: Tensor, group: Group, split: Split, fitting: int | None, *, mend: str) -> int:
    """Refuses an input of a row parallel layer that other ranks have divided, or in another way.

    Args:
        what: The layer, in an error.
        input_: [..., features of this rank].
        group: The ranks that divide the layer.
        split: Which features each of them has.
        fitting: What this has returned for the layer before. Only the first time, all ranks ask each other: one rank
            alone, whose input has changed, would wait for the others in vain.
        mend: What to write instead, in an error.

    Returns:
        The number of features, which fits.

    Raises:
        TransferError: A rank did not answer.
        TypeError: The input is no tensor.
        ValueError: The input does not fit, on this rank or, the first time, on another one.
    """
    given: object = input_
    if not isinstance(given, Tensor):
        raise TypeError(f"{what}: expected a tensor [..., {split.sizes[group.rank]}], got {type(given).__name__}")
    width = input_.shape[-1] if input_.dim() else 0
    if width == fitting:
        return width
    others = [ranks for ranks in entered_with(input_) if ranks.ranks != group.ranks]
    if others:
        raise ValueError(
            f"{what}: the layer is divided between ranks {list(group.ranks)}, but its input comes "
            f"from layers that are divided between ranks {list(others[0].ranks)}: give both the same group, or let "
            "the layer before gather its output, and pass the whole to one with input_is_parallel=False"
        )
    asks = fitting is None and group.backend != "fake"
    widths = [row[0] for row in exchange([width], group)] if asks else None
    expected = split.sizes
    if width != expected[group.rank] or (widths is not None and tuple(widths) != expected):
        raise ValueError(
            f"{what}: expected the {split.total} input features to be divided as {list(expected)} between the ranks, "
            f"got {widths or width} of them: {mend}"
        )
    return width
