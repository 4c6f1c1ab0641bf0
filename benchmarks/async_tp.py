"""How much of the communication of tensor parallel layers `overlap_pieces=` hides: a simulation with durations.

    python benchmarks/async_tp.py                     # 80, 200 and 400 GB/s
    python benchmarks/async_tp.py --smoke             # a tiny model
    python benchmarks/async_tp.py --date 2026-11-30   # also writes results/2026-11-30-async_tp.*

Blocks of a column and a row parallel layer run forward and backward in a simulation of one of 8 ranks, in bf16. The
durations are those of `step_timeline.py`: products at 500 TFLOP/s, other operators at 2.5 TB/s, a launch 6 us of the
host, a collective 20 us and its bytes at the bandwidth of the column.

The durations are round numbers and no GPU's. A product in pieces takes the time of the full one here, which small
pieces on a GPU do not reach. "exposed" is the step less the same step with collectives that take no time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from report import Table, save
from torch import Tensor, nn

from scale_check.simulate import simulate
from scale_check.simulate.durations import Rates, durations
from scale_tp import (
    ColumnParallelLinear,
    LayerOptions,
    RowParallelLinear,
    destroy_model_parallel,
    initialize_model_parallel,
)

WORLD_SIZE = 8
PIECES = (None, 1, 2, 4)


class Block(nn.Module):
    """A column and a row parallel layer beside the residual stream."""

    def __init__(self, width: int, sequence_parallel: bool, pieces: int | None) -> None:
        super().__init__()
        layer_options = LayerOptions(sequence_parallel=sequence_parallel, overlap_pieces=pieces)
        options: dict[str, Any] = {"bias": False, "options": layer_options}
        self.column = ColumnParallelLinear(width, 4 * width, gather_output=False, **options)
        self.row = RowParallelLinear(4 * width, width, input_is_parallel=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.row(torch.relu(self.column(x)))
        return y


@dataclass
class Result:
    """One way at one bandwidth, in seconds: of the step, what collectives add to it, and of the host."""

    sequence_parallel: bool
    pieces: int | None
    gigabytes_per_second: int
    step_seconds: float
    exposed_seconds: float
    host_seconds: float


def measure(
    sequence_parallel: bool, pieces: int | None, bandwidth: int, layers: int, width: int, tokens: int
) -> Result:
    seconds, host = step_of(sequence_parallel, pieces, 1e9 * bandwidth, layers, width, tokens)
    computing, _ = step_of(sequence_parallel, pieces, 0.0, layers, width, tokens)
    return Result(sequence_parallel, pieces, bandwidth, seconds, seconds - computing, host)


def step_of(
    sequence_parallel: bool, pieces: int | None, bytes_per_second: float, layers: int, width: int, tokens: int
) -> tuple[float, float]:
    """Seconds of a steady forward and backward, and of the host; collectives take no time at 0 bytes/s."""
    with simulate(world_size=WORLD_SIZE, device="sim", check=False) as simulation:
        initialize_model_parallel(WORLD_SIZE)
        with durations(simulation, Rates(network_bytes_per_second=bytes_per_second)) as clocks:
            torch.set_default_dtype(torch.bfloat16)
            try:
                with torch.device("sim"):
                    model = nn.Sequential(*(Block(width, sequence_parallel, pieces) for _ in range(layers)))
            finally:
                torch.set_default_dtype(torch.float32)
            rows = tokens // WORLD_SIZE if sequence_parallel else tokens
            for step in range(3):
                if step == 2:
                    begin, clocks.host = clocks.now, clocks.now
                x = torch.zeros(rows, width, device="sim", dtype=torch.bfloat16, requires_grad=True)
                model(x).sum().backward()
                model.zero_grad()
        destroy_model_parallel()
        return clocks.now - begin, clocks.host - begin


def table_of(results: Sequence[Result], title: str) -> Table:
    bandwidths = list(dict.fromkeys(result.gigabytes_per_second for result in results))
    heads = ["forward and backward, ms (exposed)", *(f"{bandwidth} GB/s" for bandwidth in bandwidths), "host, ms"]
    rows = []
    for way in dict.fromkeys((result.sequence_parallel, result.pieces) for result in results):
        of_way = [result for result in results if (result.sequence_parallel, result.pieces) == way]
        name = "sequence parallel" if way[0] else "tensor parallel"
        cells = [f"{1e3 * result.step_seconds:.1f} ({1e3 * result.exposed_seconds:.1f})" for result in of_way]
        rows.append([f"{name}, overlap_pieces={way[1]}", *cells, f"{1e3 * of_way[0].host_seconds:.1f}"])
    return Table(title, heads, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bandwidth", type=int, nargs="+", default=[80, 200, 400], help="GB/s of a rank")
    parser.add_argument("--layers", type=int, default=4, help="blocks of two layers")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--smoke", action="store_true", help="a tiny model: whether it runs")
    parser.add_argument("--date", help="also writes results/DATE-async_tp.json and .md")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.layers, options.width, options.tokens, options.bandwidth = 1, 64, 64, [80]
    sizes = (options.layers, options.width, options.tokens)
    results = [
        measure(sequence_parallel, pieces, bandwidth, *sizes)
        for sequence_parallel in (True, False)
        for pieces in PIECES
        for bandwidth in options.bandwidth
    ]
    title = f"{options.layers} blocks of width {options.width}, {options.tokens} tokens, {WORLD_SIZE} ranks, simulated"
    table = table_of(results, title)
    print(table.markdown())
    if options.date:
        save("async_tp", options.date, __doc__ or "", [table], [asdict(result) for result in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
