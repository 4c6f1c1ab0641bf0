"""The update on the host: scaled gradient, optimizer, cast out, piece by piece while the piece is in the cache.

Each of these alone passes over the whole memory: clipping reads and writes the gradients (8 bytes per parameter), the
optimizer reads and writes everything (28), the copy for the computation reads it once more (6). In pieces that fit a
processor's cache, the optimizer reads what has just been scaled and the copy what has just been written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_fsdp.offload.inner_optimizer import BareOptimizer

PIECE_ELEMENTS = 1 << 22
"""How many elements are updated at once: 16 MiB of fp32, so large that Python's share of the time is small."""

FUSED_MULTIPLE = 64
"""torch's fused kernels compute the last elements of a tensor by another formula. Pieces that end at a multiple of this
have none of them but the parameter's own, so that cutting it changes no bit."""

_CACHED_ELEMENTS = 1 << 18
"""How many go through Adam's kernel at once: what was scaled before, and is cast out after it, is in a cache then."""


class HostPiece(NamedTuple):
    """A part of a parameter on the host.

    Attributes:
        param: Its values, updated in place; any shape.
        grad: Its gradient, of the same shape, on the host, in the same dtype or a narrower one; is left scaled.
        state: What the optimizer remembers of it, of its shape or of none.
        target: Where the new values are cast to, of the same shape on the host; None is nowhere.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    target: Tensor | None = None


class HostStep:
    """Updates pieces on the host, by torch's own fused CPU kernel where the optimizer has one.

    Args:
        optim_cls: The optimizer's class.
        settings: Its constructor's arguments, without the parameters.
    """

    def __init__(self, optim_cls: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self._bare = BareOptimizer(optim_cls, settings)
        self._is_adam = optim_cls in (torch.optim.Adam, torch.optim.AdamW)
        self._scratch: dict[torch.dtype, Tensor] = {}

    def step(self, pieces: Sequence[HostPiece], options: Mapping[str, Any], factor: float = 1.0) -> None:
        """Updates pieces of one group.

        Args:
            pieces: Of one dtype, with gradients of one dtype.
            options: Those of their parameter group.
            factor: What gradients are multiplied by before they are used, as clipping does.
        """
        options = host_options(options, pieces[0].param.dtype)
        if self._is_adam and options["fused"] and all(piece.state for piece in pieces):
            torch._foreach_add_([piece.state["step"] for piece in pieces], 1)
            alone = factor == 1.0 and all(piece.target is None for piece in pieces)
            for some in [pieces] if alone else _cached(pieces):
                _adam(some, self._gradients(some, factor), options)
                _cast_out(some)
        else:
            grads = self._gradients(pieces, factor)
            params = [
                # A parameter's own gradient stays what it is.
                piece.param if grad is piece.grad else piece.param.detach()
                for piece, grad in zip(pieces, grads, strict=True)
            ]
            self._bare.step(params, grads, [piece.state for piece in pieces], options)
            _cast_out(pieces)

    def _gradients(self, pieces: Sequence[HostPiece], factor: float) -> list[Tensor]:
        """The gradients as the optimizer gets them: scaled, in the parameters' dtype and strides."""
        grads, dtype = [laid_out_as(piece.param, piece.grad) for piece in pieces], pieces[0].param.dtype
        if grads[0].dtype != dtype:
            narrow, sizes = grads, [grad.numel() for grad in grads]
            if dtype not in self._scratch or self._scratch[dtype].numel() < sum(sizes):
                self._scratch[dtype] = torch.empty(sum(sizes), dtype=dtype)
            rooms = self._scratch[dtype][: sum(sizes)].split(sizes)
            grads = [room.as_strided(grad.shape, grad.stride()) for room, grad in zip(rooms, narrow, strict=True)]
            torch._foreach_copy_(grads, narrow)
        if factor != 1.0:
            multiply(grads, factor)
        return grads


def multiply(grads: list[Tensor], factor: float) -> None:
    """Multiplies gradients of one device by a number, in a precision that is enough for it.

    A number of Python would be rounded to half precision before, where the gradients are in that.
    """
    torch._foreach_mul_(grads, torch.full((), factor, dtype=torch.float64, device=grads[0].device))


def host_options(options: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns a group's options for tensors on the host: fused, where that can be and the user says nothing else."""
    found = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    if "fused" in found and found["fused"] is None and found.get("foreach") is None:
        found["fused"] = dtype.is_floating_point
    for key, value in found.items():
        if isinstance(value, Tensor):  # A learning rate that is a tensor may stand on the device.
            found[key] = value.to("cpu").reshape(())
    return found


def laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """Returns a tensor with the strides of a parameter, by which fused kernels read all that belongs to it."""
    if tensor.stride() == param.stride() or tensor.numel() < 2:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(tensor)


def _cached(pieces: Sequence[HostPiece]) -> Iterator[list[HostPiece]]:
    """Yields the pieces, cut until they fit a cache; small ones together."""
    some: list[HostPiece] = []
    size = 0
    for piece in pieces:
        numel = piece.param.numel()
        if some and size + numel > _CACHED_ELEMENTS:
            yield some
            some, size = [], 0
        if numel > _CACHED_ELEMENTS and piece.param.is_contiguous():
            yield from ([part] for part in _cut(piece))
        else:
            some.append(piece)
            size += numel
    if some:
        yield some


def _cut(piece: HostPiece) -> Iterator[HostPiece]:
    params, grads = _split(piece.param), _split(piece.grad)
    targets = [None] * len(params) if piece.target is None else _split(piece.target)
    states = {key: _split(value) for key, value in piece.state.items() if key != "step"}
    for number, (param, grad, target) in enumerate(zip(params, grads, targets, strict=True)):
        state = {key: parts[number] for key, parts in states.items()}
        yield HostPiece(param, grad, {**state, "step": piece.state["step"]}, target)


def _split(tensor: Tensor) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = tensor.detach().reshape(-1).split(_CACHED_ELEMENTS)
    return parts


def _adam(pieces: Sequence[HostPiece], grads: list[Tensor], options: Mapping[str, Any]) -> None:
    """Adam and AdamW as torch computes them with `fused=True`, after the step was counted."""
    kernel = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
    states = [piece.state for piece in pieces]
    beta1, beta2 = options["betas"]
    kernel(
        [piece.param for piece in pieces],
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


def _cast_out(pieces: Sequence[HostPiece]) -> None:
    casts = [(piece.target, piece.param) for piece in pieces if piece.target is not None]
    if casts:
        torch._foreach_copy_([target for target, _ in casts], [param for _, param in casts])
