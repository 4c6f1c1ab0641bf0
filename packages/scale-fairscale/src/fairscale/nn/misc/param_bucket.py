"""`ParamBucket` and `GradBucket`: tensors that get their memory in one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Bucket:
    """A flat tensor [size] that is filled from the front.

    Args:
        size: How many elements it has room for.
        dtype: Theirs.
        device: Theirs.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.buffer = torch.zeros(size, dtype=dtype, device=device)
        self.fill = 0
        self._params: list[Tensor] = []

    def to(
        self,
        device: torch.device | str | None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        keep_param_alignment: bool = True,
    ) -> None:
        """Moves the tensor, and lets what was added show its new memory."""
        self.buffer = self.buffer.to(device, dtype, non_blocking=non_blocking)
        if keep_param_alignment:
            self._reattach()

    def _reattach(self) -> None:
        raise NotImplementedError

    def _check_room(self, tensor: Tensor) -> None:
        left = self.buffer.numel() - self.fill
        assert tensor.numel() <= left, f"the bucket has room for {left} elements, got {tensor.numel()} more"
        assert all(tensor is not other for other in self._params), "The same param cannot be checked in twice"

    def _check_dtype(self, tensor: Tensor) -> None:
        assert tensor.dtype == self.buffer.dtype, (
            f"Different types for the bucket and the param, cannot proceed: {tensor.dtype} and {self.buffer.dtype}"
        )
        assert tensor.device == self.buffer.device, (
            f"Different devices for the bucket and the param, cannot proceed: {tensor.device} and {self.buffer.device}"
        )


class ParamBucket(Bucket):
    """A bucket of tensors, whose values are copied into it."""

    def add_param(self, param: Tensor) -> None:
        """Gives a tensor its memory in the bucket.

        Raises:
            AssertionError: There is no room left, it is there already, or has another dtype or device.
        """
        self._check_dtype(param)
        self._check_room(param)
        part = self.buffer[self.fill : self.fill + param.numel()]
        part.copy_(param.detach().reshape(-1))
        param.data = part.view_as(param)
        self.fill += param.numel()
        self._params.append(param)

    def add_params(self, params: Iterable[Tensor]) -> None:
        """Adds several."""
        for param in params:
            self.add_param(param)

    def _reattach(self) -> None:
        offset = 0
        for param in self._params:
            param.data = self.buffer[offset : offset + param.numel()].view_as(param)
            offset += param.numel()


class GradBucket(Bucket):
    """A bucket of gradients: the gradients of added parameters get their memory in it.

    Args:
        size: As for `Bucket`.
        dtype: As for `Bucket`.
        device: As for `Bucket`.
        destination: A rank, which is kept.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str, destination: int) -> None:
        super().__init__(size, dtype, device)
        self.destination = destination
        self.max_size = size
        self.params_checked_in = 0
        self.sent = True
        self.callback: object = None

    def reset_checked_in(self) -> None:
        """Forgets how many gradients have come."""
        self.params_checked_in = 0
        self.sent = False

    @property
    def all_checked_in(self) -> bool:
        """Whether all gradients have come."""
        return self.params_checked_in == len(self._params)

    def can_add_grad_view(self, param: nn.Parameter) -> bool:
        """Whether there is room for a parameter's gradient, which is not there yet."""
        return self.fill + param.numel() <= self.max_size and all(param is not other for other in self._params)

    @torch.no_grad()
    def add_grad(self, param: nn.Parameter) -> None:
        """Gives a parameter's gradient its memory in the bucket; there it is 0 where it had none."""
        self._check_room(param)
        part = self.buffer[self.fill : self.fill + param.numel()]
        if param.grad is not None:
            part.copy_(param.grad.reshape(-1))
        param.grad = part.view_as(param)
        self.fill += param.numel()
        self._params.append(param)

    def shrink(self) -> None:
        """Frees the memory behind what was added."""
        self.buffer = self.buffer[: self.fill].clone()
        self.max_size = self.fill
        self._reattach()

    def collapse(self) -> None:
        """Frees the memory; the parameters have no gradient then."""
        for param in self._params:
            param.grad = None
        self.buffer = self.buffer.new_empty(0)
        self.fill = 0
        self.params_checked_in = 0

    def rebuild(self) -> None:
        """Makes the memory again, with zeros, after `collapse`."""
        if not self.buffer.numel():
            self.buffer = self.buffer.new_zeros(self.max_size)
            params, self._params = self._params, []
            for param in params:
                self.add_grad(param)  # type: ignore[arg-type]

    def zero(self) -> None:
        """Sets all gradients to 0."""
        self.buffer.zero_()
        self.params_checked_in = 0

    @torch.no_grad()
    def _reattach(self) -> None:
        offset = 0
        for param in self._params:
            param.grad = self.buffer[offset : offset + param.numel()].view_as(param)
            offset += param.numel()


__all__ = ["Bucket", "GradBucket", "ParamBucket"]
