"""What is called in the place of a checkpointed module's forward.

The module stays itself: its class, its names, its keys. Only the attribute `forward` of the instance is another one,
below all hooks, so that a module that gathers its parameters around its forward is not gathered again to recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from scale_checkpoint import state as phase
from scale_checkpoint.offload.offload import offload_activations, offload_inputs
from scale_checkpoint.recompute.recompute import Learned, Treatment, run_recomputed


class TreatedForward:
    """A module's forward with a treatment of its activations; it is copied and pickled with the module.

    Args:
        module: The module.
        treatment: What is done.
    """

    def __init__(self, module: nn.Module, treatment: Treatment) -> None:
        # The module's own, as other libraries patch it in; otherwise it is found in the class.
        self.__setstate__((module, treatment, vars(module).get("forward")))

    def __getstate__(self) -> tuple[nn.Module, Treatment, Callable[..., Any] | None]:
        return self._the_module, self.treatment, self.patched

    def __setstate__(self, state: tuple[nn.Module, Treatment, Callable[..., Any] | None]) -> None:
        module, self.treatment, self.patched = state
        self._module = weakref.ref(module)  # The module holds this; so nothing goes round in a circle.
        self._learned = Learned()
        self._is_initialized = False  # Until it was seen to be.

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "__name__", "__qualname__") and "_module" in vars(self):
            plain = self.plain
            return plain if name == "__wrapped__" else getattr(plain, name)
        raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is this module's, and not that of one of which this is a shallow copy."""
        return self._module() is module

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that it stands for, bound."""
        module = self._the_module
        return partial(type(module).forward, module) if self.patched is None else self.patched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, forward = self._the_module, self.plain
        if not torch.is_grad_enabled() or phase.is_disabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler knows torch's own function, and sees to random numbers and buffers itself.
            return (
                checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
                if self.treatment.recompute
                else forward(*args, **kwargs)
            )
        if not self._is_initialized:
            self._is_initialized = _is_initialized(module)
            if not self._is_initialized:
                # The first forward of a lazy module makes its parameters and buffers: there is nothing of before to
                # compute it again from, so this one keeps everything.
                return forward(*args, **kwargs)
        _check_no_transform(module)
        with self._offloading(module):
            if not self.treatment.recompute:
                return forward(*args, **kwargs)
            return run_recomputed(module, forward, (args, kwargs), self.treatment, self._learned)

    @property
    def _the_module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("this forward is that of a module that is gone: keep the module, and call it")
        return module

    def _offloading(self, module: nn.Module) -> AbstractContextManager[Any]:
        told = self.treatment
        if told.offload_to is None:
            return nullcontext()
        if told.recompute:
            return offload_inputs(module, told.offload_to, told.min_bytes)
        return offload_activations(module, to=told.offload_to, min_bytes=told.min_bytes)


def treated(module: nn.Module) -> TreatedForward | None:
    """Returns what stands in the place of a module's forward, or None where it is its own or that of another module."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, TreatedForward) and forward.is_of(module) else None


def treat(module: nn.Module, forward: TreatedForward) -> None:
    """Puts a treated forward in the place of the module's own, which has none at this time."""
    object.__setattr__(module, "forward", forward)
    if _check_is_own not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_check_is_own)


def treat_no_more(module: nn.Module) -> None:
    """Puts a module's own forward back, or that which was patched in before it was treated."""
    present = vars(module).get("forward")
    if not isinstance(present, TreatedForward):
        return
    if not present.is_of(module):  # A shallow copy shares its hooks with the original, which goes on to need them.
        module.__dict__["_forward_pre_hooks"] = module._forward_pre_hooks.copy()
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _check_is_own]:
        del module._forward_pre_hooks[number]
    if present.patched is None:
        del module.__dict__["forward"]
    else:
        object.__setattr__(module, "forward", present.patched)


def _check_is_own(module: nn.Module, args: Any) -> None:
    """Before a module's forward, which knows only the module that it was made for: sees a shallow copy of that."""
    forward = vars(module).get("forward")
    if isinstance(forward, TreatedForward) and not forward.is_of(module):
        title = module._get_name()
        raise RuntimeError(
            f"this {title} is a shallow copy of a {title} that is checkpointed or offloaded, and would run the forward "
            "of the original: take copy.deepcopy, or treat the copy by itself, with apply_checkpointing(copy, "
            '"recompute") or "keep" (nn.DataParallel makes such copies, too: take DistributedDataParallel)'
        )


def _is_initialized(module: nn.Module) -> bool:
    return not any(map(is_lazy, chain(module.parameters(), module.buffers())))


def _check_no_transform(module: nn.Module) -> None:
    """Transforms of `torch.func` leave no say in what is saved; torch's own errors speak of its inside."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"a {module._get_name()} is checkpointed or offloaded, which transforms of torch.func (vmap, grad, jvp) "
            "cannot do: call them inside of `with scale_checkpoint.disable_checkpointing():`"
        )
