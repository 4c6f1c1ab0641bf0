"""A simulated accelerator, so that a simulation can tell the device's memory from the host's.

torch leaves one device type open, to vendors of hardware and, in parts that are private, to Python: here it is called
"sim". Its tensors must be fake, since no operator has a kernel for it.

Four things need care. The type is registered in a process for good; between simulations it says that it is not
available. In a backward pass torch asks it for its device while a Python error is on its way out of C++, where no
Python code may run: the process would abort, so the error is taken out there and raised again where the backward pass
was called. And attention falls back to the implementation that makes a T x T matrix, as no real accelerator would: it
is given the fused ones. And `torch.autocast` knows no such device: it is given the casts of CUDA for what a transformer
is made of.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from scale_check.simulate import device_streams
from scale_core import compat

_UNNAMED = "privateuseone"  # torch's name for the type until it is registered

# The error that was on its way out of a backward pass: one at most, since it is on its way to the same handler.
_taken_out: BaseException | None = None
_BACKWARD_THREAD = "simulated backward"
_DO_NOTHING = functools.partial(int)


@contextmanager
def available(backward_thread: bool = False) -> Iterator[torch.device]:
    """A context in which the simulated device is this process's accelerator.

    `backward_thread`: Each backward pass runs in a thread of its own.
    """
    global _taken_out
    compat.require_simulation()
    _register()
    from torch.utils.checkpoint import DefaultDeviceType

    checkpoint_default = DefaultDeviceType._default_device_type
    run_backward = cast(Any, torch.autograd)._engine_run_backward
    attention = torch.library.Library("aten", "IMPL")
    attention.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    others = _register_autocast(attention)
    _module.is_there = True
    cast(Any, torch.autograd)._engine_run_backward = functools.partial(
        _run_backward, functools.partial(_run_in_thread, run_backward) if backward_thread else run_backward
    )
    try:
        with device_streams.generic_names(_module.synchronize):
            yield torch.device(compat.STAND_IN, 0)
    finally:
        cast(Any, torch.autograd)._engine_run_backward = run_backward
        _module.is_there = False
        attention._destroy()
        others._destroy()
        DefaultDeviceType._default_device_type = checkpoint_default
        _taken_out = None


class _Module:
    """The module `torch.sim`: the counterpart of `torch.cuda`."""

    Stream, Event = device_streams.SimulatedStream, device_streams.SimulatedEvent
    current_stream = staticmethod(device_streams.current_stream)
    default_stream = staticmethod(device_streams.default_stream)
    stream = staticmethod(device_streams.on_stream)
    set_stream = staticmethod(device_streams.set_stream)
    worker = device_streams.SimulatedWorker

    def __init__(self) -> None:
        self.is_there = False
        self._initialized = False  # A checkpoint would ask for its random state, of which there is none.

    def is_available(self) -> bool:
        return self.is_there

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None:
        if (order := device_streams.StreamOrder.active) is not None:
            order.synchronize()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False


_module = _Module()


@functools.cache
def _register() -> None:
    """Registers the simulated device type; a process can do so once."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _UNNAMED:
        raise RuntimeError(
            f"a simulation with a device of its own needs the one device type that torch leaves open, and this process "
            f"has given it to '{taken}': simulate in a process that does not load it"
        )
    if torch.cuda.is_available():
        raise RuntimeError(
            "a simulation with a device of its own would take CUDA's place in this process's backward passes for good: "
            "simulate in another process that sees no GPU, started with CUDA_VISIBLE_DEVICES= in its environment"
        )
    # The first backward of a process starts a thread for each device that is known by then; the stand-in needs none,
    # and a process that has such threads can't be forked.
    torch.ones((), device="cpu", requires_grad=True).backward()
    parts: Any = cast(Any, torch._C)._acc
    base_of_guards, base_of_hooks = parts.DeviceGuard, parts.PrivateUse1Hooks
    device_type = cast(Any, torch._C)._autograd.DeviceType.PrivateUse1

    class Guard(base_of_guards):  # type: ignore[misc, valid-type]
        @staticmethod
        def type_() -> Any:
            _take_out_error()
            return device_type

    class Hooks(base_of_hooks):  # type: ignore[misc, valid-type]
        def is_available(self) -> bool:
            return _module.is_available()

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, device_index: int) -> bool:
            return True

    torch.utils.backend_registration.rename_privateuse1_backend(compat.STAND_IN)
    torch._register_device_module(compat.STAND_IN, _module)
    parts.register_python_privateuseone_hook(Hooks())
    parts.register_python_privateuseone_device_guard(Guard())
    device_streams.prepare()


def _take_out_error() -> None:
    """Takes out an error that is on its way through C++, if there is one."""
    # No statement of Python sees it, but a call does that goes through C: it finds an error beside its result, which is
    # an error of its own, with the one that it found as its cause.
    global _taken_out
    try:
        _DO_NOTHING()
    except SystemError as error:
        if error.__cause__ is not None:
            _taken_out = error.__cause__


def _run_backward(run: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a backward pass and raises its error."""
    global _taken_out
    try:
        # torch.inference_mode(False) has set it to True.
        order = device_streams.StreamOrder.active
        with torch.autograd.set_multithreading_enabled(False), nullcontext() if order is None else order.backward():
            return run(*args, **kwargs)
    except SystemError:  # It has failed, and the error that it would say is gone.
        error, _taken_out = _taken_out, None
        if error is None:
            raise
    raise error


def _run_in_thread(run: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a backward pass in a thread of its own, with what the engine of autograd takes along into its threads."""
    if threading.current_thread().name == _BACKWARD_THREAD:  # A pass inside of a pass stays in its thread.
        return run(*args, **kwargs)
    caller = device_streams.frames()
    modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
    saving = compat.saved_tensor_hooks(False)
    outcome: Future[Any] = Future()

    def target() -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if isinstance(saving, tuple):
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*saving))
            for mode in modes:
                stack.enter_context(mode)
            stack.enter_context(device_streams.in_backward_thread(caller))
            try:
                outcome.set_result(run(*args, **kwargs))
            except BaseException as error:
                outcome.set_exception(error)

    thread = threading.Thread(target=target, name=_BACKWARD_THREAD)
    thread.start()
    thread.join()
    return outcome.result()


# Of torch's lists for CUDA: in the dtype of autocast, and in fp32.
_AUTOCAST_LOWER = ("mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention")
_AUTOCAST_FP32 = ("native_layer_norm", "_log_softmax", "_softmax", "nll_loss_forward", "pow.Tensor_Scalar", "rsqrt")


def _register_autocast(library: torch.library.Library) -> torch.library.Library:
    """Registers what `torch.autocast("sim")` does to operators; returns what has to be destroyed with `library`."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, is_lower in ((_AUTOCAST_LOWER, True), (_AUTOCAST_FP32, False)):
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, functools.partial(_run_autocast, operator, is_lower), "AutocastPrivateUse1")
    return others


def _run_autocast(operator: Any, is_lower: bool, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(compat.STAND_IN) if is_lower else torch.float32

    def cast(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if is_cast else value

    keys: Any = torch._C
    with keys._ExcludeDispatchKeyGuard(keys.DispatchKeySet(keys.DispatchKey.AutocastPrivateUse1)):
        return operator(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as CUDA would choose it, [B, H, T, D] each: flash in half precision, else the one that takes masks."""
    operators = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash = operators._scaled_dot_product_flash_attention
        return cast(Tensor, flash(query, key, value, dropout_p, is_causal, scale=scale)[0])
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (each.repeat_interleave(heads // each.shape[-3], -3) for each in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    efficient = operators._scaled_dot_product_efficient_attention
    return cast(Tensor, efficient(query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale)[0])
