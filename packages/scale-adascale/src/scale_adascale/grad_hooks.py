"""Hears of each gradient of an optimizer's parameters before it is averaged away, until somebody stops to listen.

A parameter that is whole here has a hook, which sees its gradient ahead of what reduces it. One that is sharded has
none; whoever reduces its gradient tells of it, through `scale_core.on_local_grads`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scale_core import compat
from scale_core.autograd_hooks import are_local_grads_reported, on_local_grads
from scale_core.microbatch_grads import Listener, SampledStep, on_sampled_steps
from scale_core.shard import title_of

_OURS = ("scale_", "torch.")  # Hooks of these packages look at gradients, and leave them as they are.


def is_followed(param: Tensor, handle: RemovableHandle) -> bool:
    """Whether a hook of somebody else is called after the one of this handle."""
    hooks = getattr(param, "_backward_hooks", None) or {}
    for key in reversed(hooks):
        if key == handle.id:
            return False
        if _is_foreign(hooks[key]):
            return True
    return False


def is_changed_later(param: Tensor) -> bool:
    """Whether a hook of somebody else is called once a gradient was added to `param.grad`."""
    return any(map(_is_foreign, (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()))


def _is_foreign(hook: Callable[..., Any]) -> bool:
    return not str(getattr(hook, "__module__", None)).startswith(_OURS)


def is_nested() -> bool:
    """Whether the backward pass that runs now was begun by the backward of an autograd function, in another pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.autograd.function" and frame.f_code.co_name == "apply":
            return True
        frame = frame.f_back
    return False


class Hearing:
    """Hears of the gradients of numbered parameters, and of steps that are announced.

    Whoever it tells is held weakly: gradients are not told of for somebody who is gone, and autograd, which holds
    hooks, shows nobody what these hold.

    Args:
        take: Called with the number of a parameter and its gradient, without a graph.
        begins: Called with each step that is announced; returns who listens to it.
    """

    def __init__(self, take: Callable[[int, Tensor], None], begins: Callable[[SampledStep], Listener | None]) -> None:
        self._take, self._begins = weakref.WeakMethod(take), weakref.WeakMethod(begins)
        self._numbers: dict[int, int] = {}  # by id; the owner holds the parameters
        self._params: list[Tensor] = []
        self._hooked: dict[int, RemovableHandle] = {}
        self._reports: list[RemovableHandle] = []

    @property
    def is_listening(self) -> bool:
        """Whether it hears of anything."""
        return bool(self._reports)

    @property
    def can_hear(self) -> bool:
        """Whether any parameter can have a gradient that is told of."""
        return bool(self._hooked) or any(are_local_grads_reported(p) for p in self._params if p.requires_grad)

    @property
    def num_params(self) -> int:
        """How many parameters there are."""
        return len(self._params)

    def is_hooked(self, param: Tensor) -> bool:
        """Whether this very parameter has a hook."""
        return self._numbers.get(id(param)) in self._hooked

    def is_only_asked_for(self, number: int) -> bool:
        """Whether the backward pass that runs now will not add to the gradient of this parameter, which it brings."""
        return number in self._hooked and compat.is_only_asked_for(self._params[number])

    def numbers_of(self, params: Iterable[Tensor]) -> frozenset[int]:
        """Returns the numbers of those of these parameters that have one."""
        return frozenset(self._numbers[id(param)] for param in params if id(param) in self._numbers)

    def title_of(self, number: int) -> str:
        """What errors call a parameter."""
        return title_of(self._params[number])

    def listen(self, params: Iterable[Tensor]) -> None:
        """Listens to these parameters, by their numbers in this order; to those that can have a gradient."""
        before, self._params = self._params, list(params)
        if any(old is not new for old, new in zip(before, self._params, strict=False)):
            for handle in self._hooked.values():  # Somebody has put another parameter in the place of one.
                handle.remove()
            self._numbers, self._hooked = {}, {}
        for number, param in enumerate(self._params):
            self._numbers[id(param)] = number
            if number in self._hooked and is_followed(param, self._hooked[number]):
                self._hooked.pop(number).remove()  # To be last again: what other hooks change is what is averaged.
            if param.requires_grad and number not in self._hooked and not are_local_grads_reported(param):
                self._hooked[number] = param.register_hook(_hook(self._take, number))
        if not self._reports:
            self._reports = [on_local_grads(_hear(weakref.ref(self))), on_sampled_steps(_hear_of_step(self._begins))]
            for handle in self._reports:
                weakref.finalize(self, handle.remove)

    def stop(self) -> None:
        """Stops to listen."""
        for handle in self._hooked.values():
            handle.remove()
        for handle in self._reports:
            handle.remove()
        self._hooked, self._reports = {}, []

    def check(self) -> None:
        """Checks that hooks see what will be averaged, and all of it.

        Raises:
            RuntimeError: Others would change it later, or a parameter has no hook yet.
        """
        for number, param in enumerate(self._params):
            handle = self._hooked.get(number)
            if handle is not None and is_followed(param, handle):
                raise RuntimeError(
                    f"{title_of(param)} has a hook that was registered after AdaScale's, and may change the gradient "
                    "that was measured: register it before AdaScale(...) is built, or call optimizer.zero_grad() "
                    "after registering it, so that AdaScale measures what it returns"
                )
            if handle is not None and is_changed_later(param):
                raise RuntimeError(
                    f"{title_of(param)} has a hook of register_post_accumulate_grad_hook(), which may change gradients "
                    "after AdaScale has measured them: remove it and change them by param.register_hook(hook), before "
                    "AdaScale(...) is built, or between the last backward pass and the step; or call "
                    "optimizer.unhook()"
                )
            if handle is None and param.requires_grad and not are_local_grads_reported(param):
                raise RuntimeError(
                    f"{title_of(param)} was unfrozen after AdaScale had looked which parameters have gradients: call "
                    "optimizer.zero_grad(), not model.zero_grad(), before the next backward pass"
                )

    def tell(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Somebody else tells of gradients, of whatever parameters."""
        take = self._take()
        for param, grad in zip(params, grads, strict=True):
            number = self._numbers.get(id(param))
            if take is not None and number is not None and number not in self._hooked:
                take(number, grad)


def _hook(held: weakref.WeakMethod[Callable[[int, Tensor], None]], number: int) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        take = held()
        if take is not None:
            take(number, grad.detach() if grad.requires_grad else grad)  # With `create_graph=True`.

    return hook


def _hear(held: weakref.ref[Hearing]) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    def hear(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        mine = held()
        if mine is not None:
            mine.tell(params, grads)

    return hear


def _hear_of_step(held: weakref.WeakMethod[Any]) -> Callable[[SampledStep], Listener | None]:
    def hear(step: SampledStep) -> Listener | None:
        begins: Callable[[SampledStep], Listener | None] | None = held()
        return None if begins is None else begins(step)

    return hear
