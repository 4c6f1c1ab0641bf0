"""transports: flat buffers whose messages are not plain, gathered by hand."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_core.device.streams import Stream
from scale_core.flat.buffer import FlatBuffer, PlainTransport, State
from scale_core.flat.config import DevicePolicy
from scale_core.flat.host_staged import HostStagedTransport
from scale_core.flat.layout import FlatLayout
from scale_core.shard import on_local_tensors
from scale_fsdp import CommunicationPolicy, ShardOptions, fully_shard
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.transports import float8
from scale_fsdp.transports.blocks import BlockFormat
from scale_fsdp.transports.float8 import Float8Transport
from scale_fsdp.transports.hierarchical import HierarchicalTransport
from scale_fsdp.transports.policy import WirePolicy
from scale_fsdp.transports.quantized import QuantizedTransport, WireFormats

CHOICES = {
    "plain": (None, PlainTransport),
    "between all ranks": (CommunicationPolicy(gather="int8"), QuantizedTransport),
    "between nodes": (CommunicationPolicy(gather="int8", node_size=2), HierarchicalTransport),
    "one node": (CommunicationPolicy(gather="int8", reduce="int4", node_size=4), QuantizedTransport),
}


@pytest.mark.simulation
@pytest.mark.parametrize("choice", CHOICES)
def test_a_buffer_and_its_copies_have_the_policys_transport(choice: str) -> None:
    policy, kind = CHOICES[choice]
    with simulate(rank=0, world_size=4, fake=False):
        model = fully_shard(nn.Linear(16, 16, bias=False), options=ShardOptions(communication=policy))
        for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            ((buffer,),) = (unit.buffers for unit in units_in(copied))
            assert type(buffer.transport) is buffer.reduction.transport.__class__ is kind
            is_quantized = kind is not PlainTransport and choice != "one node"
            assert buffer.transport.traits.gathers_messages == is_quantized


class ScaledWeight:
    """In the place of `Float8Weight`, without torchao; has no memory for its scale while it `fails`."""

    dtype = torch.float8_e4m3fn
    fails = False

    def scale(self, amax: Tensor) -> Tensor:
        if self.fails:
            raise MemoryError("no memory for a scale")
        return 448.0 / amax.clamp(min=1e-12)

    def cast(self, values: Tensor, scale: Tensor, out: Tensor) -> None:
        out.copy_(self.rounded(values, scale).view(torch.uint8))

    def rounded(self, values: Tensor, scale: Tensor) -> Tensor:
        return (values * scale).clamp(-448, 448).to(self.dtype)


def scale_of(buffer: FlatBuffer) -> Tensor:
    """The factor of the one weight that was gathered in fp8."""
    assert isinstance(buffer.transport, Float8Transport)
    return buffer.transport.scales[0]


@pytest.mark.ranks(2)
@on_local_tensors
def test_fp8_scales_are_of_what_all_ranks_send_and_block_nobody() -> None:
    """Rank 1 has no element of the weight: only rank 0 writes to its shard, and with `data` that counts no version."""
    group, weight, whole = group_of(), ScaledWeight(), torch.tensor([1.5])
    layout = FlatLayout.plan(["weight"], [(1,)], group.size)
    buffer = FlatBuffer(["weight"], [whole], layout, group, transport_policy=WirePolicy(float8=[weight]))
    param, wrong = buffer.sharded_params[0], []
    assert param.numel() == (group.rank == 0)

    def compare(when: str) -> None:
        buffer.gather(tag=1 << 21)
        buffer.wait_gathered(10.0)
        expected = weight.rounded(whole, 448.0 / whole.abs())
        if not torch.equal(buffer.full[:1].float(), expected.float()) or scale_of(buffer) != 448.0 / whole:
            wrong.append(f"{when}: {buffer.full[:1]} of scale {scale_of(buffer)} in place of {expected}")
        buffer.release(keep_part=True)

    compare("at first")
    with torch.no_grad():
        if param.numel():
            param.add_(3.0)
    whole += 3.0
    compare("after a step")
    param.data.mul_(10.0)
    whole *= 10.0
    compare("after a write through data")
    buffer.gather(tag=1 << 21)
    weight.fails = group.rank == 1
    if weight.fails:
        with pytest.raises(MemoryError, match="no memory for a scale"):
            buffer.wait_gathered(10.0)
        assert buffer.state is State.SHARDED
        weight.fails = False
    else:
        buffer.wait_gathered(10.0)
        buffer.release()
    compare("after one that failed on rank 1")
    assert not wrong


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_copied_shard_may_be_written_to_while_it_is_gathered(kind: str) -> None:
    """Rank 0 writes to its shard before rank 1 begins."""
    group, weight = group_of(), ScaledWeight()
    layout = FlatLayout.plan(["weight"], [(2,)], group.size)
    int8 = WireFormats(gather=BlockFormat("int8", 2))
    policy = WirePolicy(float8=[weight]) if kind == "float8" else WirePolicy(int8)
    buffer = FlatBuffer(["weight"], [torch.tensor([1.5, 1.5])], layout, group, transport_policy=policy)
    if group.rank == 1:
        time.sleep(0.5)
    buffer.gather(tag=1 << 21, copies_shard=True)
    buffer.sharded_params[0].data.mul_(0.5)
    buffer.wait_gathered(30.0)
    full = buffer.full.float() / (scale_of(buffer) if kind == "float8" else 1.0)
    assert [round(value, 4) for value in full.tolist()] == [1.5, 1.5]


# A gather in fp8 of a shard on the host: its copy has arrived before anything is computed with it.


class RecordingStream(Stream):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def run(self, *, after_caller: bool = True) -> AbstractContextManager[object]:
        @contextmanager
        def context() -> Iterator[None]:
            self.log.append("begin copy")
            yield
            self.log.append("end copy")

        return context()

    def join(self) -> None:
        self.log.append("join")


def logged(function: Any, name: str, log: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return function(*args, **kwargs)

    return call


@pytest.mark.simulation
def test_magnitudes_and_their_reduction_come_after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    with simulate(rank=0, world_size=4, device="sim", check=False):
        group = group_of()
        layout = FlatLayout.plan(["weight"], [(16, 16)], group.size)
        devices = DevicePolicy(shard=torch.device("cpu"), compute=torch.device("sim", 0))
        policy = WirePolicy(float8=[ScaledWeight()])
        flat = FlatBuffer(["weight"], [torch.randn(16, 16)], layout, group, devices=devices, transport_policy=policy)
        assert isinstance(flat.transport, HostStagedTransport)
        flat.transport.copies.stream = RecordingStream(log)
        monkeypatch.setattr(torch.linalg, "vector_norm", logged(torch.linalg.vector_norm, "magnitude", log))
        monkeypatch.setattr(float8, "all_reduce", logged(float8.all_reduce, "all_reduce", log))
        flat.gather(tag=1 << 21)
        flat.wait_gathered(10.0)
        flat.release()
        flat.wait_sent()
    assert log[:5] == ["begin copy", "end copy", "join", "magnitude", "all_reduce"]
