"""Collectives on one-dimensional tensors, each with a handle that owns its buffers.

Above this file and `exchange` nobody knows the transport. NCCL has every operation natively. Gloo has no
reduce-scatter (its stand-in clones, all-reduces and copies: twice the bytes) and gathers through a temporary of the
whole output, so on gloo both are made of tagged messages, straight out of and into the caller's buffers: each rank
sends (W-1)/W of the full buffer, which is the least that any algorithm can do.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core import compat
from scale_core.group import Group
from scale_core.messages import UNTAGGED, peer_to_peer, peers, receive_all, send_all, torch_group
from scale_core.pending import Pending, begin

__all__ = ["Op", "Pending", "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]

Op = Literal["sum", "max", "min"]

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_gather(output: Tensor, shard: Tensor, group: Group, *, tag: int = UNTAGGED) -> Pending:
    """Starts to fill `output` with every rank's shard, in rank order.

    Args:
        output: [W * S], any dtype. May hold `shard` already, as its own part.
        shard: [S], of the same dtype; must not change before `wait()`.
        group: The W ranks.
        tag: What this gather is for; ranks whose tags differ time out instead of mixing their data.

    Raises:
        ValueError: The sizes or dtypes do not fit each other.
    """
    _check_sizes("all_gather", output, shard, group)
    own = _part(output, group.rank, group)
    if group.size == 1 or not peer_to_peer(group, output.device):
        if group.size == 1:
            _fill(own, shard)
            return Pending("all_gather", [], output)
        works = [begin(None, lambda: compat.all_gather_single(output, shard, torch_group(group)))]
        return Pending("all_gather", works, output, keep=[shard])
    wire, sent = _as_bytes(output), _as_bytes(shard)
    works = receive_all(group, {peer: _part(wire, peer, group) for peer in peers(group)}, tag)
    works += send_all(group, dict.fromkeys(peers(group), sent), tag)
    _fill(own, shard)
    return Pending("all_gather", works, output, keep=[shard, wire, sent])


def reduce_scatter(
    full: Tensor, group: Group, *, dtype: torch.dtype | None = None, average: bool = True, tag: int = UNTAGGED
) -> Pending:
    """Starts to sum every rank's `full`; each rank gets its own part of the sum.

    On gloo the summands are added in rank order, in the wider one of `dtype` and the wire's; the sum is divided by W
    there, and rounded to `dtype` once. So the result is a function of the summands alone: timing does not change it.

    Args:
        full: [W * S]; belongs to the collective until `wait()`. Its dtype is what is sent.
        group: The W ranks.
        dtype: The dtype of the result; None is that of `full`.
        average: Divide by W, as data parallel training does; for floating-point numbers only.
        tag: As in `all_gather`.

    Returns:
        A handle whose result is a tensor [S] that belongs to the caller: a new one, or in a world of one `full` itself.

    Raises:
        ValueError: `full` does not divide into W parts, or is to be averaged and has no fractions.
    """
    if full.dim() != 1 or full.numel() % group.size or not full.is_contiguous():
        raise ValueError(
            f"reduce_scatter: expected one contiguous dimension that divides into {group.size} parts, "
            f"got {tuple(full.shape)} with strides {full.stride()}"
        )
    if average and not (full.is_floating_point() or full.is_complex()):
        raise ValueError(f"reduce_scatter: {full.dtype} has no fractions to average in: pass average=False for the sum")
    dtype = dtype or full.dtype
    mine = _part(full, group.rank, group)
    if group.size == 1:
        return Pending("reduce_scatter", [], mine.to(dtype))
    if not peer_to_peer(group, full.device):
        return _native_reduce_scatter(full, group, dtype, average)
    total = torch.empty(mine.shape, dtype=torch.promote_types(dtype, full.dtype), device=full.device)
    received = {peer: torch.empty_like(mine) for peer in peers(group)}
    first = next(iter(received))
    if total.dtype == full.dtype:
        received[first] = total
    works = receive_all(group, received, tag)
    works += send_all(group, {peer: _part(full, peer, group) for peer in peers(group)}, tag)

    def add_up() -> Tensor:
        return _sum_in_rank_order(total, {**received, group.rank: mine}, group.size if average else 1).to(dtype)

    return Pending("reduce_scatter", works, total, finish=add_up, keep=[full])


def all_reduce(tensor: Tensor, group: Group, *, op: Op = "sum") -> Pending:
    """Starts to combine every rank's `tensor` [any shape, contiguous] in place.

    Args:
        tensor: Of one shape and dtype on all ranks.
        group: The ranks.
        op: "sum" (in an order that is the same on all ranks, but the transport's own), "max" or "min".

    Raises:
        ValueError: Another `op`.
    """
    if op not in _REDUCE_OPS:
        raise ValueError(f"all_reduce: expected op to be one of {', '.join(map(repr, _REDUCE_OPS))}, got {op!r}")
    if group.size == 1:
        return Pending("all_reduce", [], tensor)
    torch_op = _REDUCE_OPS[op]
    work = begin(None, lambda: dist.all_reduce(tensor, torch_op, group=torch_group(group), async_op=True))
    return Pending("all_reduce", [work], tensor)


def broadcast(tensor: Tensor, group: Group, *, source: int = 0) -> Pending:
    """Starts to overwrite `tensor` [any shape, contiguous] with that of rank `source` of the group.

    Raises:
        ValueError: The group has no such rank.
    """
    if not 0 <= source < group.size:
        raise ValueError(f"broadcast: expected source to be a rank of the group, 0 to {group.size - 1}, got {source}")
    if group.size == 1:
        return Pending("broadcast", [], tensor)
    start = partial(dist.broadcast, tensor, group=torch_group(group), group_src=source, async_op=True)
    return Pending("broadcast", [begin(source, start)], tensor)


def all_to_all(output: Tensor, input: Tensor, group: Group) -> Pending:
    """Starts to send part r of `input` [W * S] to rank r; part r of `output` [W * S] comes from rank r.

    Raises:
        ValueError: The sizes or dtypes do not fit each other.
    """
    if output.shape != input.shape or output.dtype != input.dtype or input.dim() != 1 or input.numel() % group.size:
        raise ValueError(
            f"all_to_all: expected one dimension, equal sizes and dtypes that divide into {group.size} parts, got "
            f"input {tuple(input.shape)} {input.dtype} and output {tuple(output.shape)} {output.dtype}"
        )
    if group.size == 1:
        return Pending("all_to_all", [], _fill(output, input))
    start = partial(dist.all_to_all_single, output, input, group=torch_group(group), async_op=True)
    return Pending("all_to_all", [begin(None, start)], output, keep=[input])


def _part(full: Tensor, rank: int, group: Group) -> Tensor:
    size = full.numel() // group.size
    return full.narrow(0, rank * size, size)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo knows few dtypes, and a gather does no arithmetic."""
    return tensor.view(torch.uint8)


def _fill(target: Tensor, source: Tensor) -> Tensor:
    if not target.is_set_to(source):
        target.copy_(source)
    return target


def _sum_in_rank_order(result: Tensor, summands: dict[int, Tensor], divisor: int) -> Tensor:
    """Adds the summands into `result`, which may be one of the first two of them, and divides."""
    ordered = [summands[rank] for rank in sorted(summands)]
    if ordered[0].dtype == result.dtype:
        torch.add(ordered[0], ordered[1], out=result)
    else:
        result.copy_(ordered[0]).add_(ordered[1])
    for summand in ordered[2:]:
        result.add_(summand)
    return result if divisor == 1 else result.div_(divisor)


def _native_reduce_scatter(full: Tensor, group: Group, dtype: torch.dtype, average: bool) -> Pending:
    result = torch.empty(full.numel() // group.size, dtype=full.dtype, device=full.device)
    before = _divisor_before(full.dtype, group.size) if average else 1
    after = group.size / before if average else 1
    if before != 1:
        full.div_(before)
    work = begin(None, lambda: compat.reduce_scatter_single(result, full, torch_group(group)))
    wider = torch.promote_types(dtype, full.dtype)

    def finish() -> Tensor:  # Must not refer to `full`, which is free by now.
        # Divided in the wider dtype: a half-precision sum that is already small would lose bits twice.
        wide = result.to(wider)
        return (wide if after == 1 else wide.div_(after)).to(dtype)

    return Pending("reduce_scatter", [work], result, finish=finish, keep=[full])


def _divisor_before(dtype: torch.dtype, size: int) -> int:
    """What to divide fp16 summands by before they are added in fp16: the power of two next to the root of W.

    The sum of W gradients overflows where their average does not, and a W-th of a gradient underflows.
    """
    return 1 << (size.bit_length() // 2) if dtype == torch.float16 else 1


def _check_sizes(op: str, output: Tensor, shard: Tensor, group: Group) -> None:
    if output.dim() != 1 or shard.dim() != 1 or output.numel() != shard.numel() * group.size:
        raise ValueError(
            f"{op}: expected an output of {group.size} x {shard.numel()} elements in one dimension, "
            f"got output {tuple(output.shape)} and shard {tuple(shard.shape)}"
        )
    if not (output.is_contiguous() and shard.is_contiguous()):
        raise ValueError(
            f"{op}: expected contiguous tensors, got strides {output.stride()} and {shard.stride()}: call contiguous()"
        )
    if output.dtype != shard.dtype or output.device != shard.device:
        raise ValueError(
            f"{op}: expected output and shard of one dtype and device, got {output.dtype} on {output.device} "
            f"and {shard.dtype} on {shard.device}"
        )
