"""What a unit sends and gets: its flat buffers, moved together, on record, and with an error that explains a wait.

The step in `unit.py` says when; here stands what follows for each buffer. Every transfer is entered into the history
when it has begun, buffer by buffer: from it a rank that fails, as for want of memory for that very transfer, knows what
the others still expect of it. Every wait is inside the contract, which says what the others did instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.flat.buffer import FlatBuffer, State
from scale_fsdp.api import UnitOptions
from scale_fsdp.root import Root


class Transfers:
    """The buffers of one unit.

    Args:
        buffers: The unit's own parameters, one flat buffer per dtype and kind.
        options: How it was sharded.

    Attributes:
        name: The unit's name in its model.
        root: What the units of the model share; set when the model first runs.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], options: UnitOptions) -> None:
        self.buffers, self.options = list(buffers), options
        self.name = ""
        self.root: Root | None = None

    @property
    def gathered(self) -> bool:
        """Whether a buffer is gathered, or being gathered."""
        return any(buffer.state is not State.SHARDED for buffer in self.buffers)

    @property
    def is_stale(self) -> bool:
        """Whether a shard was written to, as by an optimizer, since it was gathered."""
        return any(buffer.is_stale() for buffer in self.buffers)

    @property
    def trains(self) -> bool:
        """Whether any of its own parameters wants a gradient."""
        return any(buffer.trains for buffer in self.buffers)

    # Gather and release.

    def gather(self) -> None:
        """Starts to gather all buffers that are not gathered yet."""
        for number, buffer in enumerate(self.buffers):
            if buffer.state is State.SHARDED:
                self._gather_one(number)

    def wait_gathered(self) -> None:
        """Returns when all buffers can be read."""
        contract = self._the_root.contract
        with contract.waiting(Event("gather", self.name)):
            for buffer in self.buffers:
                buffer.wait_gathered(contract.limit_seconds)

    def release(self, *, keep_part: bool = False) -> None:
        """Frees what was gathered, but for a part of it; waits for what was fetched ahead and is not used."""
        if not self.gathered and (keep_part or not any(buffer.part is not None for buffer in self.buffers)):
            return
        contract = self._the_root.contract
        with contract.waiting(Event("gather", self.name)):
            for buffer in self.buffers:
                buffer.release(contract.limit_seconds, keep_part=keep_part)

    def gather_whole(self, buffer: FlatBuffer) -> list[Tensor]:
        """Returns a buffer's parameters whole, in the dtype that they are trained in; all ranks call it together.

        Raises:
            ScaleDistributedError: A rank did something else.
        """
        if self.root is not None:
            self.root.recover()
        event = Event("whole parameters", self.name)
        contract = (
            self.root.contract
            if self.root is not None and not self.root.outdated
            else Contract(self.options.ranks.whole, self.options.limit_seconds)
        )
        contract.meet(event)
        with contract.waiting(event):
            return buffer.gather_whole(message_tag(event), contract.limit_seconds)

    # Reduce.

    def pack(self) -> None:
        """Keeps the gradients of this pass for the reduction at the end of a later one."""
        for buffer in self.buffers:
            buffer.gradient.pack(accumulate=True)

    def reduce(self) -> None:
        """Starts to reduce the gradients of all buffers that train."""
        for number, buffer in enumerate(self.buffers):
            if buffer.trains:
                self._reduce_one(number)

    def wait_reduced(self) -> None:
        """Waits for the reductions, so that their flat gradients are free."""
        contract = self._the_root.contract
        with contract.waiting(Event("reduction", self.name)):
            for buffer in self.buffers:
                buffer.wait_reduced(contract.limit_seconds)

    def commit(self) -> None:
        """The pass has gone well on every rank: what was reduced in it now stands in the shards' `grad`.

        What was not reduced joins what waits for a later reduction.
        """
        contract = self._the_root.contract
        with contract.waiting(Event("reduction", self.name)):
            for buffer in self.buffers:
                buffer.commit(contract.limit_seconds)

    def reduced_params(self) -> list[nn.Parameter]:
        """Its local shards that have a gradient."""
        return [param for buffer in self.buffers for param in buffer.exposed if param.grad is not None]

    def drop_gradients(self) -> None:
        """Forgets the gradients that were not reduced yet."""
        for buffer in self.buffers:
            buffer.gradient.drop()

    def revoke_gradients(self) -> None:
        """Forgets the gradients of the pass that runs now; what waits from earlier ones waits on."""
        for buffer in self.buffers:
            buffer.gradient.revoke()

    def withhold_gradients(self) -> None:
        """Until `discard`, reduces zeros in place of its gradients: this rank has failed, and serves the others."""
        for buffer in self.buffers:
            buffer.gradient.withhold()

    # For the others, on a rank that has failed.

    def serve(self, transfer: Event, *, keep_part: bool) -> None:
        """Does one buffer's part of a transfer that is on record, for the sake of the others.

        Args:
            transfer: As it was entered into the history.
            keep_part: As in `release`; only for the buffer that is gathered.
        """
        contract, number = self._the_root.contract, int(transfer.unit.rpartition("#")[2])
        with contract.waiting(Event(transfer.phase, self.name)):
            if transfer.phase == "gather":
                if self.buffers[number].state is State.SHARDED:
                    self._gather_one(number)
                self.buffers[number].release(contract.limit_seconds, keep_part=keep_part)
            else:
                self._reduce_one(number)
                self.buffers[number].wait_reduced(contract.limit_seconds)

    def begin_rest(self, phase: str) -> None:
        """Begins those transfers of the last event that this rank has not begun, because it failed before.

        Args:
            phase: "gather" or "reduction".
        """
        begun = self._the_root.contract.history.transfers
        for number, buffer in enumerate(self.buffers):
            if self._transfer(phase, number) in begun:
                continue
            if phase == "gather" and buffer.state is State.SHARDED:
                self._gather_one(number)
            elif phase == "reduction" and buffer.trains:
                self._reduce_one(number)

    # The end of what is under way.

    def end_transfers(self) -> None:
        """Waits for whatever is under way, since the others send it, and keeps no more than the part that they need."""
        self.wait_reduced()
        self.release(keep_part=True)

    def discard(self) -> None:
        """After an error: gives up whatever is under way; gradients of earlier passes stay."""
        for buffer in self.buffers:
            buffer.discard()

    @property
    def _the_root(self) -> Root:
        assert self.root is not None, "a unit ran before it had a root"
        return self.root

    def _gather_one(self, number: int) -> None:
        transfer = self._transfer("gather", number)
        self.buffers[number].gather(message_tag(transfer))
        self._the_root.contract.history.add_transfer(transfer)

    def _reduce_one(self, number: int) -> None:
        transfer = self._transfer("reduction", number)
        self.buffers[number].reduce(message_tag(transfer))
        self._the_root.contract.history.add_transfer(transfer)

    def _transfer(self, phase: str, number: int) -> Event:
        """One buffer's, whose messages carry a tag of it: two ranks at different units never read each other's data."""
        return Event(phase, f"{self.name}#{number}")
