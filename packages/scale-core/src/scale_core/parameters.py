"""Replaced parameters: the attributes that must not be lost with them.

A wrapper that shards a model makes new parameters, or gives the model's own ones other memory. Attributes that a user
has set on a parameter go with it (`copy_attributes`). Memory that a parameter shares with another tensor can't: the two
would be cut apart without a word (`check_memory_unshared`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from scale_core import compat
from scale_core.shard import NOT_COPIED


def copy_attributes(param: Tensor, other: Tensor, *, leave_out: Collection[str] = ()) -> None:
    """Copies attributes that users set on a parameter to the one that takes its place.

    For example `param._no_weight_decay = True`, by which parameter groups are made. `leave_out` are a subclass's own.
    """
    for name, value in vars(param).items():
        if name not in NOT_COPIED and name not in leave_out:
            vars(other).setdefault(name, value)  # Its own ones stay, as a fake tensor's own device.


@dataclass(frozen=True)
class MemoryRange:
    """The memory of a tensor, which stays known when the tensor is gone or has got other memory.

    Attributes:
        name: The tensor's qualified name.
        start: The address of its first byte.
        stop: The address after its last byte.
        shape: Its shape.
        stride: Its strides, in elements.
        itemsize: Bytes of an element.
        device: Where it is.
        storage: Its storage, held weakly: the address means nothing once that is gone.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    device: torch.device
    storage: StorageWeakRef

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> list[MemoryRange]:
        """Returns the memory of a tensor, of each tensor in a wrapper, and none on meta, of a fake or an empty one."""
        with torch._C.DisableTorchFunctionSubclass():
            inner = [part.detach() for part in compat.inner_tensors(tensor)]
        return [cls._of_plain(name, part) for part in inner if _has_memory(part)]

    @classmethod
    def _of_plain(cls, name: str, tensor: Tensor) -> MemoryRange:
        lengths = zip(tensor.shape, tensor.stride(), strict=True)
        num_bytes = (sum((size - 1) * stride for size, stride in lengths) + 1) * tensor.itemsize
        return cls(
            name,
            tensor.data_ptr(),
            tensor.data_ptr() + num_bytes,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.itemsize,
            tensor.device,
            StorageWeakRef(tensor.untyped_storage()),
        )

    @property
    def exists(self) -> bool:
        """Whether somebody still holds the memory."""
        return not self.storage.expired()

    def is_same_view(self, other: MemoryRange) -> bool:
        """Whether the two are one tensor under two names."""
        return (self.start, self.shape, self.stride) == (other.start, other.shape, other.stride)

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether the two have a byte in common."""
        if self.device != other.device or self.stop <= other.start or other.stop <= self.start:
            return False
        if self._is_dense and other._is_dense:
            return True
        # For example the left and the right columns of one matrix, whose rows alternate.
        first, last = min(self.start, other.start), max(self.stop, other.stop)
        used = torch.zeros(last - first, dtype=torch.bool)
        self._view_of(used, first).fill_(True)
        return bool(other._view_of(used, first).any())

    @property
    def _is_dense(self) -> bool:
        return torch.Size(self.shape).numel() * self.itemsize == self.stop - self.start

    def _view_of(self, used: Tensor, first: int) -> Tensor:
        """This range in a tensor with one element for each byte from address `first` on."""
        shape = [1 if stride == 0 else size for size, stride in zip(self.shape, self.stride, strict=True)]
        stride = [stride * self.itemsize for stride in self.stride]
        return used.as_strided([*shape, self.itemsize], [*stride, 1], self.start - first)


def check_memory_unshared(
    what: str,
    params: Iterable[tuple[str, Tensor]],
    others: Iterable[tuple[str, Tensor]] = (),
    moved: Sequence[MemoryRange] = (),
) -> None:
    """Refuses parameters that share memory with another tensor and would get memory of their own.

    One parameter in several places, as by `head.weight = embed.weight`, is fine: it stays one. So are tensors that are
    neighbors in one storage, as the weights of an `nn.LSTM` on a GPU.

    Args:
        what: The function that is about to give `params` memory of their own, for errors.
        params: The parameters, with qualified names.
        others: Parameters and buffers that stay as they are, and may share memory among themselves.
        moved: The memory that parameters had which have got other memory before.

    Raises:
        ValueError: Two of them overlap.
    """
    seen: set[int] = set()
    ranges: list[tuple[MemoryRange, int]] = [(memory, _MOVED) for memory in moved if memory.exists]
    for kind, named in ((_MOVES, params), (_STAYS, others)):
        for name, tensor in named:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                ranges += [(memory, kind) for memory in MemoryRange.of(name, tensor)]
    for (first, first_kind), (second, second_kind) in _neighbors(ranges):
        is_cut_apart = _MOVES in (first_kind, second_kind) or first_kind != second_kind
        if is_cut_apart and first.overlaps(second):
            raise shared_memory_error(what, first, second)


def shared_memory_error(what: str, first: MemoryRange, second: MemoryRange) -> ValueError:
    """The error of two tensors over one memory."""
    one, other = _as_code(first.name, "embed.weight"), _as_code(second.name, "head.weight")
    if first.is_same_view(second):
        how = f"share one memory, as after {other}.data = {one}.data"
        mend = f"Make them one parameter, {other} = {one}"
    else:
        how = "overlap in memory, as slices of one tensor do"
        mend = (
            f"Give one of them memory of its own, {other} = nn.Parameter({other}.detach().clone()), or keep one "
            "parameter and take its slices in forward"
        )
    return ValueError(
        f"{what}: '{first.name}' and '{second.name}' {how}. Each would get memory of its own, and a change of "
        f"one would no longer change the other. {mend}, before {what}(...)"
    )


def _as_code(name: str, example: str) -> str:
    """How a program writes a qualified name: 'model[0].weight' for '0.weight'; an example of one that is none."""
    first, *parts = name.split(".")
    if not first.isidentifier() and not first.isdigit():
        return example  # For example 'parameter 1 of group 0', of an optimizer that was given no names.
    code = f"model[{first}]" if first.isdigit() else first
    return code + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


_MOVES, _STAYS, _MOVED = range(3)


def _neighbors(
    ranges: Iterable[tuple[MemoryRange, int]],
) -> Iterator[tuple[tuple[MemoryRange, int], tuple[MemoryRange, int]]]:
    """Yields all pairs whose ranges of addresses overlap, the one that was given first before the other."""
    numbered = sorted(enumerate(ranges), key=lambda item: (str(item[1][0].device), item[1][0].start))
    begun: list[tuple[int, tuple[MemoryRange, int]]] = []
    for number, item in numbered:
        memory = item[0]
        begun = [(k, other) for k, other in begun if other[0].stop > memory.start and other[0].device == memory.device]
        for k, other in begun:
            yield (other, item) if k < number else (item, other)
        begun.append((number, item))


def _has_memory(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
        return False
    if type(tensor) not in compat.plain_tensor_types():
        return False
    storage = tensor.untyped_storage()
    return storage.device.type != "meta" and storage.nbytes() > 0
