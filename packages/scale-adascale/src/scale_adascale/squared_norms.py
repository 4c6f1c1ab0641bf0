"""Squared norms of gradients in fp64: of one gradient, of a part of it, products of two, and of many while they come.

A model has hundreds of gradients, many of them short, and between two layers' products each call of torch costs some
ten times its cost in a loop. So a short gradient is copied, by one call, and read with the others when the pass is
over; of long ones norms of rows are written side by side. No gradient is kept unless it stays unchanged: autograd
would have to copy what it can take now, and the memory of a gradient may be used again. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

# So many squares are added up in fp32 at a time; sums of more lose digits, which differences of sums would be made of.
# The result is right to one unit in the last place of fp32 with any number of elements. Where more than CHUNK elements
# are all below 1e-20 or above 1e17, fp32 can't hold the squares of CHUNK of them: then it is 0 or inf.
CHUNK = 1024
_SHORT = 1 << 12  # Elements up to which a gradient is copied rather than read at once.


def sum_of_squares(gradient: Tensor) -> Tensor:
    """|gradient|^2, scalar, fp64, on its device; the gradient may be of any shape, complex or sparse."""
    flat = stored_values(gradient).reshape(-1)
    if flat.numel() <= CHUNK or flat.dtype == torch.float64:
        return _square(flat)
    remainder = flat.numel() % CHUNK
    dtype = None if flat.dtype == torch.float32 else torch.float32
    rows = (flat[:-remainder] if remainder else flat).view(-1, CHUNK)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).double()
    total = torch.dot(norms, norms)
    return total + _square(flat[-remainder:]) if remainder else total


def _square(flat: Tensor) -> Tensor:
    wide = flat.double()
    return torch.dot(wide, wide)


def part_of(gradient: Tensor, number: int, parts: int) -> Tensor:
    """Part `number` of so many even parts of a gradient, flat; all of them together have each element once."""
    flat = stored_values(gradient).reshape(-1)
    first, last = flat.numel() * number // parts, flat.numel() * (number + 1) // parts
    return flat[first:last]


def stored_values(gradient: Tensor) -> Tensor:
    """The real numbers that a gradient stores: the values of a sparse one, both parts of a complex one."""
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def inner_product(one: Tensor, other: Tensor) -> Tensor:
    """The sum of the products of two gradients of one shape and dtype; scalar, fp64."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        one, other = _common_values(one, other)
    first, second = stored_values(one).reshape(-1), stored_values(other).reshape(-1)
    full = first.numel() - first.numel() % CHUNK
    dtype = torch.promote_types(first.dtype, torch.float32)
    first, second = first.to(dtype), second.to(dtype)
    products: Tensor = torch.linalg.vecdot(first[:full].view(-1, CHUNK), second[:full].view(-1, CHUNK))
    return products.sum(dtype=torch.float64) + torch.dot(first[full:].double(), second[full:].double())


def _common_values(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The values of two gradients, one of them sparse at least, at the indices that both store, in one order."""
    if one.layout is torch.strided or other.layout is torch.strided:
        return tuple(tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in (one, other))  # type: ignore[return-value]
    one, other = one.coalesce(), other.coalesce()
    offsets = [torch.zeros_like(tensor.indices()[0]) for tensor in (one, other)]
    for dim, size in enumerate(one.shape[: one.sparse_dim()]):
        offsets = [offset * size + tensor.indices()[dim] for offset, tensor in zip(offsets, (one, other), strict=True)]
    first, second = (torch.isin(offset, elements) for offset, elements in (offsets, offsets[::-1]))
    return one.values()[first], other.values()[second]  # Coalesced indices are sorted.


class _NormBuffers:
    """Where the norms of one long gradient are written: of its rows, [rows], and of the rest, [1], fp64."""

    def __init__(self, values: Tensor) -> None:
        self.numel, self.dtype = values.numel(), values.dtype
        self.num_rows, self.rest = divmod(self.numel, CHUNK)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.norm_dtype = None if wide is self.dtype else wide
        self.of_rows = torch.empty(self.num_rows, dtype=wide, device=values.device)
        self.of_rest = torch.empty(1, dtype=torch.float64, device=values.device)
        self.norms = [self.of_rows, self.of_rest] if self.rest else [self.of_rows]

    def fill(self, values: Tensor) -> None:
        norm, rows, remainder = torch.linalg.vector_norm, self.num_rows, self.rest
        if not remainder:
            norm(values.reshape(rows, CHUNK), dim=1, dtype=self.norm_dtype, out=self.of_rows)
        elif not rows:
            norm(values.reshape(1, remainder), dim=1, dtype=torch.float64, out=self.of_rest)
        else:
            flat = values.reshape(-1)
            norm(flat[:-remainder].view(rows, CHUNK), dim=1, dtype=self.norm_dtype, out=self.of_rows)
            norm(flat[-remainder:].view(1, remainder), dim=1, dtype=torch.float64, out=self.of_rest)


class NormAccumulator:
    """The squared norms of `num` indexed gradients on one device.

    Its buffers live as long as it does: a new tensor for each gradient would keep the allocator from using freed
    gradients again.
    """

    def __init__(self, num: int, device: torch.device) -> None:
        self._num, self._device = num, device
        self._buffers: dict[int, _NormBuffers] = {}  # of long gradients, by index
        self._copies: dict[int, Tensor] = {}  # of short gradients, by index
        self._norms: list[tuple[int, list[Tensor]]] = []  # indices, and tensors that have the same norm
        self._added: Tensor | None = None
        self._norm_indices: list[int] = []
        self._index_tensor = torch.zeros(0, dtype=torch.int64, device=device)

    def set(self, index: int, gradient: Tensor, *, stays: bool = False) -> None:
        """Takes a gradient, the only one of its index until `clear`; `stays` if nothing changes it before `squares`."""
        is_plain = gradient.layout is torch.strided and not gradient.is_complex()
        if is_plain and gradient.numel() <= _SHORT:
            self._norms.append((index, [gradient if stays else self._copied(index, gradient)]))
            return
        values = gradient if is_plain else stored_values(gradient)
        buffers = self._buffers.get(index)
        if buffers is None or buffers.numel != values.numel() or buffers.dtype is not values.dtype:
            buffers = self._buffers[index] = _NormBuffers(values)
        buffers.fill(values)
        self._norms.append((index, buffers.norms))

    def _copied(self, index: int, gradient: Tensor) -> Tensor:
        copy = self._copies.get(index)
        if copy is None or copy.shape != gradient.shape or copy.dtype is not gradient.dtype:
            copy = self._copies[index] = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        return copy.copy_(gradient)

    def add(self, index: int, gradient: Tensor) -> None:
        """Adds the square of a gradient to the sum of its index, any number of times until `clear`."""
        if self._added is None:
            self._added = torch.zeros(self._num, dtype=torch.float64, device=self._device)
        self._added[index] += sum_of_squares(gradient)

    def clear(self) -> None:
        self._norms, self._added = [], None

    def squares(self) -> Tensor:
        """The squares, [num], fp64; 0 of indices that had no gradient."""
        squares = (
            torch.zeros(self._num, dtype=torch.float64, device=self._device) if self._added is None else self._added
        )
        if not self._norms:
            return squares
        indices = [index for index, norms in self._norms for _ in norms]
        if indices != self._norm_indices:
            self._norm_indices = indices
            self._index_tensor = torch.tensor(indices).to(self._device, non_blocking=True)
        # The norm of the norms of rows is the norm of all elements.
        norms = torch.stack(torch._foreach_norm([norm for _, norms in self._norms for norm in norms], 2, torch.float64))
        return squares.index_add(0, self._index_tensor, norms.mul_(norms))
