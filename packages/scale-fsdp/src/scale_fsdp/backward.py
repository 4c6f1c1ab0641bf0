"""A model's backward pass: when it begins, what is reduced in it and in which order, and how it ends.

Autograd says when a gradient has come and when all is over; what follows for a unit alone stands in `unit.py`. Here
stands what it means for the units together: reductions follow each other, one at a time, each beside the backward of
the next unit. At the end the ranks compare what they did, and only then gradients become those that an optimizer sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scale_core.autograd_hooks import at_end_of_backward
from scale_core.consistency.execution_order import PassKind, unit_title
from scale_core.consistency.recovery import tell
from scale_core.uneven_inputs import current_share
from scale_fsdp.arriving import Arriving
from scale_fsdp.recovery import Notes, raise_if_given_up
from scale_fsdp.unused import Unused

if TYPE_CHECKING:  # root.py stands on this file.
    from scale_fsdp.root import Root
    from scale_fsdp.unit import Unit


class BackwardPass:
    """The backward passes of one model, one after the other.

    Args:
        root: What the units of the model share.

    Attributes:
        runs: One runs now.
        unused: What was reduced as zeros in it.
        arriving: Who hears of gradients before it is over.
        failure: What was raised in it, where that is known.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.runs = False
        self.unused = Unused(root.units)
        self.arriving = Arriving(root.contract, self.unused)
        self.failure: BaseException | None = None
        self._reducing: Unit | None = None

    # In the order of time.

    def begin(self) -> None:
        """A gradient has arrived at one of the units; does nothing after the first.

        Raises:
            RuntimeError: The forward of the outermost module has not returned; several passes in one step of `join`.
        """
        if self.runs:
            return
        root = self._root
        if root.entry is not None:
            raise RuntimeError(
                f"a backward pass has begun inside the forward of {unit_title(root.entry.name)}: take gradients after "
                "the outermost sharded module has returned, or shard only modules that are not differentiated inside "
                "of one that is called"
            )
        if current_share() is not None and not root.synchronizes:
            raise RuntimeError(
                "join() counts whole steps, and this backward pass is one of several in a step, under no_sync(): let "
                "join() yield all micro-batches of a step together, or leave no_sync() out"
            )
        self.runs = True
        self.forget()
        kind = "backward with reduction" if root.reduces_any else "backward"
        root.contract.begin(PassKind(kind, grad=True, training=True), new_step=False)
        at_end_of_backward(self._finish, self._has_failed)

    def note_gradient(self, unit: Unit, number: int, index: int) -> None:
        """The gradient of one parameter of a unit's buffer has come, and stands in the whole parameter's `grad`."""
        self._root.finite.note_gradient(unit, number, index)
        self.unused.note_gradient(unit, number, index)

    def reduce(self, unit: Unit) -> None:
        """A unit's gradients are there: reduce them, and take the results of the unit before."""
        if not self._root.reduces(unit):
            unit.pack()
            return
        if not unit.trains:
            return
        self._root.announce("reduction", unit)
        self.make_room()
        self._reducing = unit
        self.unused.note_reduction(unit)
        unit.reduce()

    def make_room(self) -> None:
        """Takes the results of the reduction under way, so that its flat gradient is free before the next is filled.

        It has run beside the backward of the next unit up to that unit's first gradient, and beside all of its
        recomputation where it is checkpointed.
        """
        if self._reducing is not None:
            unit, self._reducing = self._reducing, None
            unit.wait_reduced()
            self.arriving.reduced(unit)

    def recomputed(self) -> None:
        """A checkpointed unit is about to compute its gradients; the reduction before them has run beside it so far.

        Only now is the unit before it gathered, so that its parameters never stand beside the flat gradient of the
        unit behind it: at this size one of them is a tenth of the device.
        """
        self.make_room()
        for unit in self._root.fetched_ahead():
            unit.gather()

    def stop(self) -> None:
        """This rank has failed: nobody hears of gradients any more, whatever it still does for the others."""
        self.runs = False
        self.arriving.is_silent = True

    def forget(self) -> None:
        """It is over, or was given up."""
        self._reducing = self.failure = None
        self.unused.forget()
        self.arriving.forget()

    # How it ends.

    def _finish(self) -> None:
        """The pass has run to its end on this rank; what a unit may still have to reduce, it does now."""
        root = self._root
        try:
            for unit in root.units:
                unit.finish()
            if root.reduces_any:
                for unit in root.units:
                    if unit.lends and not self.unused.is_reduced(unit):
                        self.reduce(unit)
                self.make_room()
                self._close()
            else:
                root.raise_if_not_finite()
                root.contract.leave()
                for unit in root.units:
                    unit.revoke_gradients() if root.finite.fault else unit.commit()
        except BaseException as error:
            root.abort(error)
            raise
        self.runs = False
        root.release_idle()

    def _has_failed(self) -> None:
        """Autograd has dropped the pass that ran; whatever it was is being raised to the user."""
        if self.runs:
            last = self._root.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            unknown = RuntimeError(f"its backward pass failed{where}, with an error that is raised there")
            self._root.abort(self.failure or unknown)

    def _close(self) -> None:
        """Compares the pass with the other ranks', and agrees on what only some of them have used."""
        root = self._root
        for unit in root.units:
            for buffer in unit.buffers:
                if buffer.gradient and not buffer.trains:
                    buffer.gradient.drop()  # Frozen since the forward.
        late = [
            number
            for number, unit in enumerate(root.units)
            if root.reduces(unit) and any(buffer.gradient for buffer in unit.buffers)
        ]
        fault = root.finite.ask()
        notes = root.close(Notes(len(late), len(self.unused.keys), fault is not None))
        raise_if_given_up(root, notes, fault)
        try:
            self._commit(notes, late)
        except BaseException:  # The others have heard that all is well, and are about to use their gradients.
            root.contract.fall_behind()
            raise
        self.forget()

    def _commit(self, notes: Sequence[Notes], late: Sequence[int]) -> None:
        """The pass has gone well on every rank: its gradients become those that an optimizer sees."""
        root = self._root
        if any(told.num_late for told in notes):
            for number in sorted({number for numbers in tell(late, root.contract) for number in numbers}):
                root.units[number].reduce()
        for unit in root.units:
            unit.commit()
        if all(told.num_unused for told in notes):
            self.unused.restore(tell(sorted(self.unused.keys), root.contract))
        self.arriving.committed([p for unit in root.units if root.reduces(unit) for p in unit.reduced_params()])
