"""What a collective sends, and whether its buffers fit: read off the operator's arguments, nothing is run.

The bytes are those of the ring algorithms, which is what each rank must send at least. torch's fake process group
checks no sizes, so they are checked here.

    W ranks                        bytes that one rank sends
    all-gather of W x S            (W - 1) S
    reduce-scatter of W x S        (W - 1) S
    all-reduce of N                2 (W - 1) N / W
    all-to-all of W x S            (W - 1) S
    broadcast, reduce of N         N; nothing for the last of the ring
    gather to, scatter from one    S from each; (W - 1) S from the one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from scale_core import compat


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank took part in it."""

    op: str  # Its name, such as "all_gather"
    bytes_sent: int  # What this rank sends in it
    ranks: tuple[int, ...]  # The global ranks that take part
    phase: str = "forward"  # What was running: "forward", "backward" or "step" (of an optimizer)
    tag: int = 0  # The tag of a point-to-point message; 0 where the operation has none

    @property
    def group_size(self) -> int:
        """The number of ranks that take part."""
        return len(self.ranks)


class _Call(NamedTuple):
    """One operator's arguments, and this rank's place in its group."""

    op: str
    args: Sequence[Any]
    ranks: tuple[int, ...]
    place: int
    check: bool

    def expect(self, fits: bool, expected: str, got: str) -> None:
        if self.check and not fits:
            raise ValueError(f"{self.op} among {len(self.ranks)} ranks: expected {expected}, got {got}")


def read_collective(name: str, args: Sequence[Any], *, rank: int, phase: str, check: bool) -> Collective | None:
    """Reads a call of an operator in torch's `c10d` or `_c10d_functional` library."""
    if name in _SILENT:
        return None
    if name not in _READERS:
        raise NotImplementedError(f"{name} sends something, but it is not known how much: simulate without it")
    op, group_index, read = _READERS[name]
    ranks = compat.ranks_of_operation(args[group_index])
    call = _Call(op, args, ranks, ranks.index(rank), check)
    return Collective(op, read(call), ranks, phase, tag=args[3] if name in _TAGGED else 0)


def _all_gather(call: _Call) -> int:
    return _between_parts_and_wholes(call, wholes=call.args[0], parts=call.args[1])


def _reduce_scatter(call: _Call) -> int:
    return _between_parts_and_wholes(call, wholes=call.args[1], parts=call.args[0])


def _between_parts_and_wholes(call: _Call, wholes: Any, parts: Any) -> int:
    world = len(call.ranks)
    for whole, part in zip(_as_lists(wholes), _tensors(parts), strict=True):
        _check_whole(call, whole, part)
    return (world - 1) * sum(_num_bytes(part) for part in _tensors(parts))


def _check_whole(call: _Call, whole: Sequence[Tensor], part: Tensor) -> None:
    world = len(call.ranks)
    sizes = [tensor.numel() for tensor in whole]
    expected = [world * part.numel()] if len(whole) == 1 else [part.numel()] * world
    call.expect(sizes == expected, f"{expected} elements beside a part of {tuple(part.shape)}", str(sizes))
    dtypes = {tensor.dtype for tensor in (*whole, part)}
    call.expect(len(dtypes) == 1, "one dtype", " and ".join(sorted(map(str, dtypes))))
    for tensor in (*whole, part):
        call.expect(tensor.is_contiguous(), "contiguous buffers", f"strides {tensor.stride()} of {tuple(tensor.shape)}")


def _all_to_all_single(call: _Call) -> int:
    output, source, _, output_splits, input_splits = call.args[:5]
    world = len(call.ranks)
    for tensor, splits, which in ((output, output_splits, "output"), (source, input_splits, "input")):
        rows = tensor.shape[0] if tensor.dim() else 0
        if splits:
            fits = len(splits) == world and sum(splits) == rows
            call.expect(fits, f"{world} splits that add up to the {rows} rows of the {which}", str(list(splits)))
        else:
            call.expect(rows % world == 0, f"rows of the {which} that divide into {world} parts", str(rows))
    if not output_splits and not input_splits:
        call.expect(output.numel() == source.numel(), f"{source.numel()} elements of output", str(output.numel()))
    call.expect(output.dtype == source.dtype, f"an output of {source.dtype}", str(output.dtype))
    return _all_but_own(call, source, input_splits)


def _all_but_own(call: _Call, source: Tensor, splits: Sequence[int]) -> int:
    if not splits:
        return _num_bytes(source) * (len(call.ranks) - 1) // len(call.ranks)
    own = splits[call.place] * math.prod(source.shape[1:])
    return _num_bytes(source) - own * source.element_size()


def _all_to_all_lists(call: _Call) -> int:
    outputs, inputs = call.args[:2]
    for tensors, which in ((outputs, "output"), (inputs, "input")):
        call.expect(len(tensors) == len(call.ranks), f"{len(call.ranks)} {which} tensors", str(len(tensors)))
    return sum(_num_bytes(tensor) for place, tensor in enumerate(inputs) if place != call.place)


def _all_reduce(call: _Call) -> int:
    world = len(call.ranks)
    return 2 * (world - 1) * sum(map(_num_bytes, _tensors(call.args[0]))) // world


def _broadcast(call: _Call) -> int:
    return _along_the_ring(call, silent=(call.args[2] - 1) % len(call.ranks))  # the last one passes it to no other


def _reduce(call: _Call) -> int:
    return _along_the_ring(call, silent=call.args[3])  # the sum ends at the root


def _functional_broadcast(call: _Call) -> int:
    return _along_the_ring(call, silent=(call.args[1] - 1) % len(call.ranks))


def _along_the_ring(call: _Call, silent: int) -> int:
    alone = len(call.ranks) == 1
    return 0 if alone or call.place == silent else sum(map(_num_bytes, _tensors(call.args[0])))


def _gather(call: _Call) -> int:
    return 0 if call.place == call.args[3] else sum(map(_num_bytes, _tensors(call.args[1])))


def _scatter(call: _Call) -> int:
    return (len(call.ranks) - 1) * sum(map(_num_bytes, _tensors(call.args[0]))) if call.place == call.args[3] else 0


def _send(call: _Call) -> int:
    return sum(map(_num_bytes, _tensors(call.args[0])))


def _nothing(call: _Call) -> int:
    return 0


def _functional_all_gather(call: _Call) -> int:
    return (len(call.ranks) - 1) * sum(map(_num_bytes, _tensors(call.args[0])))


def _functional_reduce_scatter(call: _Call) -> int:
    world = len(call.ranks)
    for whole in _tensors(call.args[0]):
        call.expect(whole.shape[0] % world == 0, f"rows that divide into {world} parts", str(whole.shape[0]))
    return (world - 1) * sum(map(_num_bytes, _tensors(call.args[0]))) // world


def _functional_all_to_all(call: _Call) -> int:
    return _all_but_own(call, call.args[0], call.args[2])


# Operator -> the collective's name, the index of the group in the arguments, and the reader of the rest.
_READERS: dict[str, tuple[str, int, Callable[[_Call], int]]] = {
    "c10d::_allgather_base_": ("all_gather", 2, _all_gather),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 2, _all_gather),
    "c10d::allgather_": ("all_gather", 2, _all_gather),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 2, _reduce_scatter),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 2, _reduce_scatter),
    "c10d::reduce_scatter_": ("reduce_scatter", 2, _reduce_scatter),
    "c10d::allreduce_": ("all_reduce", 1, _all_reduce),
    "c10d::allreduce_coalesced_": ("all_reduce", 1, _all_reduce),
    "c10d::broadcast_": ("broadcast", 1, _broadcast),
    "c10d::reduce_": ("reduce", 1, _reduce),
    "c10d::alltoall_base_": ("all_to_all", 2, _all_to_all_single),
    "c10d::alltoall_": ("all_to_all", 2, _all_to_all_lists),
    "c10d::gather_": ("gather", 2, _gather),
    "c10d::scatter_": ("scatter", 2, _scatter),
    "c10d::send": ("send", 1, _send),
    "c10d::recv_": ("receive", 1, _nothing),
    "c10d::barrier": ("barrier", 1, _nothing),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 2, _functional_all_gather),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 2, _functional_all_gather),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 3, _functional_reduce_scatter),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 3, _functional_reduce_scatter),
    "_c10d_functional::all_reduce": ("all_reduce", 2, _all_reduce),
    "_c10d_functional::all_reduce_": ("all_reduce", 2, _all_reduce),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 2, _all_reduce),
    "_c10d_functional::all_to_all_single": ("all_to_all", 3, _functional_all_to_all),
    "_c10d_functional::broadcast": ("broadcast", 2, _functional_broadcast),
    "_c10d_functional::broadcast_": ("broadcast", 2, _functional_broadcast),
}
_SILENT = frozenset(("_c10d_functional::wait_tensor", "c10d::check_for_nan"))
_TAGGED = frozenset(("c10d::send", "c10d::recv_"))


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(argument: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [argument] if isinstance(argument, Tensor) else list(argument)


def _as_lists(argument: Any) -> list[Sequence[Tensor]]:
    """One list of tensors per whole: of a single tensor, one tensor per whole, or one per whole and rank."""
    wholes: Sequence[Any] = [argument] if isinstance(argument, Tensor) else argument
    return [[whole] if isinstance(whole, Tensor) else whole for whole in wholes]
