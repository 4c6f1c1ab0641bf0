"""Collectives on one-dimensional tensors, each with a handle that owns its buffers.

Above this file and `control_plane` nobody knows the transport. NCCL has every operation natively. Gloo has no
reduce-scatter (its stand-in clones, all-reduces and copies: twice the bytes) and gathers through a temporary of the
whole output, so on gloo both are made of tagged messages, straight out of and into the caller's buffers: each rank
sends (W-1)/W of the full buffer, which is the least that any algorithm can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core import buffer_pool, compat
from scale_core.comm.group import Group
from scale_core.comm.work import Pending, TransferError, Work, begin

# A transport for what is on the host, for groups that have none.
#
# A group of NCCL alone moves nothing on the host. But ranks tell each other numbers and words, shards may be kept on
# the host with their gradients, and a model may be built there: none of that should need a device, least of all a wait
# for one. So such a group gets a twin: the same ranks over gloo, made when the host is needed first, by all of them
# together.

# None where a group reaches the host by itself: what stands here must not keep its own key alive.
_twins: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()


def torch_group(group: Group) -> dist.ProcessGroup:
    """The process group of a group that has more than one rank."""
    assert group.process_group is not None
    return group.process_group


def group_for(device: torch.device, group: Group) -> dist.ProcessGroup:
    """Returns the process group that moves tensors on this device: the group's own or, for the host, its twin.

    The first time that a group needs its twin, all its ranks have to be here together, and wait for each other as long
    as the group's own limit says.

    Raises:
        TransferError: A rank did not come.
        RuntimeError: The group does not reach the host, and this torch has no gloo.
    """
    own = torch_group(group)
    if device.type != "cpu":
        return own
    if own not in _twins:
        _twins[own] = None if compat.reaches_host(own) else _made(own, group)
    return _twins[own] or own


def _made(own: dist.ProcessGroup, group: Group) -> dist.ProcessGroup:
    if not dist.is_gloo_available():
        raise RuntimeError(
            f"the ranks {list(group.ranks)} have to tell each other something on the host, but their group is one of "
            f"{group.backend} alone, and this torch was built without gloo: install one that was built with it"
        )
    try:
        return compat.gloo_twin(own)
    except RuntimeError as error:
        raise TransferError("to meet on the host", None, str(error).splitlines()[0]) from error


# Tagged messages from rank to rank, of which the collectives are made where the transport has none as good.
#
# A message carries a tag that says what it is for, so two ranks that are at different places never read each other's
# data: they time out, and that can be caught and named. Collectives of torch match by their order alone.

# Tags of the messages that belong to no unit: 0 for data, and from 1 on for records, by their length, because gloo ends
# the process when a message is longer than the buffer that waits for it. A unit's tags come from its name.
UNTAGGED = 0
"""The tag of data that belongs to no unit."""

LONGEST_RECORD = 1 << 20
"""The most integers that ranks tell each other at once."""

UNIT_TAGS = range(LONGEST_RECORD + 2, 1 << 31)
"""The tags that callers may choose from."""

HOST = torch.device("cpu")
"""Where messages are sent from and received."""


def peer_to_peer(group: Group, device: torch.device) -> bool:
    """Whether collectives are made of messages: on the host, where gloo moves them; CUDA has them natively."""
    return device.type == HOST.type and group.backend != "fake"


def peers(group: Group) -> list[int]:
    """The other ranks of the group."""
    return [rank for rank in range(group.size) if rank != group.rank]


def receive_all(group: Group, targets: dict[int, Tensor], tag: int) -> list[tuple[int | None, Work]]:
    """Starts to receive one message from each rank; always called before `send_all`.

    Gloo holds a message back until its receive is posted, and two ranks that both wait for a send before they post
    their receive would wait forever.
    """
    receive = group_for(HOST, group).recv
    return [begin(peer, partial(receive, [target], peer, tag)) for peer, target in targets.items() if target.numel()]


def send_all(group: Group, sources: dict[int, Tensor], tag: int) -> list[tuple[int | None, Work]]:
    """Starts to send each rank its message; one without elements is not sent, nor received."""
    send = group_for(HOST, group).send
    return [begin(peer, partial(send, [source], peer, tag)) for peer, source in sources.items() if source.numel()]


__all__ = ["Op", "Pending", "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]

Op = Literal["sum", "max", "min"]

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_gather(
    output: Tensor, shard: Tensor, group: Group, *, sizes: Sequence[int] | None = None, tag: int = UNTAGGED
) -> Pending:
    """Starts to fill `output` with every rank's shard, in rank order.

    Args:
        output: [W * S], any dtype. May hold `shard` already, as its own part.
        shard: [S], of the same dtype; must not change before `wait()`.
        group: The W ranks.
        sizes: How many elements each rank gives, by rank; None is S each.
        tag: What this gather is for; ranks whose tags differ time out instead of mixing their data.

    Raises:
        ValueError: The sizes or dtypes do not fit each other.
    """
    _check_sizes("all_gather", output, shard, group, sizes)
    parts = _parts(output, group, sizes)
    own = parts[group.rank]
    if group.size == 1 or not peer_to_peer(group, output.device):
        if group.size == 1:
            _fill(own, shard)
            return Pending("all_gather", [], output)
        if sizes is not None:
            works = [begin(None, lambda: dist.all_gather(parts, shard, group=torch_group(group), async_op=True))]
        else:
            works = [begin(None, lambda: compat.all_gather_single(output, shard, torch_group(group)))]
        return Pending("all_gather", works, output, keep=[shard])
    wire, sent = [_as_bytes(part) for part in parts], _as_bytes(shard)
    _fill(own, shard)  # Before the first message: nothing may fail between that and the handle that owns the buffers.
    works = receive_all(group, {peer: wire[peer] for peer in peers(group) if wire[peer].numel()}, tag)
    works += send_all(group, dict.fromkeys(peers(group), sent) if sent.numel() else {}, tag)
    return Pending("all_gather", works, output, keep=[shard, *wire, sent])


def reduce_scatter(
    full: Tensor,
    group: Group,
    *,
    dtype: torch.dtype | None = None,
    average: bool = True,
    divisor: int | None = None,
    sizes: Sequence[int] | None = None,
    tag: int = UNTAGGED,
) -> Pending:
    """Starts to sum every rank's `full`; each rank gets its own part of the sum.

    On gloo the summands are added in rank order, in the wider one of `dtype` and the wire's; the sum is divided by W
    there, and rounded to `dtype` once. So the result is a function of the summands alone: timing does not change it.

    Args:
        full: [W * S]; belongs to the collective until `wait()`. Its dtype is what is sent.
        group: The W ranks.
        dtype: The dtype of the result; None is that of `full`.
        average: Divide by W, as data parallel training does; for floating-point numbers only.
        divisor: What an average divides by instead of W, where some ranks have nothing but zeros to give.
        sizes: How many elements each rank gets, by rank; None is S each.
        tag: As in `all_gather`.

    Returns:
        A handle whose result is a tensor [S] that belongs to the caller: a new one, or in a world of one `full` itself.

    Raises:
        ValueError: `full` does not divide into W parts, or is to be averaged and has no fractions.
    """
    fits = full.numel() % group.size == 0 if sizes is None else full.numel() == sum(sizes) and len(sizes) == group.size
    if full.dim() != 1 or not fits or not full.is_contiguous():
        raise ValueError(
            f"reduce_scatter: expected one contiguous dimension that divides into {group.size} parts"
            f"{'' if sizes is None else f' of {list(sizes)}'}, "
            f"got {tuple(full.shape)} with strides {full.stride()}"
        )
    if average and not (full.is_floating_point() or full.is_complex()):
        raise ValueError(f"reduce_scatter: {full.dtype} has no fractions to average in: pass average=False for the sum")
    dtype = dtype or full.dtype
    parts = _parts(full, group, sizes)
    mine = parts[group.rank]
    divisor = (divisor or group.size) if average else 1
    if group.size == 1:
        return Pending("reduce_scatter", [], mine.to(dtype))
    if not peer_to_peer(group, full.device):
        return _native_reduce_scatter(full, parts, group, dtype, divisor, even=sizes is None)
    total = buffer_pool.empty(mine.numel(), torch.promote_types(dtype, full.dtype), full.device)
    received = {peer: buffer_pool.empty(mine.numel(), mine.dtype, mine.device) for peer in peers(group)}
    first = next(iter(received))
    if total.dtype == full.dtype:
        received[first] = total
    works = receive_all(group, received if mine.numel() else {}, tag)
    works += send_all(group, {peer: parts[peer] for peer in peers(group) if parts[peer].numel()}, tag)

    def add_up() -> Tensor:
        return _sum_in_rank_order(total, {**received, group.rank: mine}, divisor).to(dtype)

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
    work = begin(None, lambda: dist.all_reduce(tensor, torch_op, group=group_for(tensor.device, group), async_op=True))
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
    start = partial(dist.broadcast, tensor, group=group_for(tensor.device, group), group_src=source, async_op=True)
    return Pending("broadcast", [begin(source, start)], tensor)


def all_to_all(
    output: Tensor,
    input: Tensor,
    group: Group,
    *,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
    tag: int = UNTAGGED,
) -> Pending:
    """Starts to send part r of `input` to rank r; part r of `output` comes from rank r.

    Args:
        output: [W * S], or [sum of `output_sizes`].
        input: [W * S], or [sum of `input_sizes`], of the same dtype; must not change before `wait()`.
        group: The W ranks.
        output_sizes: How many elements come from each rank; None is S each.
        input_sizes: How many elements go to each rank; None is S each. What this rank sends to another one is what that
            one expects from it.
        tag: As in `all_gather`.

    Raises:
        ValueError: The sizes or dtypes do not fit each other.
    """
    if output_sizes is None and input_sizes is None:
        _check_even(output, input, group)
    else:
        _check_parts("output", output, output_sizes, group)
        _check_parts("input", input, input_sizes, group)
    if output.dtype != input.dtype or output.device != input.device:
        raise ValueError(
            f"all_to_all: expected output and input of one dtype and device, got {output.dtype} on {output.device} "
            f"and {input.dtype} on {input.device}"
        )
    sent, received = _parts(input, group, input_sizes), _parts(output, group, output_sizes)
    if group.size == 1:
        _fill(received[0], sent[0])
        return Pending("all_to_all", [], output)
    if not peer_to_peer(group, input.device):
        start = partial(
            dist.all_to_all_single,
            output,
            input,
            output_split_sizes=None if output_sizes is None else list(output_sizes),
            input_split_sizes=None if input_sizes is None else list(input_sizes),
            group=torch_group(group),
            async_op=True,
        )
        return Pending("all_to_all", [begin(None, start)], output, keep=[input])
    targets = {peer: _as_bytes(received[peer]) for peer in peers(group)}
    sources = {peer: _as_bytes(sent[peer]) for peer in peers(group)}
    _fill(received[group.rank], sent[group.rank])
    works = receive_all(group, targets, tag)
    works += send_all(group, sources, tag)
    return Pending("all_to_all", works, output, keep=[input, *targets.values(), *sources.values()])


def _parts(full: Tensor, group: Group, sizes: Sequence[int] | None) -> list[Tensor]:
    """What each rank has of a full buffer [W * S], by rank."""
    return (
        list(full.split(full.numel() // group.size if sizes is None else list(sizes)))
        if full.numel()
        else ([full] * group.size)
    )


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


def _native_reduce_scatter(
    full: Tensor, parts: list[Tensor], group: Group, dtype: torch.dtype, divisor: int, *, even: bool
) -> Pending:
    result = torch.empty_like(parts[group.rank])
    before = _divisor_before(full.dtype, divisor)
    after = divisor / before
    if before != 1:
        full.div_(before)
    if even:
        work = begin(None, lambda: compat.reduce_scatter_single(result, full, torch_group(group)))
    else:
        work = begin(None, lambda: dist.reduce_scatter(result, parts, group=torch_group(group), async_op=True))
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


def _check_even(output: Tensor, input: Tensor, group: Group) -> None:
    if output.shape != input.shape or input.dim() != 1 or input.numel() % group.size:
        raise ValueError(
            f"all_to_all: expected one dimension, equal sizes and dtypes that divide into {group.size} parts, got "
            f"input {tuple(input.shape)} {input.dtype} and output {tuple(output.shape)} {output.dtype}"
        )


def _check_parts(which: str, tensor: Tensor, sizes: Sequence[int] | None, group: Group) -> None:
    fits = tensor.numel() % group.size == 0 if sizes is None else tensor.numel() == sum(sizes)
    if tensor.dim() != 1 or not fits or (sizes is not None and len(sizes) != group.size):
        parts = f"{group.size} equal parts" if sizes is None else f"{group.size} parts of {list(sizes)} elements"
        raise ValueError(f"all_to_all: expected an {which} of one dimension in {parts}, got {tuple(tensor.shape)}")


def _check_sizes(op: str, output: Tensor, shard: Tensor, group: Group, sizes: Sequence[int] | None) -> None:
    expected = [shard.numel()] * group.size if sizes is None else list(sizes)
    fits = output.numel() == sum(expected) and shard.numel() == expected[group.rank]
    if output.dim() != 1 or shard.dim() != 1 or not fits:
        raise ValueError(
            f"{op}: expected an output of {f'{group.size} x {shard.numel()}' if sizes is None else expected} elements "
            f"in one dimension, got output {tuple(output.shape)} and shard {tuple(shard.shape)}"
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
