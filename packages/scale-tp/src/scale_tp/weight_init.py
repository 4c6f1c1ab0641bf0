"""Initializes a part of a weight to the slice that the full initialization would give, without building the full one.

An unsharded layer draws its full weight from the random numbers of this process. A rank that drew its own part alone
would get other numbers, and so would whatever is drawn after it. So the full weight is drawn here too, in the same
order, but block by block: blocks of other ranks are dropped.

An initializer, for example `torch.nn.init.xavier_normal_`, gets a tensor that has the full shape and no memory, and its
operations tell the numbers to draw. Where one looks at values, as `orthogonal_` and `trunc_normal_` do, the full one
is built for it after all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from scale_core.compat import active_fake_mode
from scale_tp.random import RNGState, get_rng_state, set_rng_state
from scale_tp.split import Range, Split

Initializer = Callable[[Tensor], object]

_HOST_BLOCK = 1 << 20  # elements; a multiple of 16, by which torch draws normal numbers on the host


def init_shard(
    part: Tensor,
    shape: Sequence[int],
    dim: int,
    split: Split,
    rank: int,
    init_method: Initializer,
    *,
    keep_full: bool = False,
) -> Tensor | None:
    """Fills `part` with its slice of the tensor that `init_method` fills; random numbers go on as for the full one.

    The part is [shape, but for `dim` with the indices of `rank`]; on the meta device nothing happens to it. With
    `keep_full` the full tensor is built and returned.
    """
    expected = [*shape[:dim], split.sizes[rank], *shape[dim + 1 :]]
    if list(part.shape) != expected:
        raise ValueError(f"expected a part of shape {expected} of a tensor {list(shape)}, got {list(part.shape)}")
    if part.is_meta:
        return None
    with torch.no_grad():
        if list(part.shape) == list(shape) and split.is_in_rank_order:
            init_method(part)
            return part.detach().clone() if keep_full else None
        if active_fake_mode() is not None:
            init_method(part)
            return None
        proxy = FullWeightProxy.of(part, tuple(shape), dim, split, rank)
        if keep_full:
            proxy.materialize()
        init_method(proxy)
        proxy.write_back()
        return proxy.full if keep_full else None


def full_noise(
    part: Tensor, shape: Sequence[int], dim: int, split: Split, rank: int, draw: Callable[[Tensor], object]
) -> Tensor:
    """Returns noise like `part`: this rank's slice of a full tensor that `draw` fills."""
    noise = torch.empty_like(part, memory_format=torch.contiguous_format, requires_grad=False)
    init_shard(noise, shape, dim, split, rank, draw)
    return noise


def blocks_of(total: int, size: int) -> Iterator[Range]:
    """The ranges of `size` elements that `total` are drawn in; the last one is longer, and never shorter.

    Example:
        >>> list(blocks_of(7, 3))
        [(0, 3), (3, 7)]
    """
    count = max(1, total // size)
    for number in range(count):
        yield number * size, (number + 1) * size if number + 1 < count else total


def _copy_local(target: Tensor, block: Tensor, offset: int, period: int, columns: Sequence[Range]) -> None:
    """Copies the `columns` of a part out of a block of the full tensor, whose rows have `period` elements.

    `target` is [rows, columns of the part], `block` [elements] from `offset` on.
    """
    stop, position = offset + block.numel(), offset
    while position < stop:
        row, column = divmod(position, period)
        # Complete rows at once; else the rest of this row.
        rows = (stop - position) // period if column == 0 else 0
        length = rows * period if rows else min(period - column, stop - position)
        piece = block[position - offset : position - offset + length].view(max(rows, 1), -1)
        source_offset = 0
        for first, last in columns:
            begin, end = max(first, column), min(last, column + piece.shape[1])
            if begin < end:
                into = target[row : row + max(rows, 1), source_offset + begin - first : source_offset + end - first]
                into.copy_(piece[:, begin - column : end - column])
            source_offset += last - first
        position += length


def _block_size(device: torch.device) -> int:
    if device.type != "cuda":
        return _HOST_BLOCK
    # Each thread of a full grid draws four numbers before the next round begins; a block is made of complete rounds.
    properties = torch.cuda.get_device_properties(device)
    one_round = properties.multi_processor_count * properties.max_threads_per_multi_processor * 4
    return one_round * -(-_HOST_BLOCK // one_round)


@functools.cache
def _draws_in_blocks(func: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device draws the same numbers block by block as at once: tried, since nothing promises it."""
    size = _block_size(device)
    total = 2 * size + 37
    arguments = RANDOM[func]
    before = get_rng_state(device)
    full = func(torch.empty(total, dtype=dtype, device=device), *arguments)
    after = get_rng_state(device)
    set_rng_state(before, device)
    pieces = [
        func(torch.empty(stop - start, dtype=dtype, device=device), *arguments)
        for start, stop in blocks_of(total, size)
    ]
    is_equal = bool(torch.equal(full, torch.cat(pieces))) and after.equals(get_rng_state(device))
    set_rng_state(before, device)
    return is_equal


_aten = torch.ops.aten
# Operations that draw one element after the other, with arguments to try them with.
RANDOM: dict[Any, tuple[float, ...]] = {
    _aten.normal_.default: (0.0, 1.0),
    _aten.uniform_.default: (0.0, 1.0),
    _aten.bernoulli_.float: (0.5,),
    _aten.exponential_.default: (1.0,),
}
# Operations whose result for an element depends on that element alone.
_BY_ELEMENT = frozenset(
    {
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.add_.Tensor,
        _aten.sub_.Tensor,
        _aten.mul_.Tensor,
        _aten.div_.Tensor,
        _aten.add_.Scalar,
        _aten.mul_.Scalar,
        _aten.div_.Scalar,
        _aten.clamp_.default,
        _aten.clamp_min_.default,
        _aten.clamp_max_.default,
        _aten.erfinv_.default,
        _aten.abs_.default,
        _aten.neg_.default,
        _aten.exp_.default,
        _aten.tanh_.default,
        _aten.sqrt_.default,
    }
)


class _RecordedOp(NamedTuple):
    """One operation on the full parameter."""

    operation: Callable[..., object]
    args: tuple[Any, ...]  # after the parameter
    kwargs: Mapping[str, Any]
    state: RNGState | None  # of the random numbers before; None where none were drawn
    generator_state: Tensor | None  # of the generator that was given


class FullWeightProxy(Tensor):
    """Stands for a full parameter of a divided one, in code that gives values to full parameters.

    For its shape, and for elementwise fills, it is the full parameter: all of it is drawn, and what is not this rank's
    is dropped. If such code reads values, for example for a decomposition, the full parameter is built, and the
    operations so far are repeated on it with the same random numbers. In the end `write_back`.
    """

    param: Tensor  # this rank's shard, for `write_back`
    part: Tensor  # the same, contiguous
    shard_dim: int
    index_split: Split
    rank: int
    full: Tensor | None  # once one was needed
    _recorded: list[_RecordedOp]
    _is_param: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's docs say

    @classmethod
    def of(cls, param: Tensor, shape: tuple[int, ...], dim: int, split: Split, rank: int) -> Self:
        """Returns the full shape of `param`, [shape, but for `dim` with the indices of `rank`]."""
        wrapper: Self = cast(Any, Tensor)._make_wrapper_subclass(
            cls, shape, dtype=param.dtype, device=param.device, requires_grad=False
        )
        wrapper.param, wrapper.shard_dim, wrapper.index_split, wrapper.rank = param.detach(), dim, split, rank
        wrapper.part, wrapper.full, wrapper._recorded = wrapper.param.contiguous(), None, []
        wrapper._is_param = True  # Read by isinstance(..., nn.Parameter) for a tensor of another class.
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        target, kwargs = args[0] if args else None, kwargs or {}
        if func is _aten.detach.default or (isinstance(target, cls) and target._apply_to_part(func, args[1:], kwargs)):
            return target
        args, kwargs = tree_map_only(cls, cls.materialize, (args, kwargs))
        result = func(*args, **kwargs)
        return target if isinstance(target, cls) and result is target.full else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types here
        return f"a tensor of shape {tuple(self.shape)} of which only {tuple(self.part.shape)} has memory"

    def materialize(self) -> Tensor:
        """Returns the full parameter with the values that it has by now; NaN where only other ranks have them."""
        if self.full is None:
            before = get_rng_state(self.device)
            full = torch.full(tuple(self.shape), torch.nan, dtype=self.dtype, device=self.device)
            for done in self._recorded:
                generator = done.kwargs.get("generator")
                now = None if generator is None else generator.get_state()
                if done.state is not None:
                    set_rng_state(done.state, self.device)
                if generator is not None:
                    generator.set_state(done.generator_state)
                done.operation(full, *done.args, **done.kwargs)
                if generator is not None:
                    generator.set_state(now)
            set_rng_state(before, self.device)
            ranges = self.index_split.ranges[self.rank]
            pieces = self.part.split([stop - start for start, stop in ranges], self.shard_dim)
            for (start, stop), piece in zip(ranges, pieces, strict=True):
                full.narrow(self.shard_dim, start, stop - start).copy_(piece)
            self.full = full
            self._recorded.clear()
        return self.full

    def write_back(self) -> None:
        """Leaves this rank's shard of the values in `param`."""
        if self.full is not None:
            self.param.copy_(self.index_split.take(self.full, self.rank, self.shard_dim))
        elif self.part is not self.param:
            self.param.copy_(self.part)

    def _apply_to_part(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Applies an operation of the full parameter to the part; False where that can't be done element by element."""
        if self.full is not None or any(isinstance(arg, Tensor) and arg.dim() for arg in args):
            return False
        state = generator_state = None
        if func in RANDOM:
            size = _block_size(self.device)
            if self.numel() > size and not _draws_in_blocks(func, self.dtype, self.device):
                return False
            state, generator = get_rng_state(self.device), kwargs.get("generator")
            generator_state = None if generator is None else generator.get_state()
            self._draw(lambda block: func(block, *args, **kwargs), size)
        elif func in _BY_ELEMENT:
            func(self.part, *args, **kwargs)
        else:
            return False
        self._recorded.append(_RecordedOp(func, args, kwargs, state, generator_state))
        return True

    def _draw(self, fill: Callable[[Tensor], object], size: int) -> None:
        """Draws all elements in their order, `size` at a time, and keeps the elements of the part."""
        inner = self.shape[self.shard_dim + 1 :].numel()
        period = self.shape[self.shard_dim] * inner
        columns = [(first * inner, last * inner) for first, last in self.index_split.ranges[self.rank]]
        target = self.part.view(-1, self.part.shape[self.shard_dim] * inner) if self.part.numel() else None
        for start, stop in blocks_of(self.numel(), size):
            block = torch.empty(stop - start, dtype=self.part.dtype, device=self.part.device)
            fill(block)
            if target is not None:
                _copy_local(target, block, start, period, columns)
