"""`communication=`: sharded training equals one process that rounds what the policy says, to the bit."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fsdp_cases import Net, accumulate, batch, differing_grads, differing_weights
from quantized_reference import QuantizedReference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scale_core.comm.group import group_of
from scale_core.quantization.blocks import BlockFormat
from scale_core.testing import run_ranks
from scale_fsdp import CommunicationPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from scale_fsdp.runtime.unit import units_in

INT8, FP8, INT4 = (BlockFormat(name, 8) for name in ("int8", "float8_e4m3", "int4"))


@dataclass(frozen=True)
class Quantized:
    """One way to train."""

    policy: CommunicationPolicy
    bf16: bool = False
    num_batches: int = 1
    no_sync: bool = False
    checkpointing: str = ""
    replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)


BOTH = CommunicationPolicy(gather=INT8, reduce=INT4)
FEEDBACK = CommunicationPolicy(gather=FP8, reduce=INT4, error_feedback=True)
ON_TWO = [
    Quantized(CommunicationPolicy(gather=INT8)),
    Quantized(CommunicationPolicy(reduce=INT8), bf16=True),
    Quantized(BOTH, bf16=True, checkpointing="inside"),
    Quantized(FEEDBACK, num_batches=2),
    Quantized(FEEDBACK, num_batches=2, no_sync=True, checkpointing="around"),
    Quantized(BOTH, options={"offload_policy": CPUOffloadPolicy(), "reshard_after_forward": False}),
    Quantized(dataclasses.replace(BOTH, include=("1d", "embedding"))),
    Quantized(dataclasses.replace(FEEDBACK, gather=None), options={"flatten_parameters": True}),
]
ON_FOUR = [
    Quantized(FEEDBACK, bf16=True, options={"reshard_after_forward": 2}),
    Quantized(dataclasses.replace(FEEDBACK, node_size=2), bf16=True, num_batches=2, no_sync=True),
    Quantized(dataclasses.replace(BOTH, node_size=2), options={"reshard_after_forward": 2}),
    Quantized(dataclasses.replace(BOTH, node_size=4)),
    Quantized(CommunicationPolicy(replicate=INT4, error_feedback=True), num_batches=2, replicas=2),
    Quantized(CommunicationPolicy(gather=INT8, reduce=INT8, replicate=INT8), bf16=True, replicas=2),
]


def shard(model: nn.Module, case: Quantized) -> nn.Module:
    options = {"communication": case.policy, **case.options}
    if case.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.replicas > 1:
        options["mesh"] = init_device_mesh("cpu", (case.replicas, group_of().size // case.replicas))
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(case: Quantized) -> list[str]:
    """Trains both side by side; returns whatever is not bitwise equal on this rank."""
    group = group_of()
    torch.manual_seed(7)
    plain = Net("gpt")
    model = copy.deepcopy(plain)
    model.checkpointing = case.checkpointing
    for block in model.blocks:
        block.checkpointing = case.checkpointing
    model = shard(model, case)
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    reference = QuantizedReference(plain, model, dtype, torch.float32)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    wrong: list[str] = []
    for step in range(3):
        data = [[batch("gpt", step, rank, m) for m in range(case.num_batches)] for rank in range(group.size)]
        expected = reference.step(data, case.no_sync)[group.rank]
        losses = accumulate(model, data[group.rank], case.no_sync)
        if losses != expected:
            wrong.append(f"losses {losses} instead of {expected}")
        wrong += differing_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wrong += differing_weights(model, plain)
        if wrong:
            return [f"rank {group.rank}, step {step}, {case}: {line}" for line in wrong]
    quantised = any(buffer.wire is not None for unit in units_in(model) for buffer in unit.buffers)
    return [] if quantised else [f"{case}: nothing is quantised"]


def train_all(cases: list[Quantized]) -> list[str]:
    return [line for case in cases for line in train(case)]


@pytest.mark.parametrize(("world", "cases"), [(1, ON_TWO[:3]), (2, ON_TWO), (4, ON_FOUR)])
def test_training_is_bitwise_that_of_one_process_with_rounded_weights_and_gradients(
    world: int, cases: list[Quantized]
) -> None:
    assert not any(run_ranks(train_all, world, cases))
