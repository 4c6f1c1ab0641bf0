"""Where to checkpoint, by what each module leaves behind: cuts that make the largest part as small as can be.

>>> forward = [LayerTrace(name, "Linear", True, 0, size, size) for name, size in zip("abcde", [4, 1, 3, 6, 2])]
>>> suggest_checkpoint_location(forward, num_checkpoints=1).split_modules
('d',)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scale_checkpoint.tracker import LayerTrace


@dataclass(frozen=True)
class SuggestedCheckpoints:
    """Where to checkpoint.

    Attributes:
        max_memory: The most bytes that lie between two neighbouring checkpoints.
        split_modules: The modules at which a new checkpointed part begins.
        all_modules: Those that were looked at.
    """

    max_memory: int
    split_modules: tuple[str, ...]
    all_modules: tuple[str, ...]


def suggest_checkpoint_location(
    traces: Sequence[LayerTrace], num_checkpoints: int, num_skipped_layers: int = 0
) -> SuggestedCheckpoints:
    """Suggests where to split a model into parts that are checkpointed, so that the largest part is as small as can be.

    Looks at what each forward leaves behind. `plan_memory` decides by time as well, and tells what it costs.

    Args:
        traces: Of a tracker.
        num_checkpoints: How many splits.
        num_skipped_layers: Forward passes at the beginning that are left out.

    Raises:
        ValueError: There are fewer passes than splits, or a number is negative.
    """
    passes = [trace for trace in traces if trace.is_forward and trace.module_name][num_skipped_layers:]
    if num_checkpoints < 0 or num_skipped_layers < 0 or num_checkpoints >= max(1, len(passes)):
        raise ValueError(
            f"{num_checkpoints} checkpoints need more than as many forward passes, but {len(passes)} are left after "
            f"{num_skipped_layers} that are skipped; run a forward inside `with LayerMemoryTracker(model) as tracker`"
        )
    max_memory, splits = find_best_reset_points([max(0, trace.memory_diff) for trace in passes], num_checkpoints)
    names = tuple(trace.module_name for trace in passes)
    return SuggestedCheckpoints(max_memory, tuple(names[split] for split in splits), names)


def find_best_reset_points(activation_sizes: Sequence[int], num_checkpoints: int) -> tuple[int, list[int]]:
    """Cuts a row of sizes into `num_checkpoints` + 1 parts, the largest sum being as small as can be.

    >>> find_best_reset_points([4, 1, 3, 6, 2], 1)
    (8, [3])

    Args:
        activation_sizes: None negative; more than `num_checkpoints`.
        num_checkpoints: Cuts.

    Returns:
        The largest sum, and the index of the first size of each part but the first.
    """
    low, high = max(activation_sizes, default=0), sum(activation_sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(activation_sizes, middle)) <= num_checkpoints:
            high = middle
        else:
            low = middle + 1
    cuts = _cuts(activation_sizes, low)
    spare = [index for index in range(1, len(activation_sizes)) if index not in cuts]
    return low, sorted(cuts + spare[: num_checkpoints - len(cuts)])


def _cuts(sizes: Sequence[int], most: int) -> list[int]:
    """Where parts begin if each takes as many sizes as `most` holds."""
    cuts, filled = [], 0
    for index, size in enumerate(sizes):
        filled += size
        if filled > most:
            cuts.append(index)
            filled = size
    return cuts
