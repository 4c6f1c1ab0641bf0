"""Data parallelism inside a stage: its wrapper reduces gradients once per step, whatever order micro-batches take.

A wrapper that has `no_sync()` runs under it in every pass but the stage's last backward. torch's
DistributedDataParallel prepares for one backward after each forward and can't have several micro-batches under way; so
all its passes run under `no_sync()`, and its gradients are averaged here after the last one: the same numbers, sent
once.

A parameter that other stages hold as well (`shared`) needs the sum of all their gradients, and sums over stages and
over replicas may be taken in either order. Where each rank gets a part of the reduced gradient in `param.grad` (FSDP),
the parts are summed after the reduction. Where full gradients wait for a call of `reduce()` (ShardedDataParallel),
they are summed before it. So each element is sent between stages once, and no wrapper has to know of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.comm.collectives import all_reduce, exchange
from scale_core.comm.group import Group, group_of
from scale_core.flat.packing import group_in_buckets
from scale_core.shard import Placement, Ranges, on_local_tensors, shard_of, unit_shard_of

BUCKET_BYTES = 25 << 20
"""Gradients are copied and averaged in buckets of this size, which is also the default of `DistributedDataParallel`."""


class ReduceMode(Enum):
    """When the gradient of a parameter is averaged over the replicas of its stage."""

    NEVER = "there are no replicas"
    IN_BACKWARD = "with the stage's last backward, or right after it"
    ON_CALL = "when `reduce()` of the wrapper is called"


class GradientState(NamedTuple):
    """The content of `param.grad` on a rank after the stage's last backward."""

    reduce_mode: ReduceMode
    groups: tuple[Group, ...]  # whose ranks divide it, or have it in full
    # Elements [start, stop) in the row-major order of the full parameter, or of the part in `ranges`.
    start: int
    stop: int
    numel: int  # of the full parameter
    ranges: Ranges = ()  # of a piece that is no range of elements, the indices of each dimension; empty is all


def outermost_wrappers(module: nn.Module) -> list[nn.Module]:
    """The modules with `no_sync()`, itself or inside of it, but not those inside of one another."""
    if callable(getattr(module, "no_sync", None)):
        return [module]
    return [wrapper for child in module.children() for wrapper in outermost_wrappers(child)]


class DataParallelWrappers:
    """The data-parallel wrappers of a stage; `shared` are its parameters that other stages hold as well."""

    def __init__(self, wrappers: Sequence[nn.Module], shared: Sequence[nn.Parameter] = ()) -> None:
        self._wrappers = list(wrappers)
        self._ddp = [one for one in wrappers if isinstance(one, DistributedDataParallel)]
        self._others = [one for one in wrappers if not isinstance(one, DistributedDataParallel)]
        self._on_call: list[Any] = [one for one in self._others if any(_reduces_on_call(one, p) for p in shared)]
        self.ddp_groups: list[Group] = [group_of(one.process_group) for one in self._ddp]

    @contextmanager
    def no_sync(self, *, skip_reduce: bool) -> Iterator[None]:
        """Enters `no_sync()` of every wrapper, or at the last backward of those that are reduced later."""
        with ExitStack() as stack:
            for wrapper in self._wrappers if skip_reduce else (*self._ddp, *self._on_call):
                stack.enter_context(wrapper.no_sync())  # type: ignore[operator]  # outermost_wrappers has looked
            yield

    @on_local_tensors
    def average_grads(self, limit_seconds: float | None = None) -> None:
        """Averages the gradients of DDP wrappers; all replicas call it after the stage's last backward.

        As under DistributedDataParallel, a parameter that no replica has used keeps its `grad`, mostly None.
        """
        for wrapper, group in zip(self._ddp, self.ddp_groups, strict=True):
            trained = [param for param in wrapper.parameters() if param.requires_grad]
            if not trained:
                continue
            rows = exchange([param.grad is not None for param in trained], group, limit_seconds=limit_seconds)
            buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
            for param, *has_grad in zip(trained, *rows, strict=True):
                if any(has_grad):
                    buckets.setdefault((param.dtype, param.device), []).append(param)
            for params in buckets.values():
                _all_reduce_mean(params, group, limit_seconds)

    @on_local_tensors
    def reduce_deferred(self, *, failed: bool, limit_seconds: float | None = None) -> None:
        """Calls `reduce()` where gradients wait for it, once the gradients of shared parameters are summed."""
        for wrapper in self._on_call:
            if check_all_ok(group_of(wrapper.group), failed=failed, limit_seconds=limit_seconds):
                wrapper.reduce()

    @on_local_tensors
    def discard_grads(self) -> None:
        """Drops gradients that wait for their reduction.

        Wrappers that average into shards of an optimizer are left out, because the shards have gradients of earlier
        steps; the gradients that wait are only in `param.grad`.
        """
        for wrapper in self._others:
            if not hasattr(wrapper, "sharded_optimizers"):
                wrapper.zero_grad()


def check_all_ok(group: Group, *, failed: bool, limit_seconds: float | None = None) -> bool:
    """Whether no replica has aborted the step. Raises RuntimeError if another one has and this rank has not."""
    rows = exchange([failed], group, limit_seconds=limit_seconds)
    others = [rank for rank, row in enumerate(rows) if row[0]]
    if others and not failed:
        raise RuntimeError(f"replicas of this stage failed: ranks {others} of its data-parallel group")
    return not others


@on_local_tensors
def gradient_state(module: nn.Module, param: nn.Parameter) -> GradientState | None:
    """The state of a parameter's gradient after the last backward; None where a wrapper does not tell."""
    shard = shard_of(param)
    axes = () if shard is None else tuple(axis.group for axis in shard.axes if axis.placement is Placement.SHARD)
    groups = tuple(group for group in axes if group.size > 1)
    layout: tuple[int, int, int, Ranges] = (0, param.numel(), param.numel(), ())
    if shard is not None:
        layout = shard.start, shard.stop, shard.numel, shard.ranges
    wrappers = (one for one in outermost_wrappers(module) if any(param is other for other in one.parameters()))
    wrapper = next(wrappers, None)
    if wrapper is None:
        return GradientState(ReduceMode.NEVER, groups, *layout)
    if isinstance(wrapper, DistributedDataParallel):
        return GradientState(ReduceMode.IN_BACKWARD, (*groups, group_of(wrapper.process_group)), *layout)
    if unit_shard_of(param) is not None:
        return GradientState(ReduceMode.IN_BACKWARD, groups, *layout)
    if _reduces_on_call(wrapper, param):
        return GradientState(ReduceMode.ON_CALL, groups, *layout)
    return None


def check_disjoint_wrappers(stages: Mapping[int, nn.Module]) -> None:
    """Refuses two wrappers on one rank that would each reduce the gradient of one parameter (ValueError)."""
    first: dict[int, tuple[int, nn.Module]] = {}
    for index, stage in stages.items():
        for wrapper in outermost_wrappers(stage):
            if isinstance(wrapper, DistributedDataParallel):
                continue  # It reduces nothing itself here.
            for name, param in wrapper.named_parameters():
                other, before = first.setdefault(id(param), (index, wrapper))
                if before is not wrapper:
                    raise ValueError(
                        f"{name} of stage {index} is also a parameter of stage {other} on this rank, and "
                        f"each {type(wrapper).__name__} around them would reduce its gradient. Wrap both in torch's "
                        "DistributedDataParallel, or take a schedule that has these stages on two ranks, such as 1f1b"
                    )


def optimizer_shards(module: nn.Module) -> list[Tensor]:
    """The shards in optimizers that get the averaged gradients of a wrapped stage."""
    shards: dict[int, Tensor] = {}
    for wrapper in outermost_wrappers(module):
        for optimizer in getattr(wrapper, "sharded_optimizers", ()):
            shards.update((id(param), piece) for param, piece in optimizer.grad_holders())
    return [shards[id(param)] for param in module.parameters() if id(param) in shards]


def _reduces_on_call(wrapper: nn.Module, param: nn.Parameter) -> bool:
    """Whether a wrapper keeps full gradients until its `reduce()`, also the gradient of this parameter."""
    waits = callable(getattr(wrapper, "reduce", None)) and hasattr(wrapper, "group") and unit_shard_of(param) is None
    return waits and any(param is other for other in wrapper.parameters())


@on_local_tensors
def _all_reduce_mean(params: list[nn.Parameter], group: Group, limit_seconds: float | None) -> None:
    """Averages the gradients of parameters of one dtype and device, bucket by bucket."""
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    grads: list[Tensor] = [param.grad for param in params if param.grad is not None]
    for indices in group_in_buckets([grad.numel() for grad in grads], BUCKET_BYTES // grads[0].itemsize):
        bucket = [grads[index] for index in indices]
        flat = torch.cat([grad.reshape(-1) for grad in bucket]).div_(group.size)
        all_reduce(flat, group).wait(limit_seconds)
        for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
