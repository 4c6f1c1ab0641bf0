"""What a rank measures of its own gradients before they are averaged away, one backward pass after another.

A gradient of a parameter that is whole here is seen by a hook, before DistributedDataParallel or ShardedDataParallel
reduce it. Gradients of parameters that are sharded come to no hook; whoever reduces them tells of them, through
`scale_core.on_local_grads`. Either way nothing is copied and nothing waits for the device.

A pass is a sample, and gradients are averaged when it ends; unless whoever runs the passes says otherwise, as a
pipeline does (`scale_core.samples`). Its step is then to the owner one pass that brings several samples.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scale_adascale.tally import Tally
from scale_core.backward import (
    are_local_grads_reported,
    at_end_of_backward,
    on_local_grads,
)
from scale_core.samples import Listener, SampledStep, on_sampled_steps
from scale_core.shard import shard_of

_OURS = ("scale_", "torch.")  # Hooks of these packages look at gradients, and leave them as they are.


class LocalGrads:
    """Adds up the squares of the gradients that this rank computes, per parameter.

    Args:
        begins: Called when a backward pass brings its first gradient, before that is counted; may refuse it.
        ended: Called with the number of samples when a pass has ended and its gradients have been averaged, where that
            was asked of it; calls `add_pass`, unless these are not to count.

    Attributes:
        sums: By device the sums of the squares of each parameter's gradients, by number, [k], fp64.
        fails: The last pass has failed, and what it had brought was dropped.
        elsewhere: Numbers of parameters whose gradients other ranks count, of the last step that was announced.
    """

    def __init__(self, begins: Callable[[], None], ended: Callable[[int], None]) -> None:
        self._begins, self._ended = weakref.WeakMethod(begins), weakref.WeakMethod(ended)
        self.sums: dict[torch.device, Tensor] = {}
        self.fails = False
        self.elsewhere: frozenset[int] = frozenset()
        self._of_pass: dict[torch.device, Tally] = {}
        self._seen: set[tuple[int, int]] | None = None  # samples and numbers, in the pass that runs now
        self._step: SampledStep | None = None  # the announced step that is the pass that runs now
        self._parts: frozenset[int] = frozenset()  # whose gradients it hands over by itself
        self._numbers: dict[int, int] = {}  # by id; the owner holds the parameters
        self._params: list[Tensor] = []
        self._hooked: dict[int, RemovableHandle] = {}
        self._reports: list[RemovableHandle] = []

    @property
    def is_listening(self) -> bool:
        """Whether gradients are measured at all."""
        return bool(self._reports)

    @property
    def can_hear(self) -> bool:
        """Whether any parameter can have a gradient that is told of."""
        return bool(self._hooked) or any(are_local_grads_reported(p) for p in self._params if p.requires_grad)

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass has brought gradients, and not ended yet."""
        return self._seen is not None

    def is_hooked(self, param: Tensor) -> bool:
        """Whether this very parameter has a hook."""
        return self._numbers.get(id(param)) in self._hooked

    def listen(self, params: Iterable[Tensor]) -> None:
        """Listens to these parameters, by their numbers in this order; to those that can have a gradient."""
        before = len(self._numbers)
        self._params = list(params)
        for number, param in enumerate(self._params):
            self._numbers[id(param)] = number
            if number in self._hooked and _is_followed(param, self._hooked[number]):
                self._hooked.pop(number).remove()  # To be last again: what other hooks change is what is averaged.
            if param.requires_grad and number not in self._hooked and not are_local_grads_reported(param):
                self._hooked[number] = param.register_hook(self._hook(number))
        if len(self._numbers) != before:
            self.sums, self._of_pass = {}, {}
        if not self._reports:
            self._reports = [on_local_grads(self._hear()), on_sampled_steps(self._hear_of_step())]
            for handle in self._reports:
                weakref.finalize(self, handle.remove)  # Gradients are not told of for somebody who is gone.

    def unhook(self) -> None:
        """Stops to listen."""
        for handle in self._hooked.values():
            handle.remove()
        for handle in self._reports:
            handle.remove()
        self._hooked, self._reports = {}, []
        self.forget()

    def forget(self) -> None:
        """Drops what was measured so far."""
        self._seen, self._step, self.fails = None, None, False
        self.sums = {}

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        held = weakref.ref(self)  # Autograd holds the hook, and shows nobody what its hooks hold.

        def hook(grad: Tensor) -> None:
            mine = held()
            if mine is not None:
                mine._take(number, grad.detach() if grad.requires_grad else grad)  # With `create_graph=True`.

        return hook

    def _hear(self) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
        held = weakref.ref(self)

        def hear(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            mine = held()
            for param, grad in zip(params, grads, strict=True):
                number = None if mine is None else mine._numbers.get(id(param))
                if mine is not None and number is not None and number not in mine._hooked:
                    mine._take(number, grad)

        return hear

    def _take(self, number: int, grad: Tensor) -> None:
        sample = 0
        if self._step is not None:
            if number in self._parts:
                return
            if self._step.sample is None:
                raise RuntimeError(
                    f"{_title(self._params[number])} has got a gradient between the backward passes of a pipeline's "
                    "step, which is of no micro-batch, as by backward() in a forward: leave it out, or call "
                    "optimizer.unhook()"
                )
            sample = self._step.sample
        elif self._seen is None:
            self._begin_pass()
        assert self._seen is not None
        if (sample, number) in self._seen:
            raise RuntimeError(
                f"{_title(self._params[number])} has two gradients in one backward pass, as in a reentrant checkpoint "
                "that contains it twice: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                "scale_checkpoint.checkpoint_wrapper(module)"
            )
        self._seen.add((sample, number))
        self._count(number, grad)

    def _count(self, number: int, grad: Tensor) -> None:
        """Adds the square of a gradient of the pass that runs now."""
        if grad.device not in self._of_pass:
            self._of_pass[grad.device] = Tally(len(self._numbers), grad.device)
        if self._step is None:
            self._of_pass[grad.device].take(number, grad)
        else:
            self._of_pass[grad.device].add(number, grad)

    def _begin_pass(self) -> None:
        if _is_nested():
            raise RuntimeError(
                "AdaScale can't tell one backward pass from another inside of a reentrant checkpoint, which runs "
                "backward passes of its own: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                "scale_checkpoint.checkpoint_wrapper(module)"
            )
        self._begin_measuring()
        at_end_of_backward(self._end_pass, self._pass_has_failed)

    def _begin_measuring(self) -> None:
        self._check_hooks()
        begins = self._begins()
        if begins is not None:
            begins()
        self._seen, self.elsewhere = set(), frozenset()
        for tally in self._of_pass.values():
            tally.clear()

    def _check_hooks(self) -> None:
        """Refuses what would be averaged and not measured, or measured otherwise than averaged."""
        for number, param in enumerate(self._params):
            handle = self._hooked.get(number)
            if handle is not None and _is_followed(param, handle):
                raise RuntimeError(
                    f"{_title(param)} has a hook that was registered after AdaScale's, and may change the gradient "
                    "that was measured: register it before AdaScale(...) is built, or call optimizer.zero_grad() "
                    "after registering it, so that AdaScale measures what it returns"
                )
            if handle is None and param.requires_grad and not are_local_grads_reported(param):
                raise RuntimeError(
                    f"{_title(param)} was unfrozen after AdaScale had looked which parameters have gradients: call "
                    "optimizer.zero_grad(), not model.zero_grad(), before the next backward pass"
                )

    def _end_pass(self) -> None:
        # What averages gradients has queued its own end by now, but may have done so after this one.
        at_end_of_backward(self._all_is_done, self._pass_has_failed)

    def add_pass(self) -> None:
        """Adds what the pass that has ended brought to `sums`."""
        for device, tally in self._of_pass.items():
            squares = tally.squares()
            self.sums[device] = self.sums[device] + squares if device in self.sums else squares

    def _all_is_done(self, num_samples: int = 1) -> None:
        self._seen = self._step = None
        ended = self._ended()
        if ended is not None:
            ended(num_samples)

    def _pass_has_failed(self) -> None:
        self._seen, self._step, self.fails = None, None, True

    # A step that is announced.

    def _hear_of_step(self) -> Callable[[SampledStep], Listener | None]:
        held = weakref.ref(self)

        def hear(step: SampledStep) -> Listener | None:
            mine = held()
            return None if mine is None else mine._begin_step(step)

        return hear

    def _begin_step(self, step: SampledStep) -> Listener | None:
        """Listens to a step that is announced, if any of its parameters is measured, with a gradient or without."""
        if not any(id(param) in self._numbers for param in step.params):
            return None
        self._begin_measuring()
        self._step, self._parts = step, self._among(step.in_parts)
        self.elsewhere = self._among(step.counted_elsewhere)
        return Listener(self._all_is_done, self._pass_has_failed, self._take_whole)

    def _take_whole(self, param: Tensor, grad: Tensor) -> None:
        number = self._numbers.get(id(param))
        if number is not None:
            self._count(number, grad)

    def _among(self, params: Iterable[Tensor]) -> frozenset[int]:
        return frozenset(self._numbers[id(param)] for param in params if id(param) in self._numbers)


def _is_followed(param: Tensor, handle: RemovableHandle) -> bool:
    """Whether a hook of somebody else is called after the one of this handle."""
    hooks = getattr(param, "_backward_hooks", None) or {}
    for key in reversed(hooks):
        if key == handle.id:
            return False
        if not str(getattr(hooks[key], "__module__", None)).startswith(_OURS):
            return True
    return False


def _title(param: Tensor) -> str:
    shard = shard_of(param)
    return f"a parameter of shape {tuple(param.shape)}" if shard is None else shard.title


def _is_nested() -> bool:
    """Whether the backward pass that runs now was begun by the backward of an autograd function, in another pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.autograd.function" and frame.f_code.co_name == "apply":
            return True
        frame = frame.f_back
    return False
