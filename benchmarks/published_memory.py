"""The memory of a training step by simulation beside published peaks, by torchtitan.

    python benchmarks/published_memory.py                     # all rows
    python benchmarks/published_memory.py --smoke             # two layers of one row
    python benchmarks/published_memory.py --date 2026-11-30   # also writes results/2026-11-30-published_memory.*

torchtitan publishes what torch's caching allocator has reserved (`torch.cuda.max_memory_reserved`). So the step of its
Llama 3.1 8B runs on a simulated accelerator: torch's FSDP2 with bf16 parameters and fp32 reductions, torch's
checkpoints, fused AdamW, three steps. A model of the allocator places every tensor. Nothing was fitted to a row.

"FSDP2" has the policy of torchtitan: selective checkpoints keep every second product of a block. "scale_fsdp" is the
plan of `scale-train plan` for the same model. From the second step on, its selective checkpoints keep only what a
backward pass has asked for.

The source is benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 2 and 3: H100 of 96 GB. The row of table 2 was run
with torch.compile and fp8 products, and is simulated without them. The other rows of table 2 are not simulated. They
divide the sequence, with 32768 tokens on each GPU and the same number of shards, and have peaks of 84.0 to 84.5 GiB.
The rows with tensor parallelism and pipelines are not simulated either, because they were compiled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import published_steps
import torch
from published_steps import LLAMA_3_8B, EverySecondProduct, LlamaConfig, checkpointing_of_torchtitan
from report import Table, save
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from scale_check.simulate import Simulation, simulate
from scale_tools.plan.estimate import estimate_replica
from scale_tools.plan.model import planned_model
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.strategies import Strategy

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A published peak.

    Attributes:
        title: Model, machine and techniques.
        published: GiB that the allocator had reserved on a GPU.
        ranks: The number of GPUs that shard the model.
        local_batch: The number of sequences on a GPU.
        sequence: The number of tokens of a sequence.
        selective: Whether checkpoints keep every second product. Otherwise they keep nothing.
    """

    title: str
    published: float
    ranks: int
    local_batch: int
    sequence: int
    selective: bool = True


ROWS = (
    Row("Llama 3.1 8B, 8 H100, FSDP, selective checkpoints, 2 x 8192 tokens", 82.4, 8, 2, 8192),
    Row("Llama 3.1 8B, 128 H100, FSDP, selective checkpoints, 2 x 8192 tokens", 67.0, 128, 2, 8192),
    Row("Llama 3.1 8B, 8 H100, FSDP, full checkpoints, 32768 tokens", 83.9, 8, 1, 32768, selective=False),
)


@dataclass
class Memory:
    """GiB of a rank: `fsdp2_tensors` is the peak of tensors, and the others are reserved by the allocator."""

    title: str
    published: float
    fsdp2: float
    fsdp2_tensors: float
    scale_fsdp: float


class SavedOperators:
    """The policy of torchtitan for a block, in the form that torch's selective checkpoints take."""

    def __init__(self) -> None:
        self._keeps = EverySecondProduct()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = self._keeps(context, operator)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(SavedOperators())


def simulated_fsdp2(row: Row, config: LlamaConfig) -> Simulation:
    """Runs three steps of torch's FSDP2. The returned simulation has their peaks."""
    with simulate(world_size=row.ranks, device="sim", check=False) as simulation:
        with simulation.aside():
            mesh = init_device_mesh("sim", (row.ranks,))
        with torch.device("meta"):
            model = published_steps.Llama(config)
        wrap = partial(checkpoint_wrapper, preserve_rng_state=False)
        if row.selective:
            wrap = partial(wrap, context_fn=selective_contexts)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for index, layer in enumerate(model.layers):
            model.layers[index] = wrap(layer)
            keeps_last = {"reshard_after_forward": index < len(model.layers) - 1}
            fully_shard(model.layers[index], mesh=mesh, mp_policy=policy, **keeps_last)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device="sim")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            tokens = torch.zeros(row.local_batch, row.sequence + 1, dtype=torch.int64, device="sim")
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return simulation


def planned_bytes(row: Row, config: LlamaConfig) -> int:
    """The bytes that the allocator reserves according to `scale-train plan`."""
    published_steps.set_config(config)
    batch = row.local_batch * row.ranks
    options = PlanOptions(
        factory="published_steps:llama",
        ranks=(row.ranks,),
        device_memory="95GiB",  # Of the H100 that torchtitan used
        batch=batch,
        sequence=row.sequence,
        **published_steps.H100,
    )
    strategy = Strategy("fsdp", row.ranks, checkpoint="selective" if row.selective else "all")
    with checkpointing_of_torchtitan(row.selective):
        reserved_bytes = estimate_replica(planned_model(options), strategy, options).reserved_bytes
    assert reserved_bytes is not None
    return reserved_bytes


def measure(row: Row, config: LlamaConfig) -> Memory:
    fsdp2 = simulated_fsdp2(row, config)
    sizes = (fsdp2.peak_reserved_bytes, fsdp2.peak_bytes, planned_bytes(row, config))
    return Memory(row.title, row.published, *(size / GIB for size in sizes))


def table_of(results: Sequence[Memory]) -> Table:
    def beside(gib: float, published: float) -> str:
        return f"{gib:.1f} ({gib / published - 1:+.1%})"

    lines = [
        [
            result.title,
            f"{result.published:.1f}",
            beside(result.fsdp2, result.published),
            f"{result.fsdp2_tensors:.1f}",
            beside(result.scale_fsdp, result.published),
        ]
        for result in results
    ]
    heads = ["run", "published", "FSDP2, simulated", "its tensors alone", "scale_fsdp, planned"]
    return Table("GiB that the allocator reserves at most (difference to the published)", heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two layers of one row: whether it runs")
    parser.add_argument("--date", help="also writes results/DATE-published_memory.json and .md")
    options = parser.parse_args(arguments)
    rows, config = ROWS, LLAMA_3_8B
    if options.smoke:
        rows, config = ROWS[:1], replace(LLAMA_3_8B, num_layers=2)
    results = []
    for row in rows:
        results.append(measure(row, config))
        print(results[-1], file=sys.stderr, flush=True)
    table = table_of(results)
    print(table.markdown())
    if options.date:
        save("published_memory", options.date, __doc__ or "", [table], [asdict(result) for result in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
