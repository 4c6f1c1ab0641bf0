"""`communication=`: sharded training equals one process that rounds what the policy says, to the bit."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Net, accumulate, batch, loss_of
from fsdp_parity import assert_same_grads
from quantized_reference import QuantizedReference
from shard_arguments import shard_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scale_check.exact import assert_equal
from scale_check.simulate import simulate
from scale_core import ShardedGradScaler, StepError
from scale_core.comm import all_to_all, collectives
from scale_core.comm.group import Group, group_of
from scale_core.errors import ContractError
from scale_core.hooks.gradients import register_reduced_grad_hook
from scale_fsdp import (
    CommunicationPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardOptions,
    describe,
    fully_shard,
    reshard_to,
)
from scale_fsdp.runtime.unit import unit_of, units_in
from scale_fsdp.transports.blocks import BlockFormat
from scale_fsdp.transports.policy import wire_formats

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
    per_block: tuple[CommunicationPolicy | None, ...] = ()  # Each block has its own.
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW


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
    Quantized(BOTH, per_block=(CommunicationPolicy(gather=FP8), None, dataclasses.replace(FEEDBACK, gather=None))),
    # It needs whole tensors, and each rank has some of them as they are.
    Quantized(BOTH, options={"atom": "parameter"}, optimizer=torch.optim.NAdam),
]
ON_FOUR = [
    Quantized(FEEDBACK, bf16=True, options={"reshard_after_forward": 2}),
    Quantized(dataclasses.replace(FEEDBACK, node_size=2), bf16=True, num_batches=2, no_sync=True),
    Quantized(dataclasses.replace(BOTH, node_size=2), options={"reshard_after_forward": 2}),
    Quantized(dataclasses.replace(BOTH, node_size=8)),
    Quantized(CommunicationPolicy(replicate=INT4, error_feedback=True), num_batches=2, replicas=2),
    Quantized(CommunicationPolicy(gather=INT8, reduce=INT8, replicate=INT8), bf16=True, replicas=2),
]


def shard(model: nn.Module, case: Quantized) -> nn.Module:
    options = {"communication": case.policy, **case.options}
    if case.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.replicas > 1:
        options["mesh"] = init_device_mesh("cpu", (case.replicas, group_of().size // case.replicas))
    policies = case.per_block or [case.policy] * len(model.blocks)
    for block, policy in zip(model.blocks, policies, strict=True):
        fully_shard(block, **shard_arguments(**{**options, "communication": policy}))
    return fully_shard(model, **shard_arguments(**options))


@pytest.mark.ranks(1, 2, 4)
def test_training_is_that_of_one_process_that_rounds_alike() -> None:
    group = group_of()
    for case in {1: ON_TWO[:3], 2: ON_TWO, 4: ON_FOUR}[group.size]:
        torch.manual_seed(7)
        plain = Net("gpt")
        model = copy.deepcopy(plain)
        for each in (model, *model.blocks):
            each.checkpointing = case.checkpointing
        model = shard(model, case)
        dtype = torch.bfloat16 if case.bf16 else torch.float32
        reference = QuantizedReference(plain, model, dtype, torch.float32)
        optimizers = [case.optimizer([p for p in each.parameters() if p.numel()], lr=0.01) for each in (model, plain)]
        for step in range(3):
            data = [[batch("gpt", step, rank, m) for m in range(case.num_batches)] for rank in range(group.size)]
            expected = reference.step(data, case.no_sync)[group.rank]
            losses = accumulate(model, data[group.rank], case.no_sync)
            assert losses == expected, f"losses {losses} instead of {expected}"
            assert_same_grads(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(model, plain)
        quantized = any(wire_formats(buffer) is not None for unit in units_in(model) for buffer in unit.buffers)
        assert quantized, f"{case}: nothing is quantized"


class Sent:
    """Counts what this rank sends for units, by whether it stays in a node of `node_size` ranks."""

    def __init__(self, node_size: int) -> None:
        self.node, self.node_size = group_of().rank // node_size, node_size
        self.inside = self.between = 0
        self._post = collectives.post_messages

    def __call__(self, group: Group, targets: Any, sources: dict[int, Tensor], tag: int) -> Any:
        for peer, part in sources.items() if tag >= collectives.UNIT_TAGS.start else ():
            if group.ranks[peer] // self.node_size == self.node:
                self.inside += part.nbytes
            else:
                self.between += part.nbytes
        return self._post(group, targets, sources, tag)


def by_formula(model: nn.Module, node_size: int) -> tuple[int, int]:
    """Bytes that stay in a node, and those that leave it, of a step in which all but the root is gathered twice."""
    inside = between = 0
    for unit in units_in(model):
        for buffer in unit.buffers:
            world, numel, wire = buffer.group.size, buffer.layout.shard_numel, wire_formats(buffer)
            formats = (None, None) if wire is None else (wire.gather, wire.reduce)
            times = 1 if unit.module is model and not unit.reshards_entry else 2
            if times == 2 and buffer.groups.part is not None:  # The second time among the neighbors.
                times = 1
                inside += (node_size - 1) * world // node_size * numel * buffer.compute_dtype.itemsize
            for count, block_format, dtype in zip(
                (times, 1), formats, (buffer.compute_dtype, buffer.reduce_dtype), strict=True
            ):
                one = numel * dtype.itemsize if block_format is None else block_format.num_bytes(numel)
                if block_format is None or buffer.groups.nodes is None:
                    inside += count * (node_size - 1) * one
                    between += count * (world - node_size) * one
                else:
                    num_nodes = world // node_size
                    inside += count * (node_size - 1) * num_nodes * numel * dtype.itemsize
                    between += count * (num_nodes - 1) * one
    return inside, between


@pytest.mark.ranks(4)
def test_bytes_on_gloo_are_those_of_the_formula() -> None:
    half = {"reshard_after_forward": 2}
    cases = [
        Quantized(CommunicationPolicy()),
        Quantized(CommunicationPolicy(gather="int8", reduce="int4"), bf16=True),
        Quantized(CommunicationPolicy(gather="int8", reduce="int4", node_size=2), bf16=True),
        Quantized(CommunicationPolicy(gather="float8_e4m3"), options=half),
        Quantized(CommunicationPolicy(gather="int8", reduce="int8", node_size=2), options=half),
    ]
    node_size = 2
    for case in cases:
        model = shard(Net("gpt"), case)
        expected = by_formula(model, node_size)
        with pytest.MonkeyPatch.context() as patch:
            sent = Sent(node_size)
            patch.setattr(collectives, "post_messages", sent)
            patch.setattr(all_to_all, "post_messages", sent)
            accumulate(model, [batch("gpt", 0)], False)
        assert (sent.inside, sent.between) == expected


@pytest.mark.simulation
@pytest.mark.parametrize(("world", "node_size"), [(64, None), (512, 8)])
def test_the_simulation_counts_the_same(world: int, node_size: int | None) -> None:
    policy = CommunicationPolicy(gather="int8", reduce="int4", node_size=node_size)
    with simulate(rank=0, world_size=world) as simulation:
        model = shard(Net("gpt", blocks=1), Quantized(policy, bf16=True))
        simulation.restart()
        loss_of(model(batch("gpt", 0))).backward()
        assert sum(simulation.bytes_sent.values()) == sum(by_formula(model, node_size or 1))


@pytest.mark.ranks(4)
def test_a_quantized_model_is_resharded() -> None:
    """A part stays in the node from the second step on (hpZ), with and without `node_size`."""
    rank = group_of().rank
    three, two = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    for node_size in (None, 2):
        torch.manual_seed(7)
        plain, case = Net("gpt"), Quantized(dataclasses.replace(FEEDBACK, node_size=node_size))
        model = shard(copy.deepcopy(plain), case)
        reference = QuantizedReference(plain, model, torch.float32, torch.float32)
        for step in range(3):
            if step == 1:
                reshard_to(model, reshard_after_forward=2)
            data, sent = [[batch("gpt", step, each)] for each in range(4)], Sent(2)
            expected = reference.step(data, False)[rank]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(collectives, "post_messages", sent)
                patch.setattr(all_to_all, "post_messages", sent)
                assert accumulate(model, data[rank], False) == expected
            assert (sent.inside, sent.between) == by_formula(model, 2)
            assert_same_grads(model, plain)
            model.zero_grad()
    with pytest.raises(RuntimeError, match="3 ranks do not divide into nodes of 2"):
        reshard_to(model, three, reshard_after_forward=True)
    reshard_to(model, two, reshard_after_forward=True)
    if rank < 2:  # One node, in which nothing is rounded.
        loss = loss_of(model(batch("gpt", 5)))
        assert loss.item() == loss_of(plain(batch("gpt", 5))).item(), "in one node something is rounded"
        loss.backward()


@pytest.mark.parametrize(
    "case",
    [
        Quantized(dataclasses.replace(FEEDBACK, node_size=2), options={"limit_seconds": 20.0}),
        Quantized(
            CommunicationPolicy(replicate=INT4, error_feedback=True), replicas=2, options={"limit_seconds": 20.0}
        ),
    ],
)
@pytest.mark.ranks(4, in_turn=True)
def test_an_aborted_pass_leaves_error_feedback_as_it_was(case: Quantized) -> None:
    rank = group_of().rank
    torch.manual_seed(7)
    plain = Net("gpt")
    model = shard(copy.deepcopy(plain), case)
    reference = QuantizedReference(plain, model, torch.float32, torch.float32)
    reduced: list[Tensor] = []
    # Replicas also try it with a hook, to which gradients are given during the backward.
    handle = register_reduced_grad_hook(lambda params, grads: reduced.extend(params)) if case.replicas > 1 else None

    def broken(*_: object) -> None:
        raise ValueError("broken")

    try:
        for step in range(3):
            data = [[batch("gpt", step, each)] for each in range(4)]
            breaking = model.blocks[0].register_full_backward_pre_hook(broken) if rank == 1 else nullcontext()
            with pytest.raises((ValueError, StepError)), breaking:
                accumulate(model, data[rank], False)
            reference.step(data, False)
            accumulate(model, data[rank], False)
            assert_same_grads(model, plain)
            model.zero_grad()
        copied = copy.deepcopy(model)
        assert not any(feedback.error is not None for feedback in _feedback(copied))
        assert any(feedback.error is not None for feedback in _feedback(model))
        accumulate(copied, [batch("gpt", 9)], False)
        assert bool(reduced) == (handle is not None)
    finally:
        if handle is not None:
            handle.remove()


def _feedback(model: nn.Module) -> list[Any]:
    units = filter(None, map(unit_of, model.modules()))
    return [feedback for unit in units for buffer in unit.buffers for feedback in buffer.error_feedback]


@pytest.mark.simulation
def test_norms_biases_and_embeddings_are_not_quantized() -> None:
    with simulate(rank=0, world_size=4, fake=False):
        model = shard(Net("gpt"), Quantized(CommunicationPolicy(gather="int8", reduce="int4")))
        found = describe(model)
        named = {
            name: buffer.wire is not None for unit in found.units for buffer in unit.buffers for name in buffer.names
        }
        assert {name for name, quantized in named.items() if quantized} == {
            f"blocks.{block}.{layer}.weight" for block in range(3) for layer in ("qkv", "up", "down")
        }
        assert str(found).count("gathered in int8, reduced in int4") == 3
        policy = CommunicationPolicy(gather="int8", include=("1d", "embedding"))
        named_too = describe(shard(Net("gpt"), Quantized(policy))).units
        assert all(buffer.wire is not None for unit in named_too for buffer in unit.buffers)


def test_integers_and_tied_embeddings_are_not_quantized() -> None:
    class Untrained(nn.Module):
        """A matrix of integers, and two modules that share a matrix."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    policy = CommunicationPolicy(gather="int8", include=("1d",))
    both = fully_shard(Untrained(), options=ShardOptions(communication=policy))
    assert all(wire_formats(buffer) is None for unit in units_in(both) for buffer in unit.buffers)
    model = Untrained()
    fully_shard(model.head, options=ShardOptions(communication=policy))
    with pytest.raises(ValueError, match=r"'embed.weight' is an embedding that is tied to 'weight'.*include="):
        fully_shard(model, options=ShardOptions(communication=policy))
    assert type(model) is Untrained and type(model.embed.weight) is nn.Parameter
    model = Untrained()
    fully_shard(model.head, options=ShardOptions(communication=dataclasses.replace(policy, include=("embedding",))))
    fully_shard(model)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"gather": "int9"}, "gather: expected a format of 'int8', 'float8_e4m3', 'int4', got 'int9'; did you mean"),
        ({"reduce": torch.int8}, "reduce: expected a format's name, a BlockFormat or None"),
        ({"gather": "int4"}, "gather='int4': parameters in 4 bits .* write gather='int8'"),
        ({"reduce": "int8", "error_feedback": 1}, "error_feedback: expected True or False, got 1"),
        ({"gather": "int8", "error_feedback": True}, "no gradient is quantized"),
        ({"replicate": "int8", "node_size": 2}, "neither parameters nor gradients are quantized between nodes"),
        ({"gather": "int8", "node_size": 0}, "node_size: expected the number of ranks of a node"),
        ({"gather": "int8", "include": "1d"}, "include: expected a collection of names"),
        ({"gather": "int8", "include": ("norm",)}, "include: expected some of '1d', 'embedding', got 'norm'"),
    ],
)
def test_a_policy_that_says_nothing_or_too_much_is_refused(given: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        CommunicationPolicy(**given)


@pytest.mark.simulation
def test_a_policy_that_does_not_fit_the_ranks_is_refused() -> None:
    with simulate(rank=0, world_size=4, fake=False):
        mesh = init_device_mesh("cpu", (2, 2))
        refused: list[tuple[dict[str, Any], str]] = [
            ({"communication": "int8"}, r"write options=ShardOptions\(communication=CommunicationPolicy"),
            ({"communication": CommunicationPolicy(replicate="int8")}, "no two of its ranks are replicas"),
            ({"communication": CommunicationPolicy(gather="int8", node_size=3)}, "take one of 1, 2, 4"),
            ({"communication": CommunicationPolicy(gather="int8", node_size=2), "mesh": mesh}, "leave node_size out"),
        ]
        for options, text in refused:
            model = nn.Linear(4, 4)
            with pytest.raises((TypeError, ValueError), match=text):
                fully_shard(model, **shard_arguments(**options))
            assert type(model) is nn.Linear and not model._forward_pre_hooks


@pytest.mark.ranks(4)
def test_error_feedback_follows_a_gradient_scaler() -> None:
    """Six steps of a scaler whose scale grows after two, the fourth with an infinite loss on the last rank."""
    group = group_of()
    fp16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)}
    replicas = CommunicationPolicy(replicate=INT4, error_feedback=True)
    nodes = dataclasses.replace(FEEDBACK, node_size=2)
    for policy in (FEEDBACK, nodes, replicas):
        torch.manual_seed(7)
        plain = Net("gpt")
        model = shard(copy.deepcopy(plain), Quantized(policy, replicas=2 if policy is replicas else 1, options=fp16))
        reference = QuantizedReference(plain, model, torch.float16, torch.float32)
        scaler = ShardedGradScaler(init_scale=64.0, growth_interval=2)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
        for step, scale in enumerate([64.0, 64.0, 128.0, 128.0, 64.0, 64.0]):
            factors = {group.size - 1: torch.inf} if step == 3 else {}
            assert scaler.get_scale() == scale
            reference.scale, errors = scale, dict(reference.errors)
            data = [[batch("gpt", step, rank)] for rank in range(group.size)]
            reference.step(data, False, factors)
            loss = loss_of(model(data[group.rank][0]))
            scaler.scale(loss * factors.get(group.rank, 1.0)).backward()
            if factors:
                reference.errors = errors  # The step is skipped: its errors wait for the next one.
            else:
                assert_same_grads(model, plain)
                for param in plain.parameters():
                    param.grad /= reference.scale
                optimizers[1].step()
            scaler.step(optimizers[0])
            scaler.update()
            model.zero_grad()
            assert_equal(model, plain)


@pytest.mark.ranks(2)
def test_a_scaler_refuses_errors_in_another_unit_than_its_own() -> None:
    model = fully_shard(
        nn.Linear(8, 8), options=ShardOptions(communication=CommunicationPolicy(reduce="int8", error_feedback=True))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for other in (ShardedGradScaler(init_scale=4.0), ShardedGradScaler(enabled=False)):
        scaler = ShardedGradScaler(init_scale=2.0)
        scaled = other.scale(model(torch.ones(1, 8)).sum())
        if other.is_enabled():
            scaler.scale(torch.ones(()))
            other.scale(torch.ones(()))
        scaled.backward()
        before = [param.clone() for param in model.parameters()]
        with pytest.raises(ValueError, match="was not scaled by this scaler on this rank") as caught:
            scaler.step(optimizer)
        assert "'weight'" in str(caught.value)
        assert_equal([*model.parameters()], before)
        if other.is_enabled():
            other.step(optimizer)
            other.update()
        else:
            other.step(optimizer)
        model.zero_grad()
    scaler = ShardedGradScaler(init_scale=2.0)
    loss = model(torch.ones(1, 8)).sum()
    (scaler.scale(loss) if dist.get_rank() == 0 else loss).backward()
    with pytest.raises(ValueError, match="was not scaled by this scaler") as caught:  # On all ranks.
        scaler.step(optimizer)
    assert ("on another rank" in str(caught.value)) == (dist.get_rank() == 0)
    scaler.update()


def _policy(**options: Any) -> dict[str, Any]:
    return {"communication": CommunicationPolicy(**options)}


@pytest.mark.parametrize(
    "by_rank, text, also_unsynced",
    [
        ([_policy(gather="float8_e4m3"), _policy(gather="int8")], "float8_e4m3", False),
        ([_policy(gather="int8", node_size=size) for size in (2, 1)], "node_size=1", True),
        ([_policy(gather="int8", node_size=size) for size in (2, None)], "node_size=None", False),
        ([{"reshard_after_forward": 1}, {"reshard_after_forward": 2}], "reshard_after_forward=1", True),
    ],
)
@pytest.mark.ranks(2, in_turn=True)
def test_ranks_with_different_policies_are_refused_early(by_rank: Any, text: str, also_unsynced: bool) -> None:
    for options in ({}, {"sync_module_states": False}) if also_unsynced else ({},):
        with pytest.raises(ContractError, match=text):
            fully_shard(nn.Linear(8, 8), **shard_arguments(limit_seconds=10.0, **options, **by_rank[group_of().rank]))


@pytest.mark.ranks(2)
def test_different_policies_are_refused_when_memory_is_given() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    node_size = 2 if group_of().rank == 0 else 1
    fully_shard(model, **shard_arguments(init=False, limit_seconds=10.0, **_policy(gather="int8", node_size=node_size)))
    with pytest.raises(ContractError, match="node_size=1"):
        model.to_empty(device="cpu")


@pytest.mark.ranks(2)
def test_a_failed_quantization_in_unshard_raises_on_all_ranks() -> None:
    """Rank 0 can't quantize what it sends when a layer is unsharded by hand: outside a pass, and inside of one."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, options=ShardOptions(communication=CommunicationPolicy(gather="int8"), limit_seconds=10.0))
    fully_shard(model, options=ShardOptions(limit_seconds=10.0))
    first, is_first = model[0], group_of().rank == 0
    error, text = (MemoryError, "^no memory") if is_first else (StepError, r"MemoryError: no memory \(on rank 0\)")

    def unshard(*, fails: bool) -> None:
        no_memory = MemoryError("no memory")
        broken = mock.patch("scale_fsdp.transports.quantized_collectives.quantize", side_effect=no_memory)
        with broken if fails and is_first else nullcontext():
            handle = first.unshard(async_op=True)
        handle.wait()

    model(torch.ones(1, 16))
    with pytest.raises(error, match=text):
        unshard(fails=True)
    assert not unit_of(first).gathered and not unit_of(first).kept_unsharded
    unshard(fails=False)
    assert torch.allclose(first.weight, plain[0].weight, atol=0.01)
    first.reshard()
    handle = model.register_forward_pre_hook(lambda *_: unshard(fails=True))
    with pytest.raises(error, match=text):
        model.eval()(torch.ones(1, 16))  # Of a kind that has not run yet, so that nothing is prefetched.
    handle.remove()
    model(torch.ones(1, 16)).sum().backward()
    assert torch.allclose(model(torch.ones(1, 16)), plain(torch.ones(1, 16)), atol=0.1)
