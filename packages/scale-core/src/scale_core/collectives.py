"""Collectives on one-dimensional tensors, each with a handle that owns its buffers.

Above this file nobody knows the transport. NCCL has every operation natively. Gloo has no reduce-scatter (its stand-in
clones, all-reduces and copies: twice the bytes) and gathers through a temporary of the whole output, so on gloo both
are sent from rank to rank, straight out of and into the caller's buffers: each rank sends (W-1)/W of the full buffer,
which is the least that any algorithm can do. Point-to-point messages also carry a tag: two ranks that are at
different places never read each other's data, they time out, and that can be caught and named.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core import compat
from scale_core.group import Group

Op = Literal["sum", "max", "min"]

# Tags of the messages that belong to no unit: 0 for data, and from 1 on for records, by their length, because gloo ends
# the process when a message is longer than the buffer that waits for it. A unit's tags come from its name.
_UNTAGGED = 0
_LONGEST_RECORD = 1 << 20
UNIT_TAGS = range(_LONGEST_RECORD + 2, 1 << 31)
"""The tags that callers may choose from."""

# How long the others may take to end a transfer that this rank has given up.
_GRACE_SECONDS = 5.0

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Work(Protocol):
    """What torch returns for an operation under way."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class TransferError(RuntimeError):
    """A collective did not come to its end.

    Attributes:
        op: The collective, such as "all_gather".
        peer: The rank of the group that was waited for, or None where the transport does not say.
    """

    def __init__(self, op: str, peer: int | None, cause: str) -> None:
        whom = "the group" if peer is None else f"rank {peer}"
        super().__init__(f"{op} with {whom} failed: {cause}")
        self.op = op
        self.peer = peer
        self._cause = cause

    def __reduce__(self) -> tuple[type[TransferError], tuple[str, int | None, str]]:
        return type(self), (self.op, self.peer, self._cause)


class Pending:
    """A collective under way; it owns its buffers until `wait()` returns.

    A handle must be waited on, or given up by `abandon()`: one that is dropped with neither warns, because its
    result could be read while the transfer still runs. A transfer that could not even begin says so in
    `wait()`, as one does that fails under way.
    """

    def __init__(
        self,
        op: str,
        works: Sequence[tuple[int | None, Work]],
        result: Tensor,
        finish: Callable[[], Tensor] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> None:
        self.op = op
        self._works = list(works)
        self._result: Tensor | None = result
        self._finish = finish
        self._keep = list(keep)
        self._open = True

    def wait(self, limit_seconds: float | None = None) -> Tensor:
        """Returns the result once it is whole (on CUDA: in the order of the current stream).

        Args:
            limit_seconds: How long to wait for one message; None is the group's own limit, as it is for what the
                transport does natively.

        Raises:
            TransferError: A peer left, stood elsewhere, or took longer than the limit.
        """
        if self._open:
            self._open = False
            result, self._result = self._result, None  # Nobody gets a result that did not become whole.
            works, self._works = self._works, []
            for peer, work in works:
                _wait_for(self.op, peer, work, limit_seconds)
            finish, self._finish = self._finish, None
            works, self._keep = [], []  # What was sent is free before `finish` takes memory of its own.
            self._result = result if finish is None else finish()
        if self._result is None:
            raise TransferError(self.op, None, "it was given up, or has failed before")
        return self._result

    def abandon(self) -> None:
        """Gives the transfer up after an error elsewhere; nobody will read its result.

        Waits for its end all the same, because the transport still writes into the buffers, and can't use a connection
        again on which a message found no buffer. Ranks that have failed alike are here together, so that takes no
        time; where the others never come, the connection is cut after a few seconds and the group is of no more use.
        """
        if not self._open:
            return
        self._open = False
        deadline = time.monotonic() + _GRACE_SECONDS
        for peer, work in self._works:
            with suppress(TransferError):
                _wait_for(self.op, peer, work, max(0.001, deadline - time.monotonic()))
        self._result, self._finish = None, None
        self._works, self._keep = [], []

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            try:
                warnings.warn(f"{self.op} was dropped without wait()", ResourceWarning, stacklevel=2)
            finally:
                self.abandon()


def all_gather(output: Tensor, shard: Tensor, group: Group, *, tag: int = _UNTAGGED) -> Pending:
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
    if group.size == 1 or not _peer_to_peer(group, output.device):
        if group.size == 1:
            _fill(own, shard)
            return Pending("all_gather", [], output)
        works = [_begin(None, lambda: compat.all_gather_single(output, shard, _torch_group(group)))]
        return Pending("all_gather", works, output, keep=[shard])
    wire, sent = _as_bytes(output), _as_bytes(shard)
    works = _receive_all(group, {peer: _part(wire, peer, group) for peer in _peers(group)}, tag)
    works += _send_all(group, dict.fromkeys(_peers(group), sent), tag)
    _fill(own, shard)
    return Pending("all_gather", works, output, keep=[shard, wire, sent])


def reduce_scatter(
    full: Tensor, group: Group, *, dtype: torch.dtype | None = None, average: bool = True, tag: int = _UNTAGGED
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
    if not _peer_to_peer(group, full.device):
        return _native_reduce_scatter(full, group, dtype, average)
    total = torch.empty(mine.shape, dtype=torch.promote_types(dtype, full.dtype), device=full.device)
    received = {peer: torch.empty_like(mine) for peer in _peers(group)}
    first = next(iter(received))
    if total.dtype == full.dtype:
        received[first] = total
    works = _receive_all(group, received, tag)
    works += _send_all(group, {peer: _part(full, peer, group) for peer in _peers(group)}, tag)

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
    work = _begin(None, lambda: dist.all_reduce(tensor, torch_op, group=_torch_group(group), async_op=True))
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
    start = partial(dist.broadcast, tensor, group=_torch_group(group), group_src=source, async_op=True)
    return Pending("broadcast", [_begin(source, start)], tensor)


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
    start = partial(dist.all_to_all_single, output, input, group=_torch_group(group), async_op=True)
    return Pending("all_to_all", [_begin(None, start)], output, keep=[input])


def exchange(record: Sequence[int], group: Group, *, limit_seconds: float | None = None) -> list[list[int]]:
    """Returns every rank's record, by rank: a few integers, for checks and not for data.

    ceil(log2 W) rounds of one small message (Bruck et al., 1997). Under the "fake" backend the others are taken to
    say what this rank says.

    Args:
        record: [n] integers of 64 bits; ranks whose n differ time out.
        group: The ranks that take part.
        limit_seconds: As in `Pending.wait`.

    Raises:
        TransferError: A peer did not answer.
        ValueError: n is above a million.
    """
    if len(record) > _LONGEST_RECORD:
        raise ValueError(f"exchange: expected at most {_LONGEST_RECORD} integers, got {len(record)}")
    if group.size == 1 or group.backend == "fake":
        return [list(record) for _ in range(group.size)]
    if not _peer_to_peer(group, compat.control_device(_torch_group(group))):
        return _native_exchange(record, group)
    known = torch.tensor(record, dtype=torch.int64).repeat(group.size, 1)  # row i is the record of rank + i
    have = 1
    while have < group.size:
        count = min(have, group.size - have)
        below, above = (group.rank - have) % group.size, (group.rank + have) % group.size
        works = _receive_all(group, {above: known[have : have + count]}, 1 + len(record))
        works += _send_all(group, {below: known[:count]}, 1 + len(record))
        for peer, work in works:
            _wait_for("exchange", peer, work, limit_seconds)
        have += count
    return known.roll(group.rank, dims=0).tolist()


def exchange_text(text: str, group: Group, *, limit_seconds: float | None = None) -> list[str]:
    """Returns every rank's text, by rank. For the words of an error, so size matters more than speed."""
    data = text.encode(errors="surrogatepass")  # A path may hold what is no character.
    lengths = [row[0] for row in exchange([len(data)], group, limit_seconds=limit_seconds)]
    words = -(-max(lengths) // 8)
    padded = data.ljust(words * 8, b"\0")
    record = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]
    rows = exchange(record, group, limit_seconds=limit_seconds)
    texts = (b"".join(word.to_bytes(8, "little", signed=True) for word in row) for row in rows)
    return [raw[:length].decode(errors="surrogatepass") for raw, length in zip(texts, lengths, strict=True)]


def _peer_to_peer(group: Group, device: torch.device) -> bool:
    """Whether collectives are made of messages: on the host, where gloo moves them; CUDA has them natively."""
    return device.type == "cpu" and group.backend != "fake"


def _torch_group(group: Group) -> dist.ProcessGroup:
    assert group.process_group is not None
    return group.process_group


def _peers(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


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


class _Failed:
    """An operation that could not begin; it fails when it is waited for, where the others of its kind fail too."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise self._error


def _begin(peer: int | None, start: Callable[[], Work]) -> tuple[int | None, Work]:
    try:
        return peer, start()
    except RuntimeError as error:  # The connection to a rank is gone.
        return peer, _Failed(error)


def _receive_all(group: Group, targets: dict[int, Tensor], tag: int) -> list[tuple[int | None, Work]]:
    # Always called before `_send_all`: gloo holds a message back until its receive is posted, and two ranks that
    # both wait for a send before they post their receive would wait forever.
    receive = _torch_group(group).recv
    return [_begin(peer, partial(receive, [target], peer, tag)) for peer, target in targets.items() if target.numel()]


def _send_all(group: Group, sources: dict[int, Tensor], tag: int) -> list[tuple[int | None, Work]]:
    send = _torch_group(group).send
    return [_begin(peer, partial(send, [source], peer, tag)) for peer, source in sources.items() if source.numel()]


def _wait_for(op: str, peer: int | None, work: Work, limit_seconds: float | None) -> None:
    try:
        if limit_seconds is None or peer is None:
            work.wait()  # NCCL would hold the host up to keep a limit; its own watchdog keeps the group's.
        else:
            work.wait(timedelta(seconds=limit_seconds))
    except RuntimeError as error:
        raise TransferError(op, peer, _first_line(error)) from error


def _first_line(error: BaseException) -> str:
    """The first sentence of a torch error, without the place in its sources that it begins with."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". ", 1)[0]


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
    work = _begin(None, lambda: compat.reduce_scatter_single(result, full, _torch_group(group)))
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


def _native_exchange(record: Sequence[int], group: Group) -> list[list[int]]:
    device = compat.control_device(_torch_group(group))
    mine = torch.tensor(record, dtype=torch.int64, device=device)
    everyone = torch.empty(group.size * len(record), dtype=torch.int64, device=device)
    compat.all_gather_single(everyone, mine, _torch_group(group)).wait()
    return everyone.view(group.size, len(record)).tolist()


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
