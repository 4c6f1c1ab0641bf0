"""One block over a sequence that ranks divide: what its forward keeps, bytes sent and time, for ring and Ulysses.

    python benchmarks/context_parallel.py                      # worlds 2 and 4, 5 turns; a few minutes of two cores
    python benchmarks/context_parallel.py --smoke              # a tiny block, one turn: that it runs
    python benchmarks/context_parallel.py --date 2026-11-27    # also writes results/2026-11-27-context_parallel.*

A block in the manner of Llama (RMSNorm, attention with 8 heads and 4 key-value heads, gated perceptron), causal, fp32,
gloo, one thread for each rank, forward and backward, with `context_parallel` around it and without, on one process.

"kept" is what autograd holds between forward and backward on a rank, weights not counted, each storage once. "sent" is
what a rank writes to its sockets in a step, counted by the kernel. "CPU" is the CPU time of all ranks, the transport's
threads included, over that of one process; the ranks share two cores, so time says what is computed more than once,
not how fast it is. "error" is the largest difference of an output.

torch's own `torch.distributed.tensor.experimental.context_parallel` is tried beside them. Where it does not run, as on
a CPU, for whose attention kernel it has no ring, the row names the error, and the JSON has its text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from measure import MB, spending
from report import Table, save
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from scale_core.comm.collectives import exchange
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_tp import context_parallel, split_sequence

HEADS, KEY_VALUE_HEADS = 8, 4


class Block(nn.Module):
    """Causal attention and a gated perceptron; [batch, positions, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_size = width // HEADS
        self.norm, self.norm_of_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, KEY_VALUE_HEADS * self.head_size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(2, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_of_feed(x)
        y: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return y


def kept_bytes(block: Block, x: Tensor) -> int:
    """Bytes that the forward leaves for the backward pass."""
    weights = {param.untyped_storage().data_ptr() for param in block.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x)
    total = sum(storage.nbytes() for address, storage in storages.items() if address not in weights)
    output.sum().backward()
    return total


def measure(attention: Any, width: int, length: int, turns: int) -> dict[str, Any]:
    """What one rank finds; `attention` None is the full sequence."""
    world, block = group_of(), Block(width)
    whole = torch.randn(1, length, width, generator=torch.Generator().manual_seed(1))
    x = (whole if attention is None else split_sequence(whole, world)).requires_grad_()
    with nullcontext() if attention is None else context_parallel(world, attention=attention):
        kept = kept_bytes(block, x)
        output = block(x).detach()
        cpu, sent = [], []
        for _ in range(turns):
            if world.size > 1:
                exchange([0], world)
            with spending() as spent:
                block(x).sum().backward()
            cpu.append(spent.cpu_seconds)
            sent.append(spent.bytes_sent)
    expected = block(whole).detach()
    expected = expected if attention is None else split_sequence(expected, world)
    return {"kept": kept, "cpu": cpu, "sent": min(sent), "error": (output - expected).abs().max().item()}


def torch_row(width: int, length: int) -> str:
    """What torch's own context_parallel raises here; "" where it computes the right numbers."""
    from torch.distributed.tensor.experimental import context_parallel as of_torch

    world, block = group_of(), Block(width)
    whole = torch.randn(1, length, width, generator=torch.Generator().manual_seed(1))
    expected, x = block(whole).detach(), whole.clone()
    try:
        with of_torch(init_device_mesh("cpu", (world.size,)), buffers=[x], buffer_seq_dims=[1]):
            found = block(x).detach()
        if not torch.allclose(found, split_sequence(expected, world), atol=1e-5):
            return "another number than one process"
    except Exception as error:
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else ''}"
    return ""


def rows_of(world: int, options: argparse.Namespace) -> tuple[list[list[str]], list[dict[str, Any]]]:
    sizes = (options.width, options.length)
    alone = measure(None, *sizes, options.turns)
    rows = [["one process", f"{alone['kept'] / MB:.2f}", "0.00", "1.00", "0"]]
    figures = [{"world": 1, "name": "one process", **alone}]
    for attention in ("ring", "ulysses"):
        by_rank = run_ranks(measure, world, attention, *sizes, options.turns)
        of_all = [sum(turn) for turn in zip(*(found["cpu"] for found in by_rank), strict=True)]
        ratio = median(of_all) / median(alone["cpu"])
        kept, sent, error = (max(found[name] for found in by_rank) for name in ("kept", "sent", "error"))
        rows.append([attention, f"{kept / MB:.2f}", f"{sent / MB:.2f}", f"{ratio:.2f}", f"{error:.0e}"])
        figures.append({"world": world, "name": attention, "kept": kept, "cpu": of_all, "sent": sent, "error": error})
    raised = next((text for text in run_ranks(torch_row, world, *sizes) if text), "")
    rows.append(["torch context_parallel", "runs" if not raised else f"raises {raised.partition(':')[0]}", "", "", ""])
    figures.append({"world": world, "name": "torch", "raised": raised})
    return rows, figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048, help="of the sequence")
    parser.add_argument("--smoke", action="store_true", help="a tiny block, one turn")
    parser.add_argument("--date", help="writes results/DATE-context_parallel.json and .md")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.worlds, options.width, options.length, options.turns = "2", 32, 16, 1
    torch.set_num_threads(1)
    tables, figures = [], []
    for world in map(int, options.worlds.split(",")):
        rows, found = rows_of(world, options)
        title = f"{world} ranks, width {options.width}, {options.length} positions, each rank"
        tables.append(Table(title, ["", "kept, MB", "sent, MB", "CPU", "error"], rows))
        figures += found
        print(tables[-1].markdown())
    if options.date:
        save("context_parallel", options.date, __doc__ or "", tables, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
