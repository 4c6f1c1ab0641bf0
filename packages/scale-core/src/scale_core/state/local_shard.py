"""`LocalShard`: a rank's elements of a tensor, as `torch.distributed.checkpoint` saves and loads them, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from scale_core.shard import Ranges, elements_of
from scale_core.sharded_tensor.chunks import Chunk, cut_in_chunks, sizes_of
from scale_core.sharded_tensor.tensor import local_tensor


def _format_range(start: int, stop: int, ranges: Ranges) -> str:
    return f"[{start}, {stop})" + (f" of the indices {[list(dim_ranges) for dim_ranges in ranges]}" if ranges else "")


class LocalShard(Tensor):
    """The elements `[start, stop)` of a tensor of `shape`, or of some of its indices, as this rank holds them.

    For torch it is a tensor of the full shape with elements on other ranks, as a DTensor. Unlike a DTensor, it may have
    several chunks. `torch.distributed.checkpoint` saves it and loads into it in place, at any number of ranks. It is
    copied and moved between devices; functions that need all elements raise.

    `LocalShard(tensor, shape, start, stop)` keeps `tensor`, which has `stop - start` elements in any shape, and is not
    copied. With `ranges`, the elements are counted in that part of the full tensor. The tensor is contiguous; in the
    shape of all of that it may have any strides. Without `written` it is loaded like any other shard, but only the
    other ranks that hold the same elements save it. All of these are attributes; `ranges` has the indices of each
    dimension (see `scale_core.shard.Shard`), or is empty.

    Raises:
        ValueError: The tensor has a different number of elements, or has to be contiguous and is not.

    Examples:
        >>> import torch
        >>> from scale_core.state.state_dict import LocalShard
        >>> LocalShard(torch.ones(6), torch.Size([4, 3]), 0, 6).stop  # the first two of four rows
        6

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    tensor: Tensor
    start: int
    stop: int
    ranges: Ranges
    written: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's docs say

    @staticmethod
    def __new__(
        cls,
        tensor: Tensor,
        shape: Sequence[int],
        start: int,
        stop: int,
        ranges: Ranges = (),
        *,
        written: bool = True,
    ) -> Self:
        tensor = local_tensor(tensor)
        is_all = tuple(tensor.shape) == (sizes_of(ranges) if ranges else tuple(shape))
        if tensor.numel() != stop - start or not (is_all or tensor.is_contiguous()):
            raise ValueError(
                f"expected a contiguous tensor of {stop - start} elements for [{start}, {stop}), "
                f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}: pass tensor.contiguous()"
            )
        shard: Self = cast(Any, Tensor)._make_wrapper_subclass(
            cls, tuple(shape), dtype=tensor.dtype, device=tensor.device, requires_grad=False
        )
        shard.tensor, shard.start, shard.stop, shard.ranges, shard.written = tensor, start, stop, ranges, written
        return shard

    @property
    def chunks(self) -> dict[Chunk, Tensor]:
        """Each chunk of the range with its elements: views of `tensor`, in the chunk's sizes."""
        return cut_in_chunks(self.tensor.detach(), self.shape, self.start, self.stop, self.ranges)

    # Called by torch's checkpoint planner.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in (self.__create_chunk_list__() if self.written else ())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for chunk, piece in self.chunks.items():
            if index.offset is not None and tuple(index.offset) == chunk.offsets:
                return piece
        raise ValueError(f"{index.fqn}: this rank holds [{self.start}, {self.stop}), no chunk at {index.offset}")

    # Called by torch of a tensor.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation lacks the first argument
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if func in _SAME_ELEMENTS and isinstance(first, LocalShard):
            return first._with(func(first.tensor, *args[1:], **(kwargs or {})))
        if func is torch.ops.aten.new_empty.default and isinstance(first, LocalShard) and first.shape == tuple(args[1]):
            # Made by dcp.async_save, to copy the elements to before it returns; in torch 2.8 it is zeros_like.
            return first._with(func(first.tensor, first.tensor.shape, **(kwargs or {})))
        if func is torch.ops.aten.copy_.default and isinstance(first, LocalShard):
            first.tensor.copy_(first._part_of(args[1]))
            return first
        shard = next((arg for arg in args if isinstance(arg, LocalShard)), None)
        where = (
            "one rank's shard" if shard is None else f"elements {shard.start:,} to {shard.stop:,} of {shard.numel():,}"
        )
        raise RuntimeError(
            f"{func}: expected a full tensor, got {where} of one: take shard.tensor for this rank's elements, "
            "or the full tensor from model.state_dict() and scale_fsdp.full_optim_state_dict(model, optimizer)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types here
        return f"LocalShard([{self.start}, {self.stop}) of {tuple(self.shape)}, {self.tensor})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShard:
        return cast(LocalShard, memo.setdefault(id(self), self._with(self.tensor.clone())))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "one rank's shard of a tensor can't be pickled, as by torch.save: save the state of all ranks by "
            "torch.distributed.checkpoint.save or scale_snapshot.save_snapshot, this rank's tensors alone by "
            "model.local_state_dict(), or full ones from model.state_dict() and "
            "scale_fsdp.full_optim_state_dict(model, optimizer)"
        )

    def _with(self, tensor: Tensor) -> LocalShard:
        """The same range, with these elements."""
        return LocalShard(tensor, self.shape, self.start, self.stop, self.ranges, written=self.written)

    def _part_of(self, source: Tensor) -> Tensor:
        """The elements of `source`, the same shard or the full tensor, that belong here; in the shape of `tensor`."""
        if source.shape != self.shape:
            raise ValueError(f"expected a tensor of shape {tuple(self.shape)} to copy, got {tuple(source.shape)}")
        if not isinstance(source, LocalShard):
            return elements_of(source.detach(), self.start, self.stop, self.ranges).view(self.tensor.shape)
        if (source.start, source.stop, source.ranges) != (self.start, self.stop, self.ranges):
            raise ValueError(
                f"expected the elements {_format_range(self.start, self.stop, self.ranges)} to copy, got "
                f"{_format_range(source.start, source.stop, source.ranges)}"
            )
        return source.tensor.reshape(self.tensor.shape)


_SAME_ELEMENTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("detach", "alias", "clone", "empty_like", "zeros_like", "_to_copy", "lift_fresh")
)
