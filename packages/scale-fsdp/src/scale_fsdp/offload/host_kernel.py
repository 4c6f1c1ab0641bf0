"""Optimizer update on the host in chunks that fit a processor's cache: scale gradients, update, cast the new values.

Each of these alone passes over all of the memory: clipping reads and writes the gradients (8 bytes per parameter), the
optimizer reads and writes everything (28), the copy for the computation reads it once more (6). In chunks that fit the
cache, the optimizer reads values that have just been scaled, and the copy reads values that have just been written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNK_ELEMENTS = 1 << 22  # elements of one update: 16 MiB of fp32, so that Python's share of the time is small

# torch's fused kernels compute the last elements of a tensor by another formula. Chunks that end at a multiple of this
# have no such elements but the parameter's own, so that splitting changes no bit.
FUSED_MULTIPLE = 64

_CACHED_ELEMENTS = 1 << 18  # elements of one call of Adam's kernel: scaled gradients and cast values stay in a cache


class InnerOptimizer:
    """A torch optimizer without parameters, state and hooks of its own: many calls are one step of the user's."""

    def __init__(self, optim_cls: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self._optim_cls, self._settings = optim_cls, dict(settings)
        self._optimizer = self._build([torch.zeros(1, 1)], {})  # Muon takes only matrices.
        self._state_from_init = bool(self._optimizer.state)

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of a group that sets none."""
        return dict(self._optimizer.defaults)

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        """Updates leaf tensors and their states in place; an empty state is filled."""
        for param, grad in zip(params, grads, strict=True):
            if param.grad is not grad:
                param.grad = grad
        states_of = dict(zip(params, states, strict=True))
        if self._state_from_init and (new := [param for param, state in states_of.items() if not state]):
            new_state = self._build(new, options).state  # As Adagrad's; others make theirs in their first step.
            for param in new:
                states_of[param].update(new_state[param])
        self._optimizer.param_groups = [{**options, "params": list(params)}]
        self._optimizer.state = defaultdict(dict, states_of)
        step = type(self._optimizer).step  # Hooks belong to the user's optimizer, and this is a part of its step.
        getattr(step, "__wrapped__", step)(self._optimizer)
        self._optimizer.param_groups, self._optimizer.state = [], defaultdict(dict)

    def fill_options(self, groups: list[dict[str, Any]]) -> None:
        """Gives loaded groups the options that older versions of the optimizer did not save."""
        self._optimizer.__setstate__({"state": defaultdict(dict), "param_groups": groups})
        self._optimizer.param_groups = []

    def _build(self, params: list[Tensor], options: Mapping[str, Any]) -> Optimizer:
        return self._optim_cls([{**options, "params": params}], **self._settings)


class HostChunk(NamedTuple):
    """A range of a parameter's elements on the host; all tensors have one shape."""

    param: Tensor  # updated in place
    grad: Tensor  # in the dtype of `param` or a narrower one; left scaled
    state: dict[str, Any]  # tensors of `param`'s shape, and numbers
    cast_target: Tensor | None = None  # where the new values are cast to


class HostKernel:
    """Updates chunks on the host, with torch's fused CPU kernel where the optimizer has one."""

    def __init__(self, optim_cls: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self._inner = InnerOptimizer(optim_cls, settings)
        self._is_adam = optim_cls in (torch.optim.Adam, torch.optim.AdamW)
        self._scratch: dict[torch.dtype, Tensor] = {}

    def step(self, chunks: Sequence[HostChunk], options: Mapping[str, Any], factor: float = 1.0) -> None:
        """Updates chunks of one group, param dtype and gradient dtype, with gradients multiplied by `factor`."""
        options = host_options(options, chunks[0].param.dtype)
        if self._is_adam and options["fused"] and all(chunk.state for chunk in chunks):
            torch._foreach_add_([chunk.state["step"] for chunk in chunks], 1)
            in_one_pass = factor == 1.0 and all(chunk.cast_target is None for chunk in chunks)
            for group in [chunks] if in_one_pass else _in_cache_sizes(chunks):
                _adam(group, self._gradients(group, factor), options)
                _write_casts(group)
        else:
            grads = self._gradients(chunks, factor)
            params = [
                # A parameter's own gradient stays as it is.
                chunk.param if grad is chunk.grad else chunk.param.detach()
                for chunk, grad in zip(chunks, grads, strict=True)
            ]
            self._inner.step(params, grads, [chunk.state for chunk in chunks], options)
            _write_casts(chunks)

    def _gradients(self, chunks: Sequence[HostChunk], factor: float) -> list[Tensor]:
        """Gradients as the optimizer gets them: scaled, in the parameters' dtype and strides."""
        grads, dtype = [with_strides_of(chunk.param, chunk.grad) for chunk in chunks], chunks[0].param.dtype
        if grads[0].dtype != dtype:
            listed_grads, sizes = grads, [grad.numel() for grad in grads]
            if dtype not in self._scratch or self._scratch[dtype].numel() < sum(sizes):
                self._scratch[dtype] = torch.empty(sum(sizes), dtype=dtype)
            targets = self._scratch[dtype][: sum(sizes)].split(sizes)
            grads = [
                target.as_strided(grad.shape, grad.stride()) for target, grad in zip(targets, listed_grads, strict=True)
            ]
            torch._foreach_copy_(grads, listed_grads)
        if factor != 1.0:
            scale_grads(grads, factor)
        return grads


def scale_grads(grads: list[Tensor], factor: float) -> None:
    """Multiplies gradients of one device by a number."""
    # A Python number would be rounded to the dtype of the gradients first.
    torch._foreach_mul_(grads, torch.full((), factor, dtype=torch.float64, device=grads[0].device))


def host_options(options: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Options of a group for tensors on the host: `fused` unless the user chose `fused` or `foreach`."""
    host_values = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    if "fused" in host_values and host_values["fused"] is None and host_values.get("foreach") is None:
        host_values["fused"] = dtype.is_floating_point
    for key, value in host_values.items():
        if isinstance(value, Tensor):  # a learning rate on the device
            host_values[key] = value.to("cpu").reshape(())
    return host_values


def with_strides_of(param: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, in the strides of a parameter: fused kernels walk through memory, not through indices."""
    if tensor.stride() == param.stride() or tensor.numel() < 2:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(tensor)


def _in_cache_sizes(chunks: Sequence[HostChunk]) -> Iterator[list[HostChunk]]:
    """Yields the chunks split to the size of a cache; small ones are grouped."""
    group: list[HostChunk] = []
    size = 0
    for chunk in chunks:
        numel = chunk.param.numel()
        if group and size + numel > _CACHED_ELEMENTS:
            yield group
            group, size = [], 0
        if numel > _CACHED_ELEMENTS and chunk.param.is_contiguous():
            yield from ([part] for part in _split_chunk(chunk))
        else:
            group.append(chunk)
            size += numel
    if group:
        yield group


def _split_chunk(chunk: HostChunk) -> Iterator[HostChunk]:
    params, grads = _split(chunk.param), _split(chunk.grad)
    targets = [None] * len(params) if chunk.cast_target is None else _split(chunk.cast_target)
    states = {key: _split(value) for key, value in chunk.state.items() if key != "step"}
    for number, (param, grad, target) in enumerate(zip(params, grads, targets, strict=True)):
        state = {key: parts[number] for key, parts in states.items()}
        yield HostChunk(param, grad, {**state, "step": chunk.state["step"]}, target)


def _split(tensor: Tensor) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = tensor.detach().reshape(-1).split(_CACHED_ELEMENTS)
    return parts


def _adam(chunks: Sequence[HostChunk], grads: list[Tensor], options: Mapping[str, Any]) -> None:
    """Adam or AdamW as torch computes it with `fused=True`; the caller has counted the step."""
    kernel = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
    states = [chunk.state for chunk in chunks]
    beta1, beta2 = options["betas"]
    kernel(
        [chunk.param for chunk in chunks],
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if options["amsgrad"] else [],
        [state["step"] for state in states],
        amsgrad=options["amsgrad"],
        lr=options["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=options["maximize"],
    )


def _write_casts(chunks: Sequence[HostChunk]) -> None:
    casts = [(chunk.cast_target, chunk.param) for chunk in chunks if chunk.cast_target is not None]
    if casts:
        torch._foreach_copy_([target for target, _ in casts], [param for _, param in casts])
