"""What a collective sends, and whether its buffers fit: read off the operator's arguments, nothing is run.

The bytes are counted for the ring algorithms: no rank can send less. torch's fake process group
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
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from scale_core import compat
from scale_core.comm.collectives import passed_group


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank took part in it."""

    op: str  # Its name, such as "all_gather"
    bytes_sent: int  # What this rank sends in it
    ranks: tuple[int, ...]  # The global ranks that take part
    phase: str = "forward"  # What was running: "forward", "backward" or "step" (of an optimizer)
    tag: int = 0  # The tag of a point-to-point message; 0 where the operation has none


class _Call(NamedTuple):
    """One operator's arguments, and this rank's place in its group."""

    op: str
    args: Sequence[Any]
    ranks: tuple[int, ...]
    place: int
    check: bool

    @property
    def world(self) -> int:
        return len(self.ranks)

    def num_bytes(self, index: int = 0) -> int:
        """The bytes of the tensors in an argument."""
        return sum(tensor.nbytes for tensor in _tensors(self.args[index]))

    def expect(self, fits: bool, expected: str, got: str) -> None:
        if self.check and not fits:
            raise ValueError(f"{self.op} among {self.world} ranks: expected {expected}, got {got}")


def read_collective(name: str, args: Sequence[Any], *, rank: int, phase: str, check: bool) -> Collective | None:
    """Reads a call of an operator in torch's `c10d` or `_c10d_functional` library."""
    if name in _SILENT:
        return None
    if name not in _READERS:
        raise NotImplementedError(f"{name} sends something, but it is not known how much: simulate without it")
    op, _, read = _READERS[name]
    group = passed_group(group_of_call(name, args))
    ranks = tuple(dist.get_process_group_ranks(group))
    call = _Call(op, args, ranks, ranks.index(rank), check)
    return Collective(op, read(call), ranks, phase, tag=args[3] if name in _TAGGED else 0)


def group_of_call(name: str, args: Sequence[Any]) -> dist.ProcessGroup:
    """The process group of a call of a collective operator."""
    _, group_index, _ = _READERS[name]
    return compat.group_of_operation(args[group_index])


def _gather_or_scatter(call: _Call, wholes: int, parts: int) -> int:
    """All-gather and reduce-scatter; `wholes` and `parts` are the indices of these arguments."""
    whole_lists = [call.args[wholes]] if isinstance(call.args[wholes], Tensor) else call.args[wholes]
    for whole, part in zip(whole_lists, _tensors(call.args[parts]), strict=True):
        tensors = _tensors(whole)  # One tensor, or one per rank, of any sizes.
        sizes = [tensor.numel() for tensor in tensors]
        if len(sizes) == 1:
            fits, expected = sizes[0] == call.world * part.numel(), str([call.world * part.numel()])
        else:
            fits = len(sizes) == call.world and sizes[call.place] == part.numel()
            expected = f"{call.world} tensors, of {part.numel()}"
        call.expect(fits, f"{expected} elements beside a part of {tuple(part.shape)}", str(sizes))
        dtypes = {tensor.dtype for tensor in (*tensors, part)}
        call.expect(len(dtypes) == 1, "one dtype", " and ".join(sorted(map(str, dtypes))))
        for tensor in (*tensors, part):
            strides = f"strides {tensor.stride()} of {tuple(tensor.shape)}"
            call.expect(tensor.is_contiguous(), "contiguous buffers", strides)
    return (call.world - 1) * call.num_bytes(parts)


def _all_to_all_single(call: _Call) -> int:
    output, source, _, output_splits, input_splits = call.args[:5]
    for tensor, splits, which in ((output, output_splits, "output"), (source, input_splits, "input")):
        rows = tensor.shape[0] if tensor.dim() else 0
        if splits:
            fits = len(splits) == call.world and sum(splits) == rows
            call.expect(fits, f"{call.world} splits that add up to the {rows} rows of the {which}", str(list(splits)))
        else:
            call.expect(rows % call.world == 0, f"rows of the {which} that divide into {call.world} parts", str(rows))
    if not output_splits and not input_splits:
        call.expect(output.numel() == source.numel(), f"{source.numel()} elements of output", str(output.numel()))
    call.expect(output.dtype == source.dtype, f"an output of {source.dtype}", str(output.dtype))
    return _all_but_own(call, source, input_splits)


def _all_but_own(call: _Call, source: Tensor, splits: Sequence[int]) -> int:
    if not splits:
        return source.nbytes * (call.world - 1) // call.world
    return source.nbytes - splits[call.place] * math.prod(source.shape[1:]) * source.element_size()


def _all_to_all_lists(call: _Call) -> int:
    outputs, inputs = call.args[:2]
    for tensors, which in ((outputs, "output"), (inputs, "input")):
        call.expect(len(tensors) == call.world, f"{call.world} {which} tensors", str(len(tensors)))
    return sum(tensor.nbytes for place, tensor in enumerate(inputs) if place != call.place)


def _along_the_ring(call: _Call, silent: int) -> int:
    """Broadcast and reduce; `silent` is the last of the ring, which passes it to no other."""
    return 0 if call.world == 1 or call.place == silent % call.world else call.num_bytes()


def _functional_reduce_scatter(call: _Call) -> int:
    for whole in _tensors(call.args[0]):
        rows = whole.shape[0]
        call.expect(rows % call.world == 0, f"rows that divide into {call.world} parts", str(rows))
    return (call.world - 1) * call.num_bytes() // call.world


def _all_reduce(call: _Call) -> int:
    return 2 * (call.world - 1) * call.num_bytes() // call.world


_ALL_GATHER = ("all_gather", 2, partial(_gather_or_scatter, wholes=0, parts=1))
_REDUCE_SCATTER = ("reduce_scatter", 2, partial(_gather_or_scatter, wholes=1, parts=0))
_FUNCTIONAL_ALL_GATHER = ("all_gather", 2, lambda call: (call.world - 1) * call.num_bytes())
_FUNCTIONAL_BROADCAST = ("broadcast", 2, lambda call: _along_the_ring(call, call.args[1] - 1))

# Operator -> the collective's name, the index of the group in the arguments, and the reader of the rest.
_READERS: dict[str, tuple[str, int, Callable[[_Call], int]]] = {
    "c10d::_allgather_base_": _ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": _ALL_GATHER,
    "c10d::allgather_": _ALL_GATHER,
    "c10d::_reduce_scatter_base_": _REDUCE_SCATTER,
    "c10d::reduce_scatter_tensor_coalesced_": _REDUCE_SCATTER,
    "c10d::reduce_scatter_": _REDUCE_SCATTER,
    "c10d::allreduce_": ("all_reduce", 1, _all_reduce),
    "c10d::allreduce_coalesced_": ("all_reduce", 1, _all_reduce),
    "c10d::broadcast_": ("broadcast", 1, lambda call: _along_the_ring(call, call.args[2] - 1)),
    "c10d::reduce_": ("reduce", 1, lambda call: _along_the_ring(call, call.args[3])),  # The sum ends at the root.
    "c10d::alltoall_base_": ("all_to_all", 2, _all_to_all_single),
    "c10d::alltoall_": ("all_to_all", 2, _all_to_all_lists),
    "c10d::gather_": ("gather", 2, lambda call: 0 if call.place == call.args[3] else call.num_bytes(1)),
    "c10d::scatter_": (
        "scatter",
        2,
        lambda call: (call.world - 1) * call.num_bytes() if call.place == call.args[3] else 0,
    ),
    "c10d::send": ("send", 1, lambda call: call.num_bytes()),
    "c10d::recv_": ("receive", 1, lambda call: 0),
    "c10d::barrier": ("barrier", 1, lambda call: 0),
    "_c10d_functional::all_gather_into_tensor": _FUNCTIONAL_ALL_GATHER,
    "_c10d_functional::all_gather_into_tensor_coalesced": _FUNCTIONAL_ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 3, _functional_reduce_scatter),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 3, _functional_reduce_scatter),
    "_c10d_functional::all_reduce": ("all_reduce", 2, _all_reduce),
    "_c10d_functional::all_reduce_": ("all_reduce", 2, _all_reduce),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 2, _all_reduce),
    "_c10d_functional::all_to_all_single": (
        "all_to_all",
        3,
        lambda call: _all_but_own(call, call.args[0], call.args[2]),
    ),
    "_c10d_functional::broadcast": _FUNCTIONAL_BROADCAST,
    "_c10d_functional::broadcast_": _FUNCTIONAL_BROADCAST,
}
_SILENT = frozenset(("_c10d_functional::wait_tensor", "c10d::check_for_nan"))
_TAGGED = frozenset(("c10d::send", "c10d::recv_"))


def _tensors(argument: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [argument] if isinstance(argument, Tensor) else list(argument)
