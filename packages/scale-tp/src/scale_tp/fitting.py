"""Whether an input is divided between the ranks as the weight is that it is to be multiplied with."""

from __future__ import annotations

from torch import Tensor

from scale_core.compat import untraced
from scale_core.exchange import exchange
from scale_core.group import Group
from scale_tp.crossings import entered_with
from scale_tp.split_sizes import Split


@untraced
def check_parts(input_: Tensor, group: Group, split: Split, fitting: int | None) -> int:
    """Refuses an input of a row parallel layer that other ranks have divided, or in another way.

    Args:
        input_: [..., features of this rank].
        group: The ranks that divide the layer.
        split: Which features each of them has.
        fitting: What this has returned for the layer before. Only the first time, all ranks ask each other: one rank
            alone, whose input has changed, would wait for the others in vain.

    Returns:
        The number of features, which fits.

    Raises:
        TransferError: A rank did not answer.
        ValueError: The input does not fit, on this rank or, the first time, on another one.
    """
    width = input_.shape[-1] if input_.dim() else 0
    if width == fitting:
        return width
    others = [ranks for ranks in entered_with(input_) if ranks.ranks != group.ranks]
    if others:
        raise ValueError(
            f"RowParallelLinear: the layer is divided between ranks {list(group.ranks)}, but its input comes "
            f"from layers that are divided between ranks {list(others[0].ranks)}: give both the same group, or let "
            "the layer before gather its output, and pass the whole to one with input_is_parallel=False"
        )
    asks = fitting is None and group.backend != "fake"
    widths = [row[0] for row in exchange([width], group)] if asks else None
    expected = split.sizes
    if width != expected[group.rank] or (widths is not None and tuple(widths) != expected):
        raise ValueError(
            f"RowParallelLinear: expected the {split.total} input features to be divided as {list(expected)} "
            f"between the ranks, got {widths or width} of them: what comes before must be divided alike, as by "
            f"ColumnParallelLinear(..., {split.total}, gather_output=False) in the same group; or pass the "
            "whole input to a layer with input_is_parallel=False"
        )
    return width
