"""Collectives on one-dimensional tensors, and the small messages of the control plane.

NCCL has every operation natively. Gloo has no reduce-scatter (its stand-in clones, all-reduces and copies: twice the
bytes) and gathers through a temporary of the full output, so on gloo both are made of tagged messages, straight out of
and into the caller's buffers: each rank sends (W-1)/W of the full buffer, which is the least that any algorithm can do.
A tag tells the purpose of a message, so two ranks at different places never read each other's data: they time out, and
that can be caught and named. Collectives of torch match by their order alone.

All that moves on the host goes over a gloo group of our own. A user may send with any tag over the group that was
passed, so no tag there is free for us.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core import compat, fault_points
from scale_core.comm.fork import forked_error
from scale_core.comm.group import Group
from scale_core.comm.group_state import group_state
from scale_core.comm.work import CollectiveWork, Work, process_limit, start_work, wait_for
from scale_core.device import buffer_pool
from scale_core.errors import TransferError


def torch_group(group: Group) -> dist.ProcessGroup:
    """torch's process group of a group that has more than one rank. Raises LaunchError if a parent process made it."""
    assert group.process_group is not None
    if group.state.is_of_parent:
        raise forked_error()
    return group.process_group


def group_for(device: torch.device, group: Group, *, limit_seconds: float | None = None) -> dist.ProcessGroup:
    """Returns the process group that moves tensors on this device: the group's own or, for the host, its twin.

    Args:
        device: Where the tensors are.
        group: The ranks. At the first use of their twin, all of them have to be here together.
        limit_seconds: How long to wait for them then; None is `SCALE_LIMIT_SECONDS`, or the group's own limit.

    Raises:
        TransferError: A rank did not come.
    """
    return control_group(group, limit_seconds=limit_seconds) if peer_to_peer(group, device) else torch_group(group)


def control_group(group: Group, *, limit_seconds: float | None = None) -> dist.ProcessGroup:
    """Returns the gloo group that moves messages with tags; as `group_for` the host, if its tensors go there too."""
    process_group = torch_group(group)
    if group.state.is_host_group or group.backend == "fake":
        return process_group
    if group.state.host_twin is None:
        group.state.host_twin = _make_twin(process_group, group, limit_seconds or process_limit())
    return group.state.host_twin


def passed_group(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group that was passed, where this is its twin; any other group itself."""
    passed = group_state(process_group).twin_of
    return (passed and passed()) or process_group


def _make_twin(process_group: dist.ProcessGroup, group: Group, limit_seconds: float | None) -> dist.ProcessGroup:
    # All ranks create the twin together, at its first use. Our messages then never meet messages of the user, whatever
    # their tags. An NCCL group needs a twin too, because NCCL moves nothing on the host.
    if not dist.is_gloo_available():
        raise RuntimeError(
            f"ranks {list(group.ranks)} communicate on the host, and this torch was built without gloo: install one "
            "that was built with it"
        )
    limit = compat.time_limit(process_group) if limit_seconds is None else timedelta(seconds=limit_seconds)
    try:
        twin = compat.gloo_twin(process_group, limit, "host", compat.time_limit(process_group))
    except RuntimeError as error:
        absent, cause = compat.absent_from_twin(process_group), str(error).splitlines()[0]
        if absent:
            cause = f"timed out waiting {limit // timedelta(milliseconds=1)}ms"
        raise TransferError("meeting on the host", absent[0] if absent else None, cause, rank=group.rank) from error
    group_state(twin).twin_of = ref(process_group)
    return twin


# Tag 0 is data of no unit; tags from 1 on are records, by their length, because gloo ends the process when a message is
# longer than the buffer that waits for it; a unit's tags come from its name.
UNTAGGED = 0
LONGEST_RECORD = 1 << 20  # The most integers that ranks tell each other at once
_NO_MESSAGE = LONGEST_RECORD + 2  # The tag of a message that nobody sends
UNIT_TAGS = range(_NO_MESSAGE + 1, 1 << 31)  # Those that callers may choose from
HOST = torch.device("cpu")


def peer_to_peer(group: Group, device: torch.device) -> bool:
    """Whether collectives are made of tagged messages: on the host, over gloo."""
    return device.type == HOST.type and group.backend != "fake" and not group.state.moves_host_tensors


def peers(group: Group) -> list[int]:
    """The other ranks of the group."""
    return [rank for rank in range(group.size) if rank != group.rank]


def post_messages(
    group: Group, targets: dict[int, Tensor], sources: dict[int, Tensor], tag: int
) -> list[tuple[int | None, Work]]:
    """Posts all receives, then all sends, one message per rank; empty tensors are neither sent nor received."""
    # Gloo holds a message back until its receive is posted: two ranks that both wait for a send first would hang.
    host = control_group(group)
    works = [start_work(peer, partial(host.recv, [part], peer, tag)) for peer, part in targets.items() if part.numel()]
    works += [start_work(peer, partial(host.send, [part], peer, tag)) for peer, part in sources.items() if part.numel()]
    return works


def _close_connections(group: Group) -> None:
    """Closes the connections that messages of this rank take, so that the waits of the other ranks end."""
    host, nothing = control_group(group), torch.empty(1, dtype=torch.uint8, device=HOST)
    for peer in set(range(group.size)) - {group.rank}:
        with suppress(RuntimeError):  # Gloo closes all connections of a group where one wait passes its limit.
            host.recv([nothing], peer, _NO_MESSAGE).wait(timedelta(milliseconds=1))


Op = Literal["sum", "max", "min"]

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_gather(
    output: Tensor, shard: Tensor, group: Group, *, sizes: Sequence[int] | None = None, tag: int = UNTAGGED
) -> CollectiveWork:
    """Starts to fill `output` with every rank's shard, in rank order.

    Args:
        output: [W * S], any dtype. May hold `shard` already, as its own shard.
        shard: [S], of the same dtype; must not change before `wait()`.
        group: The W ranks.
        sizes: How many elements each rank gives, by rank; None is S each.
        tag: The purpose of this gather; ranks whose tags differ time out instead of mixing their data.

    Raises:
        ValueError: The sizes or dtypes do not fit each other.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.comm.collectives import all_gather
        >>> output = torch.zeros(4)
        >>> _ = all_gather(output, torch.ones(4), Group()).wait()  # a group of this rank only
        >>> output
        tensor([1., 1., 1., 1.])

    See also: [the core](../how-the-core-works.md).
    """
    check_dtypes("all_gather", output, shard)
    parts = parts_by_rank("all_gather", "output", output, group, sizes)
    own = parts[group.rank]
    if own.shape != shard.shape or not shard.is_contiguous():
        raise ValueError(
            f"all_gather: expected a contiguous shard {tuple(own.shape)} for an output {tuple(output.shape)} on "
            f"{group.size} ranks, got {tuple(shard.shape)} with strides {shard.stride()}"
        )
    if group.size == 1:
        fill(own, shard)
        return CollectiveWork("all_gather", [], output)
    if fault_points.active is not None:
        fault_points.active("all_gather", "")
    if not peer_to_peer(group, output.device):
        start = partial(compat.all_gather_single, output, shard, torch_group(group))
        if sizes is not None:
            start = partial(dist.all_gather, parts, shard, group=torch_group(group), async_op=True)
        return CollectiveWork("all_gather", [start_work(None, start)], output, keep=[shard], rank=group.rank)
    # As bytes: gloo knows few dtypes, and a gather does no arithmetic.
    wire, sent = [part.view(torch.uint8) for part in parts], shard.view(torch.uint8)
    fill(own, shard)  # Before the first message: nothing may fail between that and the handle of the buffers.
    others = peers(group)
    works = post_messages(group, {peer: wire[peer] for peer in others}, dict.fromkeys(others, sent), tag)
    return CollectiveWork("all_gather", works, output, keep=[shard, *wire, sent], rank=group.rank)


def reduce_scatter(
    full: Tensor,
    group: Group,
    *,
    dtype: torch.dtype | None = None,
    average: bool = True,
    divisor: float | None = None,
    sizes: Sequence[int] | None = None,
    tag: int = UNTAGGED,
) -> CollectiveWork:
    """Starts to sum every rank's `full`; each rank gets its own shard of the sum.

    On gloo we add in rank order, in `dtype` or the dtype of the wire, whichever is wider. Then the sum is divided by W,
    and rounded to `dtype` once. So the result depends only on the summands, and timing does not change it.

    Args:
        full: [W * S]; belongs to the collective until `wait()`. Its dtype is the dtype of the messages.
        group: The W ranks.
        dtype: The dtype of the result; None is the dtype of `full`.
        average: Divide by W, as data parallel training does; for floating-point numbers only.
        divisor: The divisor of an average in place of W, where some ranks have nothing but zeros to give.
        sizes: How many elements each rank gets, by rank; None is S each.
        tag: As in `all_gather`.

    Returns:
        A handle whose result is a tensor [S] that belongs to the caller: a new one, or in a world of one `full` itself.

    Raises:
        ValueError: `full` does not divide into W parts, or is to be averaged and has no fractions.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.comm.collectives import reduce_scatter
        >>> reduce_scatter(torch.ones(4), Group()).wait()
        tensor([1., 1., 1., 1.])

    See also: [the core](../how-the-core-works.md).
    """
    parts = parts_by_rank("reduce_scatter", "a full tensor", full, group, sizes)
    if average and not (full.is_floating_point() or full.is_complex()):
        raise ValueError(f"reduce_scatter: {full.dtype} has no fractions to average in: pass average=False for the sum")
    dtype = dtype or full.dtype
    mine = parts[group.rank]
    divisor = (divisor or group.size) if average else 1
    if group.size == 1:
        return CollectiveWork("reduce_scatter", [], mine.to(dtype) if divisor == 1 else mine.to(dtype).div_(divisor))
    if fault_points.active is not None:
        fault_points.active("reduce_scatter", "")
    if not peer_to_peer(group, full.device):
        return _native_reduce_scatter(full, parts, group, dtype, divisor, even=sizes is None)
    others = peers(group)

    def empty(dtype: torch.dtype) -> Tensor:
        if mine.nbytes >= buffer_pool.SMALLEST_BYTES:
            return buffer_pool.empty(mine.numel(), dtype, mine.device)
        return torch.empty(mine.numel(), dtype=dtype, device=mine.device)

    total = empty(torch.promote_types(dtype, full.dtype))
    received = {peer: empty(full.dtype) for peer in others}
    if total.dtype == full.dtype:
        received[others[0]] = total
    works = post_messages(group, received, {peer: parts[peer] for peer in others}, tag)

    def add_up() -> Tensor:
        return _sum_in_rank_order(total, {**received, group.rank: mine}, divisor).to(dtype)

    return CollectiveWork("reduce_scatter", works, total, finish=add_up, keep=[full], rank=group.rank)


def all_reduce(tensor: Tensor, group: Group, *, op: Op = "sum") -> CollectiveWork:
    """Starts to combine every rank's `tensor` [any shape, contiguous, equal on all ranks] in place.

    "sum" adds in an order that is the same on all ranks, but the transport's own.

    Raises:
        ValueError: The `op` is unknown.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.comm.collectives import all_reduce
        >>> all_reduce(torch.ones(3), Group()).wait()  # a group of this rank only
        tensor([1., 1., 1.])

    See also: [the core](../how-the-core-works.md).
    """
    if op not in _REDUCE_OPS:
        raise ValueError(f"all_reduce: expected op to be one of {', '.join(map(repr, _REDUCE_OPS))}, got {op!r}")
    if group.size == 1:
        return CollectiveWork("all_reduce", [], tensor)
    if fault_points.active is not None:
        fault_points.active("all_reduce", "")
    start = partial(dist.all_reduce, tensor, _REDUCE_OPS[op], group=group_for(tensor.device, group), async_op=True)
    return CollectiveWork("all_reduce", [start_work(None, start)], tensor, rank=group.rank)


def broadcast(tensor: Tensor, group: Group, *, source: int = 0) -> CollectiveWork:
    """Starts to overwrite `tensor` [any shape, contiguous] with the tensor of rank `source` of the group.

    Raises:
        ValueError: The group has no such rank.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.comm.collectives import broadcast
        >>> broadcast(torch.ones(3), Group(), source=0).wait()
        tensor([1., 1., 1.])

    See also: [the core](../how-the-core-works.md).
    """
    if not 0 <= source < group.size:
        raise ValueError(f"broadcast: expected source to be a rank of the group, 0 to {group.size - 1}, got {source}")
    if group.size == 1:
        return CollectiveWork("broadcast", [], tensor)
    if fault_points.active is not None:
        fault_points.active("broadcast", "")
    start = partial(dist.broadcast, tensor, group=group_for(tensor.device, group), group_src=source, async_op=True)
    return CollectiveWork("broadcast", [start_work(source, start)], tensor, rank=group.rank)


def parts_by_rank(op: str, what: str, flat: Tensor, group: Group, sizes: Sequence[int] | None) -> list[Tensor]:
    """The parts of a flat tensor [W * S], by rank; raises where it does not divide into them."""
    numel, world = flat.numel(), group.size
    fits = numel % world == 0 if sizes is None else len(sizes) == world and numel == sum(sizes)
    if flat.dim() != 1 or not fits or not flat.is_contiguous():
        raise ValueError(
            f"{op}: expected {what} of one contiguous dimension that divides into {world} parts"
            f"{'' if sizes is None else f' of {list(sizes)}'}, got {tuple(flat.shape)} with strides {flat.stride()}"
        )
    return list(flat.split(numel // world if sizes is None else list(sizes))) if numel else [flat] * world


def check_dtypes(op: str, output: Tensor, input: Tensor) -> None:
    """Raises where output and input of a collective have different dtypes or devices."""
    if output.dtype != input.dtype or output.device != input.device:
        raise ValueError(
            f"{op}: expected tensors of one dtype and device, got {output.dtype} on {output.device} and {input.dtype} "
            f"on {input.device}"
        )


def fill(target: Tensor, source: Tensor) -> None:
    """Copies `source` unless the target is that very memory."""
    if not target.is_set_to(source):
        target.copy_(source)


def _sum_in_rank_order(result: Tensor, summands: dict[int, Tensor], divisor: float) -> Tensor:
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
    full: Tensor, parts: list[Tensor], group: Group, dtype: torch.dtype, divisor: float, *, even: bool
) -> CollectiveWork:
    result = torch.empty_like(parts[group.rank])
    before = _divisor_before(full.dtype, divisor)
    after = divisor / before
    if before != 1:
        full.div_(before)
    start = partial(compat.reduce_scatter_single, result, full, torch_group(group))
    if not even:
        start = partial(dist.reduce_scatter, result, parts, group=torch_group(group), async_op=True)
    work = start_work(None, start)
    wider = torch.promote_types(dtype, full.dtype)

    def finish() -> Tensor:  # Must not refer to `full`, which is free by now.
        # Divided in the wider dtype: a half-precision sum that is already small would lose bits twice.
        wide = result.to(wider)
        return (wide if after == 1 else wide.div_(after)).to(dtype)

    return CollectiveWork("reduce_scatter", [work], result, finish=finish, keep=[full], rank=group.rank)


def _divisor_before(dtype: torch.dtype, size: float) -> int:
    """The divisor of fp16 summands before they are added in fp16: the power of two next to the root of W."""
    # The sum of W gradients overflows where their average does not, and a W-th of a gradient underflows.
    return 1 << (int(size).bit_length() // 2) if dtype == torch.float16 else 1


# The control plane: a few integers or a text from every rank to every rank, on the host. It is used in every pass,
# so it is fast, and it ends with an error, never with an abort, where ranks are at different places.

FINGERPRINT_MASK = (1 << 62) - 1


def fingerprint_of(*words: object) -> int:
    """A number of 62 bits, equal in every process (Python's own hash is salted)."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & FINGERPRINT_MASK


def exchange(record: Sequence[int], group: Group, *, limit_seconds: float | None = None) -> list[list[int]]:
    """Returns every rank's `record` of n 64-bit integers, by rank: for checks and not for data.

    ceil(log2 W) rounds of one small message (Bruck et al., 1997), on the host whatever the group computes on. Ranks
    whose n differ time out. A rank that gets no answer closes its connections, so that no rank waits for its next
    round. Under the "fake" backend all ranks are taken to have this rank's record.

    Raises:
        TransferError: A peer did not answer.
        ValueError: n is above a million.
    """
    if len(record) > LONGEST_RECORD:
        raise ValueError(f"exchange: expected at most {LONGEST_RECORD} integers, got {len(record)}")
    if group.size == 1 or group.backend == "fake":
        return [list(record) for _ in range(group.size)]
    limit_seconds = process_limit() if limit_seconds is None else limit_seconds
    if fault_points.active is not None:
        fault_points.active("exchange", "")
    control_group(group, limit_seconds=limit_seconds)
    # Row i is the record of rank + i.
    known = torch.tensor(record, dtype=torch.int64, device=HOST).repeat(group.size, 1)
    have = 1
    while have < group.size:
        count = min(have, group.size - have)
        below, above = (group.rank - have) % group.size, (group.rank + have) % group.size
        works = post_messages(group, {above: known[have : have + count]}, {below: known[:count]}, 1 + len(record))
        try:
            for peer, work in works:
                wait_for("exchange", peer, work, limit_seconds, group.rank)
        except TransferError:
            _close_connections(group)
            raise
        have += count
    return known.roll(group.rank, dims=0).tolist()


def exchange_text(text: str, group: Group, *, limit_seconds: float | None = None) -> list[str]:
    """Returns every rank's text, by rank, for error messages: small, not fast.

    Raises:
        TransferError: A peer did not answer.
        ValueError: A text is longer than 8 MB.
    """
    data = text.encode(errors="surrogatepass")  # A path may hold bytes that are no character.
    lengths = [row[0] for row in exchange([len(data)], group, limit_seconds=limit_seconds)]
    words = -(-max(lengths) // 8)
    padded = data.ljust(words * 8, b"\0")
    record = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]
    rows = exchange(record, group, limit_seconds=limit_seconds)
    texts = (b"".join(word.to_bytes(8, "little", signed=True) for word in row) for row in rows)
    return [raw[:length].decode(errors="surrogatepass") for raw, length in zip(texts, lengths, strict=True)]
