"""A part of a matrix with the values that it has in the whole one, which is never built.

An unsharded layer draws its whole weight from the random numbers of this process. A rank that drew its own part alone
would get other numbers, and so would whatever is drawn after it. So the whole is drawn here, too, in the same order,
but block by block: what is not this rank's is dropped.

An initialiser such as `torch.nn.init.xavier_normal_` gets a tensor that has the whole shape and no memory, and says by
its operations what to draw. Where one looks at values, as `orthogonal_` and `trunc_normal_` do, the whole matrix is
built for it after all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from scale_core.compat import active_fake_mode
from scale_tp.random import StreamState, go_to, random_state
from scale_tp.split import Range, Split

Initialiser = Callable[[Tensor], object]

_HOST_BLOCK = 1 << 20  # elements; a multiple of 16, by which torch draws normal numbers on the host


def initialise_part(
    part: Tensor,
    shape: Sequence[int],
    dim: int,
    split: Split,
    rank: int,
    init_method: Initialiser,
    *,
    keep_whole: bool = False,
) -> Tensor | None:
    """Fills a part with what `init_method` gives the whole; random numbers go on as if that had been built.

    Args:
        part: [shape, but for `dim` with this rank's indices]; nothing happens to it on the meta device.
        shape: Of the whole tensor.
        dim: The dimension that is divided.
        split: How it is divided.
        rank: Whose part it is.
        init_method: What fills a whole tensor in place, such as those of `torch.nn.init`. Its result is not used.
        keep_whole: Build the whole tensor, and return it.

    Raises:
        ValueError: The part has another shape.
    """
    expected = [*shape[:dim], split.sizes[rank], *shape[dim + 1 :]]
    if list(part.shape) != expected:
        raise ValueError(f"expected a part of shape {expected} of a tensor {list(shape)}, got {list(part.shape)}")
    if part.is_meta:
        return None
    with torch.no_grad():
        if list(part.shape) == list(shape) and split.is_in_rank_order:
            init_method(part)
            return part.detach().clone() if keep_whole else None
        if active_fake_mode() is not None:
            init_method(part)
            return None
        if not keep_whole:
            before = random_state(part.device)
            try:
                init_method(WholeOfPart(part.detach(), shape, dim, split.ranges[rank]))
                return None
            except NeedsValuesError:
                go_to(before, part.device)
        whole = torch.empty(tuple(shape), dtype=part.dtype, device=part.device)
        init_method(whole)
        part.copy_(split.take(whole, rank, dim))
        return whole if keep_whole else None


def whole_noise(
    part: Tensor, shape: Sequence[int], dim: int, split: Split, rank: int, draw: Callable[[Tensor], object]
) -> Tensor:
    """Returns noise like `part`: this rank's part of what `draw` fills a tensor of the whole shape with."""
    noise = torch.empty_like(part, memory_format=torch.contiguous_format, requires_grad=False)
    initialise_part(noise, shape, dim, split, rank, draw)
    return noise


class NeedsValuesError(Exception):
    """An initialiser does what can't be done to one element after the other."""


class WholeOfPart(Tensor):
    """A tensor of the whole shape of which only a part has memory: what is done to it is done to that part."""

    part: Tensor
    ranges: Sequence[Range]
    divided: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's docs say

    @staticmethod
    def __new__(cls, part: Tensor, shape: Sequence[int], dim: int, ranges: Sequence[Range]) -> Self:
        made: Self = cast(Any, Tensor)._make_wrapper_subclass(
            cls, tuple(shape), dtype=part.dtype, device=part.device, requires_grad=False
        )
        made.part, made.divided, made.ranges = part, dim, ranges
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation lacks the first argument
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        whole, *rest = args
        if not isinstance(whole, WholeOfPart) or any(isinstance(arg, Tensor) and arg.dim() for arg in rest):
            raise NeedsValuesError(str(func))
        if func in RANDOM:
            whole._draw(lambda block: func(block, *rest, **(kwargs or {})), func)
        elif func in _BY_ELEMENT:
            func(whole.part, *rest, **(kwargs or {}))
        elif func is not torch.ops.aten.detach.default:
            raise NeedsValuesError(str(func))
        return whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types here
        return f"a tensor of shape {tuple(self.shape)} of which only {tuple(self.part.shape)} has memory"

    def _draw(self, fill: Callable[[Tensor], object], func: Any) -> None:
        """Draws all elements in their order and keeps those of the part."""
        size = _block_size(self.part.device)
        if self.numel() > size and not _draws_in_blocks(func, self.part.dtype, self.part.device):
            raise NeedsValuesError(str(func))
        inner = self.shape[self.divided + 1 :].numel()
        period = self.shape[self.divided] * inner
        target = self.part.view(-1, self.part.shape[self.divided] * inner) if self.part.numel() else None
        for start, stop in blocks_of(self.numel(), size):
            block = torch.empty(stop - start, dtype=self.part.dtype, device=self.part.device)
            fill(block)
            if target is not None:
                _keep(target, block, start, period, [(first * inner, last * inner) for first, last in self.ranges])


def blocks_of(total: int, size: int) -> Iterator[Range]:
    """The ranges of `size` elements that `total` are drawn in; the last one is longer, and never shorter.

    Example:
        >>> list(blocks_of(7, 3))
        [(0, 3), (3, 7)]
    """
    count = max(1, total // size)
    for number in range(count):
        yield number * size, (number + 1) * size if number + 1 < count else total


def _keep(target: Tensor, block: Tensor, offset: int, period: int, columns: Sequence[Range]) -> None:
    """Copies what belongs to a part out of a block of the whole.

    Args:
        target: [rows, columns of the part].
        block: [elements], of the whole from `offset` on, whose rows have `period` elements.
        offset: Where the block begins.
        period: Elements in a row of the whole.
        columns: Which of them belong to the part.
    """
    stop, position = offset + block.numel(), offset
    while position < stop:
        row, column = divmod(position, period)
        # Whole rows at once; else what there is of this row.
        rows = (stop - position) // period if column == 0 else 0
        length = rows * period if rows else min(period - column, stop - position)
        piece = block[position - offset : position - offset + length].view(max(rows, 1), -1)
        place = 0
        for first, last in columns:
            begin, end = max(first, column), min(last, column + piece.shape[1])
            if begin < end:
                into = target[row : row + max(rows, 1), place + begin - first : place + end - first]
                into.copy_(piece[:, begin - column : end - column])
            place += last - first
        position += length


def _block_size(device: torch.device) -> int:
    if device.type != "cuda":
        return _HOST_BLOCK
    # Each thread of a full grid draws four numbers before the next round begins; a block is made of whole rounds.
    properties = torch.cuda.get_device_properties(device)
    one_round = properties.multi_processor_count * properties.max_threads_per_multi_processor * 4
    return one_round * -(-_HOST_BLOCK // one_round)


@functools.cache
def _draws_in_blocks(func: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device draws the same numbers block by block as at once: tried, since nothing promises it."""
    size = _block_size(device)
    total = 2 * size + 37
    arguments = RANDOM[func]
    before = random_state(device)
    whole = func(torch.empty(total, dtype=dtype, device=device), *arguments)
    after = random_state(device)
    go_to(before, device)
    pieces = [
        func(torch.empty(stop - start, dtype=dtype, device=device), *arguments)
        for start, stop in blocks_of(total, size)
    ]
    alike = bool(torch.equal(whole, torch.cat(pieces))) and after.equals(random_state(device))
    go_to(before, device)
    return alike


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


# A parameter of which this rank has a part, for code that gives values to a whole one.
#
# To its shape, and to what fills it, it is the whole parameter: all of it is drawn, and what is not this rank's is
# dropped. Where such code looks at values (a row that is set to zero, a decomposition), the whole is built after all,
# and what was done so far is done to it once more, from the same random numbers.


class _Done(NamedTuple):
    """One operation on the whole parameter.

    Attributes:
        operation: What was called with it.
        args: The other arguments.
        kwargs: Those given by name.
        state: Where the random numbers stood before; None where none were drawn.
        generator_state: Where the generator that was given stood; None without.
    """

    operation: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: StreamState | None
    generator_state: Tensor | None


class WholeView(WholeOfPart):
    """A part that looks like the whole; see above. Whoever makes one calls `finish` when it has been given its values.

    Attributes:
        param: What `finish` leaves the values in: this rank's part.
        dealt: How the dimension `divided` is dealt to the ranks.
        rank: Whose part it is.
        built: The whole, where one was needed; until then None.
    """

    param: Tensor
    dealt: Split
    rank: int
    built: Tensor | None
    _done: list[_Done]
    _is_param: bool

    @classmethod
    def of(cls, param: Tensor, shape: tuple[int, ...], dim: int, split: Split, rank: int) -> Self:
        """Returns the whole of `param`, [shape, but for `dim` with the indices of `rank`]."""
        held = param.detach()
        made = cls(held.contiguous(), shape, dim, split.ranges[rank])
        made.param, made.dealt, made.rank, made.built, made._done = held, split, rank, None, []
        made._is_param = True  # What isinstance(..., nn.Parameter) asks of a tensor that is none by its class.
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        whole, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(whole, cls) and whole.built is None:
            generator = kwargs.get("generator")
            drawn = random_state(whole.device) if func in RANDOM else None
            generator_state = None if generator is None else generator.get_state()
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            except NeedsValuesError:
                pass
            else:
                if func is not torch.ops.aten.detach.default:
                    whole._done.append(_Done(func, args[1:], kwargs, drawn, generator_state))
                return result
        if func is torch.ops.aten.detach.default:
            return whole
        args, kwargs = tree_map_only(cls, cls.build, (args, kwargs))
        result = func(*args, **kwargs)
        return whole if isinstance(whole, cls) and result is whole.built else result

    def build(self) -> Tensor:
        """Returns the whole parameter with the values that it has by now; NaN where only other ranks have them."""
        if self.built is None:
            before = random_state(self.device)
            whole = torch.full(tuple(self.shape), torch.nan, dtype=self.dtype, device=self.device)
            for done in self._done:
                generator = done.kwargs.get("generator")
                now = None if generator is None else generator.get_state()
                if done.state is not None:
                    go_to(done.state, self.device)
                if generator is not None:
                    generator.set_state(done.generator_state)
                done.operation(whole, *done.args, **done.kwargs)
                if generator is not None:
                    generator.set_state(now)
            go_to(before, self.device)
            ranges = self.dealt.ranges[self.rank]
            pieces = self.part.split([stop - start for start, stop in ranges], self.divided)
            for (start, stop), piece in zip(ranges, pieces, strict=True):
                whole.narrow(self.divided, start, stop - start).copy_(piece)
            self.built = whole
            self._done.clear()
        return self.built

    def finish(self) -> None:
        """Leaves this rank's part of the values in `param`."""
        if self.built is not None:
            self.param.copy_(self.dealt.take(self.built, self.rank, self.divided))
        elif self.part is not self.param:
            self.param.copy_(self.part)
