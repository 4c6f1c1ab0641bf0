"""Messages between ranks: headers, descriptions and tensors, received early and sent without waiting.

Every slot of a plan is filled in every step, whatever happens: with content, with word of a failure, or with word that
there is nothing. So nobody waits for a rank that has failed, and what is sent and what is received always match.

A header has a fixed length, so it can be received before anything is known. A tensor can't, but mostly it is as the
last one in its place: memory for that is posted together with the header, and the transport fills it while this rank
computes; small ones come in one piece with the header (`packing`). Where it comes otherwise, the sender, who knows
what is expected, sends the header alone and a single byte for each tensor that was posted; the real ones follow. (Gloo
takes a message that is shorter than the memory which waits for it.)

On NCCL, whose messages have no tags and are matched by their order alone, tensors are sent and received in the order of
the plan, which is one for all ranks; headers and descriptions stay on the host.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core.comm.collectives import HOST, group_for, torch_group
from scale_core.comm.group import Group
from scale_core.comm.work import TransferError, Work, begin, wait_for
from scale_pipe.distributed.comm import packing as envelope
from scale_pipe.distributed.comm.messages import (
    Content,
    Failure,
    Form,
    Message,
    Says,
    Share,
    as_bytes,
    dense,
    empty,
    form_of,
)
from scale_pipe.distributed.program.plan import Slot

_Works = list[tuple[int | None, Work]]


class _Posted:
    """A slot that may arrive."""

    def __init__(self, memory: Tensor, works: _Works, tensors: list[Tensor], expected: Form | None) -> None:
        self.memory = memory  # of the header, and of the tensors that come with it
        self.works = works
        self.tensors = tensors
        self.expected = expected


class _Opened(NamedTuple):
    """A slot whose header is here, and whose tensors are on their way."""

    form: Form
    tensors: list[Tensor]
    works: _Works
    share: Share


class LinkError(RuntimeError):
    """A slot did not arrive, or could not be sent.

    Attributes:
        slot: Which.
        peer: The rank that it was to come from, or go to.
        cause: What the transport says.
    """

    def __init__(self, slot: Slot, peer: int, cause: str) -> None:
        super().__init__(f"{slot}: {cause}")
        self.slot = slot
        self.peer = peer
        self.cause = cause


class Links:
    """What one rank exchanges with the others in passes of one kind.

    Args:
        group: The ranks of the pipeline.
        tags: The tag of each slot: the same on all ranks, no two alike.
        device: Where this rank computes.
        limit_seconds: The longest wait for one message.

    Attributes:
        device: Where this rank computes.
        kind: Of the pass that this rank is in; 0 outside of passes. Messages say it.
        heard: Of the pass that the last message was from.
    """

    def __init__(
        self, group: Group, tags: Mapping[Slot, int], device: torch.device, limit_seconds: float | None
    ) -> None:
        self._group = group
        self._tags = tags
        self._limit = limit_seconds
        self.kind = self.heard = 0
        self._forms: dict[Slot, Form] = {}  # what came last in each place, or was sent there
        self._posted: dict[Slot, _Posted] = {}
        self._opened: dict[Slot, _Opened | Failure | Share] = {}
        self._sent: dict[Slot, tuple[int, _Works, list[Tensor]]] = {}
        self.compute_on(device)

    def compute_on(self, device: torch.device) -> None:
        """Says where this rank computes; what the ranks expect of each other stays.

        Args:
            device: Where what arrives is put.
        """
        self.device = device
        self._on_device = device.type != HOST.type and self._group.backend == "nccl"

    @property
    def in_order(self) -> bool:
        """Whether slots have to be opened in the order of the plan."""
        return self._on_device

    def num_bytes(self, slot: Slot) -> int:
        """Returns how much has travelled in a place the last time; 0 where nothing has.

        Args:
            slot: Any.
        """
        form = self._forms.get(slot)
        return 0 if form is None else form.num_bytes

    # Receiving.

    def post(self, slot: Slot, peer: int) -> None:
        """Gets ready for a slot; does not wait.

        Args:
            slot: One that will be received in this step.
            peer: Who sends it.
        """
        expected = None if self._on_device else self._forms.get(slot)
        together = expected is not None and envelope.fits(expected)
        memory = envelope.empty_for(expected if together else None)
        tensors = [] if expected is None or together else [empty(form) for form in expected.tensors]
        works = [self._receive(memory, peer, slot)]
        works += [self._receive(as_bytes(tensor), peer, slot) for tensor in tensors if tensor.numel()]
        self._posted[slot] = _Posted(memory, works, tensors, expected)

    def open(self, slot: Slot, peer: int) -> None:
        """Waits for the header of a slot that was posted, and begins to receive its tensors.

        Where messages are matched by their order, that is done in the order of the plan.

        Args:
            slot: Which.
            peer: Who sends it.

        Raises:
            LinkError: It did not arrive.
        """
        self._opened[slot] = self._open(slot, peer)

    def take(self, slot: Slot, peer: int) -> Message:
        """Waits for a slot that was posted, and returns what has arrived.

        Args:
            slot: Which; opened or not.
            peer: Who sends it.

        Raises:
            LinkError: It did not arrive.
        """
        opened = self._opened.pop(slot, None)
        if opened is None:
            opened = self._open(slot, peer)
        if not isinstance(opened, _Opened):
            return opened
        for work in opened.works:
            self._wait(slot, work)
        return self._content(opened.form, opened.tensors, opened.share)

    def _open(self, slot: Slot, peer: int) -> _Opened | Failure | Share:
        posted = self._posted.pop(slot)
        for work in posted.works:
            self._wait(slot, work)
        says, length, samples, total, count, self.heard = envelope.header_of(posted.memory).tolist()
        share = Share(samples, total, count)
        if says == Says.ABSENT:
            return share
        if says == Says.FAILED:
            return Failure.from_bytes(self._description(slot, peer, length))
        if says == Says.DESCRIBED:
            self._forms[slot] = pickle.loads(self._description(slot, peer, length))
        form = self._forms[slot]
        if says == Says.DESCRIBED or self._on_device:
            return _Opened(form, *self._coming(slot, peer, form), share)
        tensors = envelope.tensors_of(posted.memory, form) if envelope.fits(form) else posted.tensors
        return _Opened(form, tensors, [], share)

    def _coming(self, slot: Slot, peer: int, form: Form) -> tuple[list[Tensor], _Works]:
        """Begins to receive tensors whose forms are known by now."""
        if not self._on_device:
            tensors = [empty(one) for one in form.tensors]
            return tensors, [self._receive(as_bytes(tensor), peer, slot) for tensor in tensors if tensor.numel()]
        tensors = [
            torch.empty_strided(one.shape, one.strides, dtype=one.dtype, device=self.device) for one in form.tensors
        ]
        recv = torch_group(self._group).recv
        return tensors, [begin(peer, partial(recv, [as_bytes(one)], peer, 0)) for one in tensors if one.numel()]

    def _content(self, form: Form, tensors: list[Tensor], share: Share) -> Content:
        if self.device != HOST:
            tensors = [tensor.to(self.device) for tensor in tensors]
        for tensor, one in zip(tensors, form.tensors, strict=True):
            if one.requires_grad:
                tensor.requires_grad_()
        return Content(form.structure, tensors, share)

    def _description(self, slot: Slot, peer: int, length: int) -> bytes:
        content = bytearray(length)
        self._wait(slot, self._receive(torch.frombuffer(content, dtype=torch.uint8), peer, slot))
        return bytes(content)

    # Sending.

    def send(self, slot: Slot, peer: int, message: Message) -> None:
        """Fills a slot; does not wait.

        Args:
            slot: One that was not sent in this step.
            peer: Who receives it.
            message: What for.

        Raises:
            TypeError: Something in it can't be sent; nothing was.
        """
        expected = None if self._on_device else self._forms.get(slot)
        description, tensors, share = b"", [], Share(0, 0, 0)
        if isinstance(message, Failure):
            says, description = Says.FAILED, message.to_bytes()
        elif isinstance(message, Share):
            says, share = Says.ABSENT, message
        else:
            share = message.share
            tensors = [dense(tensor) for tensor in message.tensors]
            form = form_of(message.structure, tensors)
            says = Says.SAME if form == self._forms.get(slot) else Says.DESCRIBED
            if says is Says.DESCRIBED:
                self._forms[slot] = form
                description = pickle.dumps(form)
        header = [says, len(description), *share, self.kind]
        together = expected is not None and envelope.fits(expected)
        wires: list[Tensor] = []
        if says is Says.SAME and together and expected is not None:
            host = [envelope.packed(header, expected, [tensor.cpu() for tensor in tensors])]
        else:
            host = [torch.tensor(header, dtype=torch.int64)]
            if says is not Says.SAME and expected is not None and not together:
                host += [torch.zeros(1, dtype=torch.uint8) for one in expected.tensors if one.num_bytes]
            if description:
                host.append(torch.frombuffer(bytearray(description), dtype=torch.uint8))
            wires = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
            if not self._on_device:
                host += [wire.cpu() for wire in wires]
        works = [self._start(part, peer, slot) for part in host]
        if self._on_device:
            send = torch_group(self._group).send
            works += [begin(peer, partial(send, [wire], peer, 0)) for wire in wires]
        self._sent[slot] = peer, works, [*host, *wires]  # The transport reads them until they have arrived.

    def forget(self, slots: Iterable[Slot]) -> None:
        """Lets go of what is known to have arrived.

        Args:
            slots: That were sent in this step.

        Raises:
            LinkError: One could not be sent after all.
        """
        for slot in slots:
            _, works, _ = self._sent.pop(slot)
            for work in works:
                self._wait(slot, work)

    def finish(self) -> None:
        """Waits until all that was sent has arrived.

        Raises:
            LinkError: Something could not be sent; the others were waited for all the same.
        """
        first: LinkError | None = None
        for slot in list(self._sent):
            try:
                self.forget([slot])
            except LinkError as error:
                first = first or error
        if first is not None:
            raise first

    def _start(self, part: Tensor, peer: int, slot: Slot) -> tuple[int | None, Work]:
        return begin(peer, partial(group_for(HOST, self._group).send, [part], peer, self._tags[slot]))

    def _receive(self, part: Tensor, peer: int, slot: Slot) -> tuple[int | None, Work]:
        return begin(peer, partial(group_for(HOST, self._group).recv, [part], peer, self._tags[slot]))

    def _wait(self, slot: Slot, work: tuple[int | None, Work]) -> None:
        try:
            # NCCL would hold the host up to keep a limit; its own watchdog keeps the group's.
            wait_for("the transfer", work[0], work[1], None if self._on_device else self._limit)
        except TransferError as error:
            assert work[0] is not None
            raise LinkError(slot, work[0], str(error)) from error
