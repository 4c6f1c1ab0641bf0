"""The modes of the thread that calls a pipeline, in the threads that issue the work of accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from scale_checkpoint import disable_checkpointing
from scale_checkpoint import state as phase
from scale_core.device.rng import only_device

R = TypeVar("R")


class CallerContext:
    """The modes of the calling thread, which another thread would not have.

    Grad and inference mode, autocast, the default device, hooks for saved tensors, switches of checkpointing, and the
    current stream of each device. Generators of random numbers belong to the process, whatever the thread. A
    recomputation draws again only from the generators of the host and of the task's device, since others belong to
    other threads. (If several threads draw from the host's at the same time, the order can't be repeated.)

    Raises RuntimeError under a dispatch mode, because it sees only the operators of its own thread.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = list(devices)
        modes: list[Any] = list(_get_current_dispatch_mode_stack())
        modes += [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
        if modes:
            names = " and ".join(dict.fromkeys(type(mode).__name__ for mode in modes))
            raise RuntimeError(
                f"{names} is active around the pipeline and sees the operators of one thread alone, but each "
                "accelerator has a thread of its own, whose operators it would miss. Call the pipeline outside of it, "
                'or put such a mode into a layer, or make the pipeline of devices=["cpu"] * n to look at it'
            )
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(["cpu", *(device.type for device in devices)])
            if torch.amp.is_autocast_available(kind)
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()
        self._saving = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._phase = phase.is_checkpointing(), phase.is_recomputing(), phase.is_disabled()
        self._streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]

    def call(self, device: torch.device, task: Callable[[], R]) -> R:
        """Runs a task on a device with these modes."""
        with ExitStack() as stack:
            for context in self._contexts(device):
                stack.enter_context(context)
            return task()

    def _contexts(self, device: torch.device) -> Iterable[AbstractContextManager[Any]]:
        yield only_device(device)
        yield torch.inference_mode(self._inference)
        yield torch.set_grad_enabled(self._grad)
        for kind, dtype, enabled in self._autocast:
            yield torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._autocast_cache)
        if self._default_device.type != "cpu":
            yield self._default_device
        if self._saving is not None:
            yield torch.autograd.graph.saved_tensors_hooks(*self._saving)
        checkpointing, recomputing, disabled = self._phase
        if recomputing:
            yield phase.recomputing()
        if checkpointing:
            yield phase.checkpointing()
        if disabled:
            yield disable_checkpointing()
        for stream in self._streams:
            yield torch.cuda.stream(stream)
        if device.type == "cuda":
            yield torch.cuda.device(device)
