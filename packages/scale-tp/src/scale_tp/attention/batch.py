"""The inputs of a model for a divided sequence: parts of tensors, shifted targets, the divisor of its loss.

The mean over all tokens is not the mean of the ranks' means, since ranks have different numbers of tokens that count.
So each rank divides its sum by the mean number: then the mean of the ranks' losses, as data parallelism takes it of
their gradients, is the mean over all tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.comm.mesh import ParallelDims
from scale_tp.attention.load_balance import split_sequence
from scale_tp.attention.padding import padding_mask
from scale_tp.comm import all_reduce_sum
from scale_tp.parallel_state import DATA_CONTEXT, axis_group, context_parallel_group


def num_tokens_per_rank(targets: Tensor, process_group: GroupLike = None, *, ignore_index: int = -100) -> Tensor:
    """Returns the divisor of a rank's sum of losses: the number of targets that count, as a mean over the ranks.

    All ranks of the group call it; one number is summed over them.

    Args:
        targets: [batch, positions held], this rank's shard.
        process_group: The ranks whose gradients are averaged. None is the data and the context axis of
            `initialize_model_parallel` together, or only this process.
        ignore_index: Of targets that do not count.

    Returns:
        A scalar, fp32.

    Example:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from scale_tp import num_tokens_per_rank
        >>> targets = torch.tensor([[4, 2, -100]])
        >>> loss = F.cross_entropy(torch.zeros(3, 5), targets.flatten(), reduction="sum") / num_tokens_per_rank(targets)
        >>> bool(loss == F.cross_entropy(torch.zeros(3, 5), targets.flatten()))
        True

    See also: [the guide to context parallel](../guides/context-parallel.md).
    """
    ranks = group_of(process_group, "loss") if process_group is not None else axis_group(DATA_CONTEXT)
    return all_reduce_sum((targets != ignore_index).sum(), ranks).float() / ranks.size


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any],
    process_group: GroupLike = None,
    *,
    loss_process_group: GroupLike = None,
    is_causal: bool = True,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """Returns this rank's part of a batch for a model of transformers, to be called as `model(**part)`.

    All ranks of the group have the same batch, of full sequences. Besides the parts of its tensors the result has
    `position_ids`. Where there are `labels`, it also has `num_items_in_batch`, and for a causal model `shift_labels`,
    the labels shifted before they were cut. So the mean of `model(**part).loss` over the ranks of `loss_process_group`
    is the loss of all their tokens. With a causal model, `attention_mask` has only ones. Without it, transformers would
    treat the part as packed sequences, because its positions are not one run. If padding would be attended to, it is a
    mask of this rank's positions [batch, 1, positions or 1, positions], in the form of transformers. `context_parallel`
    reads it as padding.

    Args:
        batch: Tensors [batch, length, ...] by name; `input_ids` or `inputs_embeds` has the length. Padding, the zeros
            of `attention_mask`, has labels that are ignored, and costs least on the right. Values that are not tensors
            are passed on unchanged. This includes `num_items_in_batch`. If you accumulate gradients, pass
            `num_tokens_per_rank` of all micro-batches as this value.
        process_group: The ranks that divide the sequence; None is the context axis of `initialize_model_parallel`, or
            only this process.
        loss_process_group: The ranks whose gradients are averaged; None is the data and the context axis together. It
            is needed where there are labels and `process_group` is a group.
        is_causal: Whether the model predicts the token after each position, from it and those before.
        ignore_index: The value of labels that do not count. If it is not -100, a batch with labels gets it as an entry,
            for the model's loss.

    Raises:
        ValueError: The length does not divide, padding counts in the labels, sequences are packed, or the batch has a
            different `ignore_index`.

    Examples:
        >>> import torch
        >>> from scale_tp import get_batch_on_this_cp_rank
        >>> tokens = torch.arange(16).view(2, 8)
        >>> part = get_batch_on_this_cp_rank({"input_ids": tokens, "labels": tokens})
        >>> part["input_ids"].shape, sorted(part)[:2]
        (torch.Size([2, 8]), ['attention_mask', 'input_ids'])

    See also: [the guide to context parallel](../guides/context-parallel.md).
    """
    ranks = context_parallel_group(process_group)
    inputs = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if inputs is None:
        raise ValueError(f"expected input_ids or inputs_embeds in the batch, got {', '.join(batch) or 'nothing'}")
    length = inputs.shape[1]
    _check_length(length, ranks, ignore_index)
    if batch.get("ignore_index", ignore_index) != ignore_index:
        raise ValueError(
            f"expected ignore_index={ignore_index} in the batch, as the labels are counted, got "
            f"{batch['ignore_index']}: pass it as get_batch_on_this_cp_rank(batch, ignore_index=...)"
        )
    full_batch = dict(batch)
    mask = full_batch.pop("attention_mask", None)
    real = _check_padding(mask, batch.get("labels"), ignore_index=ignore_index)
    if full_batch.get("position_ids") is None:
        full_batch["position_ids"] = torch.arange(length, device=inputs.device).expand(inputs.shape[:2])
    _check_not_packed(full_batch["position_ids"], real)
    if full_batch.get("labels") is not None and is_causal:
        full_batch["labels"] = full_batch["shift_labels"] = F.pad(full_batch["labels"], (0, 1), value=ignore_index)[
            :, 1:
        ]
    if full_batch.get("labels") is not None and ignore_index != -100:  # which a loss of transformers ignores by itself
        full_batch["ignore_index"] = ignore_index
    part = {name: _part_of(name, value, length, ranks) for name, value in full_batch.items()}
    if real is not None and not (is_causal and _is_on_the_right(real)):
        part["attention_mask"] = padding_mask(split_sequence(~real, ranks), is_causal=is_causal)
    elif is_causal:
        part["attention_mask"] = torch.ones_like(part["position_ids"])
    if part.get("labels") is not None and part.get("num_items_in_batch") is None:
        averaged = loss_process_group if loss_process_group is not None else _default_loss_ranks(process_group, ranks)
        part["num_items_in_batch"] = num_tokens_per_rank(part["labels"], averaged, ignore_index=ignore_index)
    return part


def _part_of(name: str, value: Any, length: int, ranks: Group) -> Any:
    if not isinstance(value, Tensor) or name == "num_items_in_batch":
        return value
    if value.dim() < 2 or value.shape[1] != length:
        raise ValueError(
            f"expected batch[{name!r}] to be [batch, {length}, ...], as the sequence is long, got {list(value.shape)}: "
            "take it out of the batch, and pass this rank's shard of it to the model"
        )
    return split_sequence(value, ranks)


def _check_length(length: int, ranks: Group, ignore_index: int) -> None:
    missing = max(-length % ranks.size, 2 * ranks.size - length if ranks.size > 1 else 0)
    if missing:
        raise ValueError(
            f"expected a length that divides into {ranks.size} ranks, 2 positions or more each, got {length}: pad it "
            f"on the right by {missing}, such as F.pad(input_ids, (0, {missing})) and F.pad(labels, (0, {missing}), "
            f"value={ignore_index})"
        )


def _is_on_the_right(real: Tensor) -> bool:
    """Whether all padding follows the tokens, where no position of a causal model sees it but its own."""
    return not bool((real[:, 1:] & ~real[:, :-1]).any())


def _check_padding(mask: Tensor | None, labels: Tensor | None, *, ignore_index: int) -> Tensor | None:
    """Returns which positions are no padding, [batch, length]; None is all of them."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise ValueError(
            f"expected batch['attention_mask'] to be [batch, length], got {list(mask.shape)}: masks for pairs of "
            "positions are not divided"
        )
    real = mask.bool()
    if bool(real.all()):
        return None
    if labels is not None and bool((labels[~real] != ignore_index).any()):
        raise ValueError(
            "expected no label of the padding to count: write batch['labels'][batch['attention_mask'] == 0] = "
            f"{ignore_index}"
        )
    return real


def _check_not_packed(positions: Tensor, real: Tensor | None) -> None:
    breaks = positions[:, 1:] - positions[:, :-1] != 1
    if bool((breaks if real is None else breaks & real[:, 1:] & real[:, :-1]).any()):
        raise ValueError(
            "expected batch['position_ids'] to count on by 1: several sequences in a row would attend to one another, "
            "since masks are not divided. Give each a row, or leave position_ids out if they are to"
        )


def _default_loss_ranks(process_group: GroupLike, ranks: Group) -> Group:
    if process_group is None:
        return axis_group(DATA_CONTEXT)
    if isinstance(process_group, ParallelDims):
        return group_of(process_group, "loss")
    world = group_of()
    if ranks.size == world.size:
        return ranks
    raise ValueError(
        f"the labels are counted over the ranks whose gradients are averaged, and process_group= has {ranks.size} of "
        f"{world.size} ranks: pass loss_process_group= as well, the ranks of the data and the context axis together, "
        "or call scale_tp.initialize_model_parallel(model, context_parallel_size=...)"
    )
