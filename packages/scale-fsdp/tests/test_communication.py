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
from fsdp_cases import Net, accumulate, batch, differing_grads, differing_weights, loss_of
from quantized_reference import QuantizedReference
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scale_core import ShardedGradScaler
from scale_core.comm import collectives
from scale_core.comm.group import Group, group_of
from scale_core.errors import ContractError
from scale_core.hooks.autograd import register_reduced_grad_hook
from scale_core.quantization.blocks import BlockFormat
from scale_core.simulate import simulate
from scale_core.testing import run_ranks
from scale_fsdp import (
    CommunicationPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StepError,
    describe,
    fully_shard,
    reshard_to,
)
from scale_fsdp.runtime.unit import unit_of, units_in

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
        fully_shard(block, **{**options, "communication": policy})
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
    optimizers = [case.optimizer([p for p in each.parameters() if p.numel()], lr=0.01) for each in (model, plain)]
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
    quantized = any(buffer.wire is not None for unit in units_in(model) for buffer in unit.buffers)
    return [] if quantized else [f"{case}: nothing is quantized"]


def train_all(cases: list[Quantized]) -> list[str]:
    return [line for case in cases for line in train(case)]


@pytest.mark.parametrize(("world", "cases"), [(1, ON_TWO[:3]), (2, ON_TWO), (4, ON_FOUR)])
def test_training_is_bitwise_that_of_one_process_with_rounded_weights_and_gradients(
    world: int, cases: list[Quantized]
) -> None:
    assert not any(run_ranks(train_all, world, cases))


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
            world, numel, wire = buffer.group.size, buffer.layout.shard_numel, buffer.wire
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


def count_bytes(node_size: int, cases: list[Quantized]) -> list[str]:
    wrong = []
    for case in cases:
        model = shard(Net("gpt"), case)
        expected = by_formula(model, node_size)
        with pytest.MonkeyPatch.context() as patch:
            sent = Sent(node_size)
            patch.setattr(collectives, "post_messages", sent)
            accumulate(model, [batch("gpt", 0)], False)
        if (sent.inside, sent.between) != expected:
            wrong.append(f"{case}: {(sent.inside, sent.between)} bytes instead of {expected}")
    return wrong


def test_bytes_on_gloo_are_those_of_the_formula_and_a_part_keeps_the_backward_inside_of_a_node() -> None:
    half = {"reshard_after_forward": 2}
    cases = [
        Quantized(CommunicationPolicy()),
        Quantized(CommunicationPolicy(gather="int8", reduce="int4"), bf16=True),
        Quantized(CommunicationPolicy(gather="int8", reduce="int4", node_size=2), bf16=True),
        Quantized(CommunicationPolicy(gather="float8_e4m3"), options=half),
        Quantized(CommunicationPolicy(gather="int8", reduce="int8", node_size=2), options=half),
    ]
    assert not any(run_ranks(count_bytes, 4, 2, cases))


@pytest.mark.simulation
@pytest.mark.parametrize(("world", "node_size"), [(64, None), (512, 8)])
def test_the_simulation_counts_the_same(world: int, node_size: int | None) -> None:
    policy = CommunicationPolicy(gather="int8", reduce="int4", node_size=node_size)
    with simulate(rank=0, world_size=world) as simulation:
        model = shard(Net("gpt", blocks=1), Quantized(policy, bf16=True))
        simulation.restart()
        loss_of(model(batch("gpt", 0))).backward()
        assert sum(simulation.bytes_sent.values()) == sum(by_formula(model, node_size or 1))


def reshard_quantized() -> list[str]:
    """A part stays in the node from the second step on (hpZ), with and without `node_size`; what is wrong after it."""
    rank, wrong = group_of().rank, []
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
                if accumulate(model, data[rank], False) != expected:
                    wrong.append(f"node_size={node_size}, step {step}: another loss")
            if (sent.inside, sent.between) != by_formula(model, 2):
                wrong.append(f"node_size={node_size}, step {step}: {(sent.inside, sent.between)} bytes")
            wrong += differing_grads(model, plain)
            model.zero_grad()
    with pytest.raises(RuntimeError, match="3 ranks do not divide into nodes of 2"):
        reshard_to(model, three, reshard_after_forward=True)
    reshard_to(model, two, reshard_after_forward=True)
    if rank < 2:  # One node, in which nothing is rounded.
        loss = loss_of(model(batch("gpt", 5)))
        if loss.item() != loss_of(plain(batch("gpt", 5))).item():
            wrong.append("in one node something is rounded")
        loss.backward()
    return wrong


def test_a_model_is_resharded_to_keep_a_part_in_the_node_and_to_other_ranks() -> None:
    assert not any(run_ranks(reshard_quantized, 4))


def fail_in_the_backward(case: Quantized) -> list[str]:
    """One rank fails in each step: all give the pass up, and the errors that wait are as they were."""
    rank = group_of().rank
    torch.manual_seed(7)
    plain = Net("gpt")
    model = shard(copy.deepcopy(plain), case)
    reference = QuantizedReference(plain, model, torch.float32, torch.float32)
    wrong = []
    for step in range(3):
        data = [[batch("gpt", step, each)] for each in range(4)]

        def broken(*_: object) -> None:
            raise ValueError("broken")

        handle = model.blocks[0].register_full_backward_pre_hook(broken) if rank == 1 else None
        with pytest.raises((ValueError, StepError)):
            accumulate(model, data[rank], False)
        if handle is not None:
            handle.remove()
        reference.step(data, False)
        accumulate(model, data[rank], False)
        wrong += differing_grads(model, plain)
        model.zero_grad()
    copied = copy.deepcopy(model)
    errors = [feedback.error for each in copied.modules() for feedback in _feedback(each)]
    kept = [feedback.error for each in model.modules() for feedback in _feedback(each)]
    if any(error is not None for error in errors) or not any(error is not None for error in kept):
        wrong.append("a copy has the errors of its original, or the original has none")
    accumulate(copied, [batch("gpt", 9)], False)
    return wrong


def fail_beside_hooks(case: Quantized) -> list[str]:
    """As above, where reduced gradients are asked for during the backward."""
    seen = 0

    def count(params: Any, grads: Any) -> None:
        nonlocal seen
        seen += len(params)

    handle = register_reduced_grad_hook(count)
    try:
        return fail_in_the_backward(case) + ([] if seen else ["nobody was told of a gradient"])
    finally:
        handle.remove()


def _feedback(module: nn.Module) -> list[Any]:
    unit = unit_of(module)
    buffers = () if unit is None else unit.buffers
    return [feedback for buffer in buffers for feedback in buffer.error_feedback]


def test_a_pass_that_is_aborted_leaves_the_error_that_waits_as_it_was() -> None:
    limit = {"limit_seconds": 20.0}
    nodes = Quantized(dataclasses.replace(FEEDBACK, node_size=2), options=limit)
    assert not any(run_ranks(fail_in_the_backward, 4, nodes))
    copies = Quantized(CommunicationPolicy(replicate=INT4, error_feedback=True), replicas=2, options=limit)
    assert not any(run_ranks(fail_beside_hooks, 4, copies))


@pytest.mark.simulation
def test_norms_biases_and_embeddings_are_sent_as_they_are_and_the_description_says_what_is_not() -> None:
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


class Untrained(nn.Module):
    """A matrix of integers, and two modules that share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_integers_are_never_rounded_and_a_tied_embedding_only_where_it_is_asked_for() -> None:
    policy = CommunicationPolicy(gather="int8", include=("1d",))
    both = fully_shard(Untrained(), communication=policy)
    assert all(buffer.wire is None for unit in units_in(both) for buffer in unit.buffers)
    model = Untrained()
    fully_shard(model.head, communication=policy)
    with pytest.raises(ValueError, match=r"'embed.weight' is an embedding that is tied to 'weight'.*include="):
        fully_shard(model, communication=policy)
    assert type(model) is Untrained and type(model.embed.weight) is nn.Parameter
    model = Untrained()
    fully_shard(model.head, communication=dataclasses.replace(policy, include=("embedding",)))
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
def test_what_the_ranks_or_dtypes_do_not_allow_is_refused_before_anything_is_changed() -> None:
    with simulate(rank=0, world_size=4, fake=False):
        mesh = init_device_mesh("cpu", (2, 2))
        refused: list[tuple[dict[str, Any], str]] = [
            ({"communication": "int8"}, "write communication=CommunicationPolicy"),
            ({"communication": CommunicationPolicy(replicate="int8")}, "no two of its ranks are replicas"),
            ({"communication": CommunicationPolicy(gather="int8", node_size=3)}, "take one of 1, 2, 4"),
            ({"communication": CommunicationPolicy(gather="int8", node_size=2), "mesh": mesh}, "leave node_size out"),
        ]
        for options, text in refused:
            model = nn.Linear(4, 4)
            with pytest.raises((TypeError, ValueError), match=text):
                fully_shard(model, **options)
            assert type(model) is nn.Linear and not model._forward_pre_hooks


def train_scaled(case: Quantized) -> list[str]:
    """Six fp16 steps of a scaler whose scale grows after two, the fourth with an infinite loss on the last rank."""
    group = group_of()
    torch.manual_seed(7)
    plain = Net("gpt")
    model = shard(copy.deepcopy(plain), case)
    reference = QuantizedReference(plain, model, torch.float16, torch.float32)
    scaler = ShardedGradScaler(init_scale=64.0, growth_interval=2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    wrong, scales = [], []
    for step in range(6):
        factors = {group.size - 1: torch.inf} if step == 3 else {}
        scales.append(scaler.get_scale())
        reference.scale, errors = scales[-1], dict(reference.errors)
        data = [[batch("gpt", step, rank)] for rank in range(group.size)]
        reference.step(data, False, factors)
        loss = loss_of(model(data[group.rank][0]))
        scaler.scale(loss * factors.get(group.rank, 1.0)).backward()
        if factors:
            reference.errors = errors  # The step is skipped: what has waited for it waits for the next one.
        else:
            wrong += differing_grads(model, plain)
            for param in plain.parameters():
                param.grad /= reference.scale
            optimizers[1].step()
        scaler.step(optimizers[0])
        scaler.update()
        model.zero_grad()
        wrong += differing_weights(model, plain)
    if scales != [64.0, 64.0, 128.0, 128.0, 64.0, 64.0]:
        wrong.append(f"the scales were {scales}")
    return [f"rank {group.rank}, {case}: {line}" for line in wrong]


def train_all_scaled(cases: list[Quantized]) -> list[str]:
    return [line for case in cases for line in train_scaled(case)]


FP16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)}


def test_beside_a_gradient_scaler_errors_keep_their_unit_and_a_skipped_step_takes_no_part_of_them() -> None:
    copies = CommunicationPolicy(replicate=INT4, error_feedback=True)
    nodes = dataclasses.replace(FEEDBACK, node_size=2)
    cases = [Quantized(policy, options=FP16) for policy in (FEEDBACK, nodes)]
    cases.append(Quantized(copies, replicas=2, options=FP16))
    assert not any(run_ranks(train_all_scaled, 4, cases))


def scale_otherwise() -> list[str]:
    """Losses that another scaler has scaled, or none, before a step of this one; what is told of each."""
    model = fully_shard(nn.Linear(8, 8), communication=CommunicationPolicy(reduce="int8", error_feedback=True))
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), []
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
        told.append(str(caught.value))
        assert all(map(torch.equal, before, model.parameters()))
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
    return told


def test_a_scaler_refuses_errors_in_another_unit_than_its_own() -> None:
    assert all("'weight'" in text for told in run_ranks(scale_otherwise, 2) for text in told)


def differ_on_one_rank() -> list[str]:
    """Each of these is told by `fully_shard` itself, or by whoever gives memory to the shards."""
    first, told = group_of().rank == 0, []
    formats = {"communication": CommunicationPolicy(gather="float8_e4m3" if first else "int8")}
    nodes = {"communication": CommunicationPolicy(gather="int8", node_size=2 if first else 1)}
    none = {"communication": CommunicationPolicy(gather="int8", node_size=2 if first else None)}
    parts = {"reshard_after_forward": 1 if first else 2}
    for options in (formats, nodes, none, parts):
        with pytest.raises(ContractError) as caught:
            fully_shard(nn.Linear(8, 8), limit_seconds=10.0, **options)
        told.append(str(caught.value))
    for options in (nodes, parts):
        with pytest.raises(ContractError) as caught:
            fully_shard(nn.Linear(8, 8), limit_seconds=10.0, sync_module_states=False, **options)
        told.append(str(caught.value))
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    fully_shard(model, init=False, limit_seconds=10.0, **nodes)
    with pytest.raises(ContractError) as caught:
        model.to_empty(device="cpu")
    return [*told, str(caught.value)]


def test_ranks_that_say_otherwise_are_told_before_a_group_is_made() -> None:
    named = ["float8_e4m3", "node_size=1", "node_size=None", "reshard_after_forward=1"]
    for told in run_ranks(differ_on_one_rank, 2):
        for text, expected in zip(told, [*named, named[1], named[3], named[1]], strict=True):
            assert expected in text


def unshard_without_memory() -> list[str]:
    """Rank 0 can't quantize what it sends when a layer is unsharded by hand: outside a pass, and inside of one."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, communication=CommunicationPolicy(gather="int8"), limit_seconds=10.0)
    fully_shard(model, limit_seconds=10.0)
    first, told = model[0], []

    def unshard(*, fails: bool) -> None:
        broken = mock.patch("scale_core.quantization.collectives.quantize", side_effect=MemoryError("no memory"))
        with broken if fails and group_of().rank == 0 else nullcontext():
            handle = first.unshard(async_op=True)
        handle.wait()

    model(torch.ones(1, 16))
    with pytest.raises((MemoryError, StepError)) as raised:
        unshard(fails=True)
    told.append(f"{type(raised.value).__name__}: {raised.value}")
    assert not unit_of(first).gathered and not unit_of(first).kept_unsharded
    unshard(fails=False)
    assert torch.allclose(first.weight, plain[0].weight, atol=0.01)
    first.reshard()
    handle = model.register_forward_pre_hook(lambda *_: unshard(fails=True))
    with pytest.raises((MemoryError, StepError)) as raised:
        model.eval()(torch.ones(1, 16))  # Of a kind that has not run yet, so that nothing is prefetched.
    told.append(f"{type(raised.value).__name__}: {raised.value}")
    handle.remove()
    model(torch.ones(1, 16)).sum().backward()
    assert torch.allclose(model(torch.ones(1, 16)), plain(torch.ones(1, 16)), atol=0.1)
    return told


def test_a_rank_that_cannot_quantize_what_is_unsharded_by_hand_raises_on_all_ranks() -> None:
    first, second = run_ranks(unshard_without_memory, 2)
    assert all("MemoryError: no memory" in text for text in first)
    assert all(text.startswith("StepError: ") and "MemoryError: no memory (on rank 0)" in text for text in second)
