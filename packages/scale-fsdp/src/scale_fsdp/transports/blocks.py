"""Symmetric quantization in blocks: one scale for each run of N values, and numbers of 8 or 4 bits.

A message is one tensor of bytes, so that one collective sends it: first the scales of all blocks in fp32, then the
numbers. A block's scale is its largest magnitude, amax, over the largest number of the format, and values are rounded
to the nearest, ties to even. So a message is a function of the values alone, and is the same on every rank.

    format         numbers        largest   |x - dequantize(quantize(x))|, at most      bytes of n values
    int8           -127 to 127        127   amax / 254                                  n + 4 ceil(n / N)
    float8_e4m3    torch's              448   the larger of |x| / 17 and amax / 458752    n + 4 ceil(n / N)
    int4           -7 to 7              7   amax / 14                                   ceil(n / 2) + 4 ceil(n / N)

Each bound holds times 1 + 2**-14, for the rounding of scales and products in fp32; results in half precision are
rounded once more. A block whose scale is below the smallest normal fp32 number, 2**-126, becomes zeros. A block with an
infinity or a NaN becomes NaN in all elements, so checks for values that are not finite still find it.

    >>> import torch
    >>> values = torch.tensor([[1.0, -0.5, 0.24, 127.0]])
    >>> message = quantize(values, BlockFormat("int8", block_size=4))
    >>> message.shape, dequantize(message, 4, BlockFormat("int8", block_size=4))
    (torch.Size([1, 8]), tensor([[  1.,   0.,   0., 127.]]))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor

from scale_core.arguments import did_you_mean

FormatName: TypeAlias = Literal["int8", "float8_e4m3", "int4"]

SCALE_BYTES = 4
"""Of one block's scale, which is fp32: in bf16 its own rounding would be as large as the rounding of int8."""

_LARGEST = {"int8": 127.0, "float8_e4m3": 448.0, "int4": 7.0}
_SMALLEST_SCALE = 2.0**-126
# Rows are quantized in pieces of at most this many values: each piece has a few temporary copies in fp32.
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class BlockFormat:
    """Numbers of few bits, and how many of them share one scale.

    Attributes:
        dtype: "int8", "float8_e4m3" or "int4", with two numbers in one byte.
        block_size: Values that share a scale; even.

    Raises:
        ValueError: The format does not exist, or the size is not even and above 0.

    Examples:
        >>> from scale_fsdp.transports.blocks import BlockFormat
        >>> BlockFormat("int8", block_size=256).num_bytes(1024)  # and 4 scales
        1040

    See also: [the guide to quantized communication](../guides/slow-networks.md#quantized-communication-zero).
    """

    dtype: FormatName
    block_size: int = 128

    def __post_init__(self) -> None:
        names = get_args(FormatName)
        if self.dtype not in names:
            hint = did_you_mean(str(self.dtype), names, "")
            raise ValueError(
                f"expected a format of {', '.join(map(repr, names))}, got {self.dtype!r}{hint and f'; {hint}'}"
            )
        size: object = self.block_size
        if not isinstance(size, int) or size < 2 or size % 2:
            raise ValueError(
                f"expected an even block_size above 0, got {size!r}: write BlockFormat({self.dtype!r}, 128)"
            )

    def num_blocks(self, num_elements: int) -> int:
        """Number of scales of this many values; the last block may be shorter."""
        return -(-num_elements // self.block_size)

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of a message of this many values: `ceil(n * bits / 8) + 4 * ceil(n / block_size)`.

        >>> BlockFormat("int8", 128).num_bytes(1000), BlockFormat("int4", 128).num_bytes(1000)
        (1032, 532)
        """
        numbers = -(-num_elements // 2) if self.dtype == "int4" else num_elements
        return numbers + SCALE_BYTES * self.num_blocks(num_elements)


def quantize(values: Tensor, block_format: BlockFormat, *, out: Tensor | None = None) -> Tensor:
    """Returns one message for each row: uint8 [R, `num_bytes(n)`].

    Args:
        values: [R, n] of a floating-point dtype; blocks are counted from the beginning of each row.
        block_format: The format of the message.
        out: The messages, to be filled.

    Examples:
        >>> import torch
        >>> from scale_fsdp.transports.blocks import BlockFormat, dequantize, quantize
        >>> form = BlockFormat("int8")
        >>> message = quantize(torch.ones(1, 256), form)
        >>> message.shape, message.dtype
        (torch.Size([1, 264]), torch.uint8)

    See also: [the guide to quantized communication](../guides/slow-networks.md#quantized-communication-zero).
    """
    rows, numel = values.shape
    message = out
    if message is None:
        message = torch.empty(rows, block_format.num_bytes(numel), dtype=torch.uint8, device=values.device)
    num_scale_bytes = SCALE_BYTES * block_format.num_blocks(numel)
    for piece in _pieces(rows, numel):
        runs = [_quantize_run(values[piece, run.start : run.stop], run) for run in _runs(numel, block_format)]
        if runs:
            scales = torch.cat([scale for scale, _ in runs], dim=1)
            message[piece, :num_scale_bytes] = scales.view(torch.uint8)
            torch.cat([numbers for _, numbers in runs], dim=1, out=message[piece, num_scale_bytes:])
    return message


def dequantize(message: Tensor, num_elements: int, block_format: BlockFormat, *, out: Tensor | None = None) -> Tensor:
    """Returns the values of one message for each row, [R, n]: in fp32, or in the dtype of `out`.

    Args:
        message: uint8 [R, `num_bytes(n)`], as `quantize` has made it.
        num_elements: n.
        block_format: The format that it was made in.
        out: [R, n], to be filled.

    Examples:
        >>> import torch
        >>> from scale_fsdp.transports.blocks import BlockFormat, dequantize, quantize
        >>> form, values = BlockFormat("int8"), torch.randn(2, 256)
        >>> received = dequantize(quantize(values, form), 256, form)
        >>> bool((received - values).abs().max() <= values.abs().max() / 127)
        True

    See also: [the guide to quantized communication](../guides/slow-networks.md#quantized-communication-zero).
    """
    rows = len(message)
    if out is None:
        out = torch.empty(rows, num_elements, dtype=torch.float32, device=message.device)
    num_scale_bytes = SCALE_BYTES * block_format.num_blocks(num_elements)
    for piece in _pieces(rows, num_elements):
        # A copy: a row of bytes may begin at any byte, and fp32 numbers may not.
        scales = message[piece, :num_scale_bytes].clone(memory_format=torch.contiguous_format).view(torch.float32)
        numbers = message[piece, num_scale_bytes:]
        for run in _runs(num_elements, block_format):
            codes = _codes(numbers, run)
            torch.mul(
                codes.unflatten(1, (-1, run.block_size)),
                scales[:, run.first_block : run.first_block + run.num_blocks, None],
                out=out[piece, run.start : run.stop].unflatten(1, (-1, run.block_size)),
            )
    return out


class _Run(NamedTuple):
    """Neighboring blocks of one size: all full ones, or the last one."""

    dtype: FormatName
    start: int
    stop: int
    block_size: int
    first_block: int

    @property
    def num_blocks(self) -> int:
        return (self.stop - self.start) // self.block_size


def _runs(numel: int, block_format: BlockFormat) -> Iterator[_Run]:
    size = block_format.block_size
    full = numel // size * size
    if full:
        yield _Run(block_format.dtype, 0, full, size, 0)
    if full < numel:
        yield _Run(block_format.dtype, full, numel, numel - full, full // size)


def _pieces(rows: int, numel: int) -> Iterator[slice]:
    step = max(1, _PIECE_ELEMENTS // max(1, numel))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _quantize_run(values: Tensor, run: _Run) -> tuple[Tensor, Tensor]:
    """Returns the scales fp32 [R, blocks] and the numbers uint8 [R, bytes] of one run of blocks."""
    blocks = values.unflatten(1, (-1, run.block_size)).float()
    amax = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=2)
    scales = amax / _LARGEST[run.dtype]
    scales = torch.where(scales < _SMALLEST_SCALE, torch.zeros_like(scales), scales)
    scales = torch.where(amax.isfinite(), scales, torch.full_like(scales, torch.nan))
    # Divide by 1 where the scale is 0. A block that is not finite has the scale NaN, so its numbers do not matter.
    ratio = blocks / torch.where(scales == 0, torch.ones_like(scales), scales)[:, :, None]
    ratio = ratio.nan_to_num_(0.0).flatten(1)
    if run.dtype == "float8_e4m3":
        return scales, ratio.to(torch.float8_e4m3fn).view(torch.uint8)
    numbers = ratio.round_().to(torch.int8)
    return scales, (_pack(numbers) if run.dtype == "int4" else numbers.view(torch.uint8))


def _codes(numbers: Tensor, run: _Run) -> Tensor:
    """The numbers of one run in a dtype that multiplies: int8 or fp32 [R, values of the run]."""
    if run.dtype == "int4":
        return _unpack(numbers[:, run.start // 2 : -(-run.stop // 2)])[:, : run.stop - run.start]
    numbers = numbers[:, run.start : run.stop]
    return numbers.view(torch.int8) if run.dtype == "int8" else numbers.view(torch.float8_e4m3fn).float()


def _pack(numbers: Tensor) -> Tensor:
    """Two numbers of 4 bits per byte, the first in the lower half: int8 [R, n] -> uint8 [R, ceil(n / 2)]."""
    if numbers.shape[1] % 2:
        numbers = torch.nn.functional.pad(numbers, (0, 1))
    pairs = numbers.view(torch.uint8).unflatten(1, (-1, 2))
    return cast(Tensor, (pairs[..., 0] & 15) | (pairs[..., 1] << 4))


def _unpack(packed: Tensor) -> Tensor:
    """As numbers with their sign: uint8 [R, bytes] -> int8 [R, 2 * bytes]."""
    signed = packed.view(torch.int8)
    return torch.stack(((signed << 4) >> 4, signed >> 4), dim=2).flatten(1)
