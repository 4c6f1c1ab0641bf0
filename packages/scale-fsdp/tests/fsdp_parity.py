"""Compares sharded models with plain ones on ranks.

The plain side computes each rank's gradient alone, sums in rank order and divides by the number of ranks, for each
backward pass by itself. A parameter that only some ranks use counts as zeros on the others; one that none uses has no
gradient. Both sides are compared to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from shard_arguments import shard_arguments
from torch import Tensor, nn

from scale_check.exact import assert_equal, assert_tensors_equal
from scale_check.recording import Phase
from scale_core import compat
from scale_core.comm.group import GroupLike, group_of
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import MixedPrecisionPolicy, fully_shard
from scale_fsdp.runtime.unit import units_in

Step = Callable[[nn.Module, int, int], Iterable[Tensor]]  # The losses of a step, of a model, a rank and its number
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
FULL_PRECISION = MixedPrecisionPolicy()


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same on every rank for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def sharded(plain: nn.Module, units: Sequence[str], process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
    """Returns a sharded copy, whose modules of these names are wrapped in this order; "" is the model itself."""
    model = copy.deepcopy(plain)
    for name in units:
        fully_shard(model.get_submodule(name), process_group, **shard_arguments(**kwargs))
    return model


# Comparisons.


def assert_same_grads(model: nn.Module, plain: nn.Module, what: object = "") -> None:
    """Compares each local gradient with that part of the plain model's gradient."""
    ours, theirs = {}, {}
    full_grads = {name: param.grad for name, param in plain.named_parameters(remove_duplicate=False)}
    for name, start, stop, grad in _local_grads(model):
        full = full_grads[name]
        assert (full is None) == (grad is None), f"{what}: gradient of {name}: {grad} and in the plain model {full}"
        if full is not None and grad is not None:
            ours[name], theirs[name] = grad, full.reshape(-1)[start:stop]
    assert_tensors_equal(ours, theirs, Phase.GRADIENT, what)


def _local_grads(model: nn.Module) -> Iterator[tuple[str, int, int, Tensor | None]]:
    """Yields each parameter's name, its range on this rank and the gradient [stop - start] of that range."""
    for name, param in model.named_parameters():
        if not name.rpartition(".")[2].startswith("flat_param_"):
            shard = shard_of(param)
            assert shard is not None
            yield name, shard.start, shard.stop, None if param.grad is None else local_tensor(param.grad).reshape(-1)
    for buffer in (buffer for unit in units_in(model) for buffer in unit.buffers if buffer.flatten):
        grad = buffer.sharded_params[0].grad
        for name, span in zip(buffer.names, buffer.spans, strict=True):
            local = None if grad is None else local_tensor(grad).narrow(0, span.shard_offset, span.numel)
            yield name, span.start, span.stop, local


# Training of both sides.


def put_mean_grads(
    plain: nn.Module,
    step: Step,
    number: int,
    world: int,
    precision: MixedPrecisionPolicy = FULL_PRECISION,
    *,
    replicas: int = 1,
    no_sync: bool = False,
) -> list[list[float]]:
    """Puts the gradient that all ranks average into the plain model; returns the losses, by rank and backward pass.

    Args:
        replicas: Copies of the model among the ranks; averages are taken in each, then of those.
        no_sync: Whether the passes of a step are summed on each rank before they are averaged.
    """
    ranks = [_losses_and_grads(plain, step, rank, number, precision) for rank in range(world)]
    for name, param in plain.named_parameters():
        param.grad = None
        by_rank = [[grads.get(name) for _, grads in passes] for passes in ranks]
        if no_sync:
            by_rank = [[_sum([grad.to(param.dtype) for grad in grads if grad is not None])] for grads in by_rank]
        for grads in zip(*by_rank, strict=True):
            if any(grad is not None for grad in grads):
                default = None if compat.reduces_in_param_dtype() else precision.param_dtype
                wire = precision.reduce_dtype or default or param.dtype
                summands = [torch.zeros_like(param) if g is None else g.to(wire).to(param.dtype) for g in grads]
                size = world // replicas
                mean = _mean([_mean(summands[first : first + size]) for first in range(0, world, size)])
                param.grad = mean if param.grad is None else param.grad + mean
    return [[loss for loss, _ in passes] for passes in ranks]


def _losses_and_grads(
    plain: nn.Module, step: Step, rank: int, number: int, precision: MixedPrecisionPolicy
) -> list[tuple[float, dict[str, Tensor]]]:
    """Of each backward pass of one rank, computed in the policy's dtypes."""
    replica, passes = copy.deepcopy(plain), []
    if precision.param_dtype is not None:
        for param in replica.parameters():
            param.data = param.data.to(precision.param_dtype)
        replica.register_forward_pre_hook(lambda _, args: tuple(_cast(arg, precision.param_dtype) for arg in args))
    if precision.output_dtype is not None:
        replica.register_forward_hook(lambda module, args, output: _cast(output, precision.output_dtype))
    for loss in step(replica, rank, number):
        loss.backward()
        passes.append((loss.item(), {name: p.grad for name, p in replica.named_parameters() if p.grad is not None}))
        replica.zero_grad()
    return passes


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return _sum(tensors) / len(tensors) if len(tensors) > 1 else tensors[0]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def assert_trains_as_plain(
    plain: nn.Module,
    units: Sequence[str],
    step: Step,
    *,
    steps: int = 3,
    optimizers: Sequence[MakeOptimizer] = (adam, sgd),
    before_step: Callable[[nn.Module, int], None] = lambda model, number: None,
    process_group: GroupLike = None,
    **options: Any,
) -> None:
    """Trains a copy of a model that is sharded at some units, and the plain one; compares each step to the bit.

    Args:
        units: As for `sharded`.
        step: Yields the losses of one step; a backward follows each.
        optimizers: To train with, one after the other.
        before_step: Called with each of the two models before each step.
        options: Of `fully_shard`.
    """
    group = group_of(process_group)
    for make in optimizers:
        own_plain = copy.deepcopy(plain)
        model = sharded(own_plain, units, process_group, **options)
        both = [make(p for p in each.parameters() if p.is_floating_point()) for each in (model, own_plain)]
        for number in range(steps):
            what = f"{make.__name__}, step {number}, units {units}, {options}"
            for each in (model, own_plain):
                before_step(each, number)
            expected = put_mean_grads(own_plain, step, number, group.size)[group.rank]
            losses = []
            for loss in step(model, group.rank, number):
                loss.backward()
                losses.append(loss.item())
            assert losses == expected, what
            assert_same_grads(model, own_plain, what)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(model, own_plain, what)


def mean_square(*shape: int) -> Step:
    """The step that runs a model once on noise of this shape."""

    def step(model: nn.Module, rank: int, number: int) -> Iterable[Tensor]:
        yield model(noise(*shape, seed=100 * number + rank)).square().mean()

    return step
