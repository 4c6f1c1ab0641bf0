"""Data parallelism inside a stage: its wrapper reduces gradients once per step, whatever order micro-batches take.

A wrapper that has `no_sync()` is told so for every pass but the stage's last backward. torch's DistributedDataParallel
prepares for one backward after each forward and can't have several micro-batches under way; so all its passes run under
`no_sync()`, and its gradients are averaged here after the last one: the same numbers, sent once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.collectives import all_reduce
from scale_core.group import Group, group_of


class Replicas:
    """The wrappers in a stage that share its gradients with other replicas of the pipeline.

    Args:
        module: The stage's; wrappers may be itself, or inside of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._wrappers = list(_outermost(module))
        self._plain = [one for one in self._wrappers if isinstance(one, DistributedDataParallel)]
        self._own = [one for one in self._wrappers if not isinstance(one, DistributedDataParallel)]

    @property
    def any(self) -> bool:
        """Whether there are any: then hooks of theirs run in the backward pass, which has to be one."""
        return bool(self._wrappers)

    @contextmanager
    def waiting(self, *, quiet: bool) -> Iterator[None]:
        """Around a pass.

        Args:
            quiet: Gradients are not reduced at its end.
        """
        if not self._wrappers:
            yield
            return
        with ExitStack() as stack:
            for wrapper in self._wrappers if quiet else self._plain:
                stack.enter_context(_no_sync(wrapper))
            yield

    def groups(self) -> list[Group]:
        """Between whom gradients are averaged here."""
        return [group_of(one.process_group) for one in self._plain]

    def average(self, limit_seconds: float | None = None) -> None:
        """Averages gradients that nobody else reduces; all replicas call it after the stage's last backward.

        Args:
            limit_seconds: How long to wait for another replica.

        Raises:
            TransferError: One did not come.
        """
        for wrapper, group in zip(self._plain, self.groups(), strict=True):
            alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
            for param in wrapper.parameters():
                if param.requires_grad:
                    alike.setdefault((param.dtype, param.device), []).append(param)
            for params in alike.values():
                _average(params, group, limit_seconds)

    def discard(self) -> None:
        """Drops gradients that wait for their reduction."""
        for wrapper in self._own:
            wrapper.zero_grad()


def reduces_apart(module: nn.Module, param: nn.Parameter) -> bool:
    """Whether a wrapper in a stage reduces the gradient of a parameter by itself, at a time of its own.

    Args:
        module: The stage's.
        param: One of its parameters.
    """
    own = (one for one in _outermost(module) if not isinstance(one, DistributedDataParallel))
    return any(param is other for wrapper in own for other in wrapper.parameters())


def _average(params: list[nn.Parameter], group: Group, limit_seconds: float | None) -> None:
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    grads: list[Tensor] = [param.grad for param in params if param.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(group.size)
    all_reduce(flat, group).wait(limit_seconds)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if callable(getattr(module, "no_sync", None)):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _no_sync(wrapper: Any) -> Any:
    return wrapper.no_sync()
