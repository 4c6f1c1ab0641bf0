"""The forward of a checkpointed module: an attribute `forward` of the instance, in the place of its class's.

The module stays itself, with its class, its names and its keys. The attribute is below all hooks, so that a module
that gathers its parameters around its forward is not gathered again to recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from scale_checkpoint.offload.offload import offload_activations, offload_inputs
from scale_checkpoint.recompute.recompute import CheckpointConfig, ModuleStats, run_recomputed
from scale_checkpoint.state import STATE


class CheckpointedForward:
    """A module's forward with its activations recomputed or offloaded; copied and pickled with the module."""

    def __init__(self, module: nn.Module, config: CheckpointConfig) -> None:
        # The module's own, as other libraries patch it in; otherwise it is found in the class.
        self.__setstate__((module, config, vars(module).get("forward")))

    def __getstate__(self) -> tuple[nn.Module, CheckpointConfig, Callable[..., Any] | None]:
        return self._owner, self.config, self.patched

    def __setstate__(self, state: tuple[nn.Module, CheckpointConfig, Callable[..., Any] | None]) -> None:
        module, self.config, self.patched = state
        self._module = weakref.ref(module)  # The module holds this; so there is no reference cycle.
        self._stats = ModuleStats()
        self._is_initialized = False  # Until it was seen to be.

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "__name__", "__qualname__") and "_module" in vars(self):
            plain = self._plain_forward(self._owner)
            return plain if name == "__wrapped__" else getattr(plain, name)
        raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, config = self._owner, self.config
        forward = self._plain_forward(module)
        if not torch.is_grad_enabled() or STATE.disabled:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler knows torch's own function, and sees to random numbers and buffers itself.
            if not config.recompute:
                return forward(*args, **kwargs)
            return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
        if not self._is_initialized:
            self._is_initialized = not any(map(is_lazy, chain(module.parameters(), module.buffers())))
            if not self._is_initialized:
                # The first forward of a lazy module makes its parameters and buffers: there is nothing of before to
                # compute it again from, so this one keeps everything.
                return forward(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # torch's own errors speak of its inside.
            raise RuntimeError(
                f"a {module._get_name()} is checkpointed or offloaded, which transforms of torch.func (vmap, grad, "
                "jvp) cannot do: call them inside of `with scale_checkpoint.disable_checkpointing():`"
            )
        if not config.recompute:
            assert config.offload_to is not None
            with offload_activations(module, to=config.offload_to, min_bytes=config.min_bytes):
                return forward(*args, **kwargs)
        if config.offload_to is None:
            return run_recomputed(module, forward, args, kwargs, config, self._stats)
        with offload_inputs(module, config.offload_to, config.min_bytes):
            return run_recomputed(module, forward, args, kwargs, config, self._stats)

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is this module's, and not that of one of which this is a shallow copy."""
        return self._module() is module

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward was deleted: keep the module, and call it")
        return module

    def _plain_forward(self, module: nn.Module) -> Callable[..., Any]:
        return partial(type(module).forward, module) if self.patched is None else self.patched


def get_forward(module: nn.Module) -> CheckpointedForward | None:
    """Returns a module's checkpointed forward; None where its forward is its own or that of another module."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, CheckpointedForward) and forward.is_of(module) else None


def wrap_forward(module: nn.Module, forward: CheckpointedForward) -> None:
    """Sets a checkpointed forward on a module that has none."""
    object.__setattr__(module, "forward", forward)
    if _check_shallow_copy not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_check_shallow_copy)


def unwrap_forward(module: nn.Module) -> None:
    """Puts a module's own forward back, or the one that was patched in before it was wrapped."""
    present = vars(module).get("forward")
    if not isinstance(present, CheckpointedForward):
        return
    if not present.is_of(module):  # A shallow copy shares its hooks with the original, which goes on to need them.
        module.__dict__["_forward_pre_hooks"] = module._forward_pre_hooks.copy()
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _check_shallow_copy]:
        del module._forward_pre_hooks[number]
    if present.patched is None:
        del module.__dict__["forward"]
    else:
        object.__setattr__(module, "forward", present.patched)


def _check_shallow_copy(module: nn.Module, args: Any) -> None:
    """Before a module's forward, which knows only the module that it was made for."""
    forward = vars(module).get("forward")
    if isinstance(forward, CheckpointedForward) and forward._module() is not module:
        title = module._get_name()
        raise RuntimeError(
            f"this {title} is a shallow copy of a {title} that is checkpointed or offloaded, and would run the forward "
            "of the original: take copy.deepcopy, or wrap the copy by itself, with apply_checkpointing(copy, "
            '"recompute") or "keep" (nn.DataParallel makes such copies, too: take DistributedDataParallel)'
        )
