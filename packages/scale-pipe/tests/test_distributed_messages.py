"""What is sent arrives as it was: trees of anything, tensors of any memory, in one piece or in several."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scale_core import group_of
from scale_pipe.distributed.message import WHOLE, ChunkSize, Failure, Flow, Payload, Slot
from scale_pipe.distributed.p2p import (
    HEADER_LENGTH,
    P2PChannel,
    P2PError,
    PayloadMeta,
    as_bytes,
    dense,
    empty_like_meta,
    pack_message,
    unpack_message,
)
from scale_pipe.distributed.stage import pack, unpack

Pair = namedtuple("Pair", "first second")  # noqa: PYI024  # One of the old kind.


@dataclass(frozen=True)
class Node:
    tensor: Tensor
    rest: Any


def test_a_tree_is_put_together_as_it_was() -> None:
    tensor, other = torch.randn(2, 3), torch.arange(4)
    form = torch.empty(5, device="meta")
    tree = Node(tensor, {"pair": Pair(other, tensor), "list": [1, None, "word", (tensor, form)], "set": {3}})
    structure, tensors = pack(tree)
    assert [id(one) for one in tensors] == [id(tensor), id(other)]
    found = unpack(structure, tensors)
    assert found.tensor is tensor and found.rest["pair"].second is tensor and found.rest["pair"].first is other
    assert type(found.rest["pair"]) is Pair and found.rest["list"][:3] == [1, None, "word"] and found.rest["set"] == {3}
    assert found.rest["list"][3][1].is_meta and found.rest["list"][3][1].shape == (5,)
    assert pack(tree)[0] == structure


def test_a_single_tensor_and_nothing_at_all_are_trees() -> None:
    tensor = torch.randn(2)
    assert unpack(*pack(tensor)) is tensor
    assert unpack(*pack(None)) is None
    assert unpack(*pack([None, tensor]))[1] is tensor


def test_what_no_other_process_can_read_is_refused() -> None:
    with pytest.raises(TypeError, match="this can't be pickled"):
        pack([lambda: None])


LAYOUTS = {
    "plain": lambda: torch.randn(2, 3, 4),
    "transposed": lambda: torch.randn(2, 3, 4).transpose(0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a part": lambda: torch.randn(6, 4)[2:4],
    "with gaps": lambda: torch.randn(6, 4)[::2, 1:3],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "no dimension": lambda: torch.tensor(3.5),
    "no element": lambda: torch.randn(0, 4),
    "bool": lambda: torch.randn(3) > 0,
    "bfloat16": lambda: torch.randn(3).bfloat16(),
    "complex": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "integers": lambda: torch.arange(5),
    "trains": lambda: torch.randn(3).requires_grad_(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_travels_as_bytes_with_its_strides(name: str) -> None:
    tensor = LAYOUTS[name]()
    sent = dense(tensor)
    meta = PayloadMeta.of(*pack([sent])).tensors[0]
    arrived = empty_like_meta(meta)
    as_bytes(arrived).copy_(as_bytes(sent))
    assert torch.equal(arrived, tensor) and arrived.dtype == tensor.dtype
    assert meta.requires_grad == tensor.requires_grad and sent.is_leaf
    if name not in ("with gaps", "expanded", "complex"):  # The conjugate is taken when it is read.
        assert arrived.stride() == tensor.stride() and sent.data_ptr() == tensor.data_ptr(), "copied"


def test_what_has_no_memory_of_its_own_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.sparse_coo: send \.to_dense\(\)"):
        dense(torch.eye(3).to_sparse())


def test_small_tensors_stand_in_one_message_without_copies() -> None:
    tensors = [build() for name, build in LAYOUTS.items() if name not in ("with gaps", "expanded", "complex")]
    tensors = [dense(tensor) for tensor in tensors]
    meta = PayloadMeta.of(*pack(tensors))
    assert meta.is_packed
    header = list(range(HEADER_LENGTH))
    memory = pack_message(header, meta, tensors)
    assert memory.numel() == meta.ranges[-1][1]
    assert memory[: 8 * HEADER_LENGTH].view(torch.int64).tolist() == header
    found = unpack_message(memory, meta)
    for ours, theirs in zip(found, tensors, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        assert ours.numel() == 0 or ours.data_ptr() % ours.dtype.itemsize == 0
    before = found[1]._version
    found[0].add_(1)
    assert found[1]._version == before, "a change of one tensor is none of another"
    assert not PayloadMeta.of(*pack(torch.empty(1 << 16))).is_packed


def test_payloads_say_what_they_are() -> None:
    assert str(Payload(*pack([torch.zeros(2, 3).bfloat16(), 7]), WHOLE)) == "bfloat16[2, 3]"
    assert str(Payload(*pack(None), WHOLE)) == "no tensor"
    assert ChunkSize(2, 8, 4).weight == 0.25 and ChunkSize(0, 0, 4).weight == 0.25


SLOT = Slot(Flow.ACTIVATION, "", 0, 1, 0)


@pytest.mark.ranks(2)
@pytest.mark.fault(89)
def test_slots_are_filled_whatever_comes_after_whatever_else() -> None:
    torch.manual_seed(0)
    failure = Failure(0, 1, 2, "the forward", "ValueError", "why", "trace")
    small, large = torch.randn(3, 4), torch.randn(1 << 17)
    messages: list[Any] = [
        *(small, small + 1),  # The second as expected, in one piece.
        *(large, large * 2),  # Another form, a header alone where one piece was expected; then in two messages.
        *(failure, large * 3, ChunkSize(0, 0, 3)),
        *([large, small, None], [large * 4, small, None], [large, small, 7]),
        *((small,), failure, (small * 2,), ChunkSize(0, 0, 3)),
        *((torch.zeros(0, 3), torch.ones(2)), (torch.zeros(0, 3), torch.ones(2) * 2)),
        *((torch.zeros(0, 3), large), (torch.zeros(0, 3), large)),
        small.requires_grad_(),
    ]
    channel = P2PChannel(group_of(), {SLOT: 1 << 21}, torch.device("cpu"), 20.0)
    for sent in messages:
        message = sent if isinstance(sent, Failure | ChunkSize) else Payload(*pack(sent), ChunkSize(2, 8, 4))
        if dist.get_rank() == 0:
            channel.send(SLOT, 1, message)
            channel.wait_sends()
            continue
        channel.post_receive(SLOT, 0)
        received = channel.receive(SLOT, 0)
        assert type(received) is type(message)
        if isinstance(received, Payload) and isinstance(message, Payload):
            assert received.structure == message.structure and received.chunk_size == message.chunk_size
            assert len(received.tensors) == len(message.tensors)
            assert all(map(torch.equal, received.tensors, message.tensors))
            assert [t.requires_grad for t in received.tensors] == [t.requires_grad for t in message.tensors]
        else:
            assert received == message


@pytest.mark.ranks(2)
@pytest.mark.fault(89)
def test_a_receive_that_nobody_sends_names_its_slot_and_peer() -> None:
    first = P2PChannel(group_of(), {SLOT: 1 << 21}, torch.device("cpu"), 20.0)
    if dist.get_rank() == 0:
        first.send(SLOT, 1, ChunkSize(0, 0, 3))  # Both ranks connect.
        first.wait_sends()
    else:
        first.post_receive(SLOT, 0)
        first.receive(SLOT, 0)
        channel = P2PChannel(group_of(), {SLOT: 1 << 22}, torch.device("cpu"), 0.2)
        channel.post_receive(SLOT, 0)
        text = "activation of stage 0 for stage 1, micro-batch 0: the transfer with rank 0 failed"
        with pytest.raises(P2PError, match=text) as caught:
            channel.receive(SLOT, 0)
        assert caught.value.peer == 0 and caught.value.slot == SLOT
