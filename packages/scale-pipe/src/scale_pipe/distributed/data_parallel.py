"""Data parallelism inside a stage: its wrapper reduces gradients once per step, whatever order micro-batches take.

A wrapper that has `no_sync()` is told so for every pass but the stage's last backward. torch's DistributedDataParallel
prepares for one backward after each forward and can't have several micro-batches under way; so all its passes run under
`no_sync()`, and its gradients are averaged here after the last one: the same numbers, sent once.

A parameter that other stages hold as well (`shared`) needs the sum of all their gradients, and sums over stages and
over replicas may be taken in either order. Where each rank gets a part of the reduced gradient in `param.grad` (FSDP),
the parts are added up after the reduction. Where whole gradients wait for a call of `reduce()` (ShardedDataParallel),
they are added up before it. So each element is sent between stages once, and no wrapper has to know of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.comm.collectives import all_reduce
from scale_core.comm.control_plane import exchange
from scale_core.comm.group import Group, group_of
from scale_core.shard import Held, Ranges, shard_of, unit_shard_of


class Reduced(Enum):
    """When the gradient of a parameter is averaged over the replicas of its stage."""

    NEVER = "there are none"
    AT_ONCE = "with the stage's last backward, or right after it"
    ON_CALL = "when `reduce()` of the wrapper is called"


class Standing(NamedTuple):
    """How a parameter's gradient stands on a rank after the stage's last backward.

    Attributes:
        reduced: When it is averaged.
        groups: Between whose ranks it is divided, or of whom each has it whole.
        start: The first element that `param.grad` has here, in the row-major order of the whole parameter, or of what
            `ranges` leave of it.
        stop: One past the last.
        numel: Elements of the whole parameter.
        ranges: Of a piece that is no range of elements, the indices of each dimension; empty is all of them.
    """

    reduced: Reduced
    groups: tuple[Group, ...]
    start: int
    stop: int
    numel: int
    ranges: Ranges = ()


class Replicas:
    """The wrappers in a stage that share its gradients with other replicas of the pipeline.

    Args:
        module: The stage's; wrappers may be itself, or inside of it.
        shared: Parameters that other stages hold as well.
    """

    def __init__(self, module: nn.Module, shared: Sequence[nn.Parameter] = ()) -> None:
        self._wrappers = list(_outermost(module))
        self._plain = [one for one in self._wrappers if isinstance(one, DistributedDataParallel)]
        self._own = [one for one in self._wrappers if not isinstance(one, DistributedDataParallel)]
        self._on_call: list[Any] = [one for one in self._own if any(_reduces_on_call(one, param) for param in shared)]

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
            for wrapper in self._wrappers if quiet else (*self._plain, *self._on_call):
                stack.enter_context(_no_sync(wrapper))
            yield

    def groups(self) -> list[Group]:
        """Between whom gradients are averaged here."""
        return [group_of(one.process_group) for one in self._plain]

    def average(self, limit_seconds: float | None = None) -> None:
        """Averages gradients that nobody else reduces; all replicas call it after the stage's last backward.

        As under DistributedDataParallel, a parameter that no replica has used keeps what it had in `grad`, mostly None.

        Args:
            limit_seconds: How long to wait for another replica.

        Raises:
            TransferError: One did not come.
        """
        for wrapper, group in zip(self._plain, self.groups(), strict=True):
            trained = [param for param in wrapper.parameters() if param.requires_grad]
            if not trained:
                continue
            rows = exchange([param.grad is not None for param in trained], group, limit_seconds=limit_seconds)
            alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
            for param, *has_grad in zip(trained, *rows, strict=True):
                if any(has_grad):
                    alike.setdefault((param.dtype, param.device), []).append(param)
            for params in alike.values():
                _average(params, group, limit_seconds)

    def reduce(self, *, failed: bool, limit_seconds: float | None = None) -> None:
        """Reduces what waits for a call, once the gradients of shared parameters are added up; all replicas call it.

        Args:
            failed: The step was given up here.
            limit_seconds: How long to wait for another replica.

        Raises:
            RuntimeError: It was given up in another replica.
            TransferError: One did not come.
        """
        for wrapper in self._on_call:
            if agree_to_go_on(group_of(wrapper.group), failed=failed, limit_seconds=limit_seconds):
                wrapper.reduce()

    def discard(self) -> None:
        """Drops gradients that wait for their reduction.

        A wrapper that averages into the pieces of an optimizer lets them wait in `param.grad` alone; what it has in the
        pieces is that of earlier steps, too.
        """
        for wrapper in self._own:
            if not hasattr(wrapper, "sharded_optimizers"):
                wrapper.zero_grad()


def agree_to_go_on(group: Group, *, failed: bool, limit_seconds: float | None = None) -> bool:
    """Tells all replicas whether a step was given up here; returns whether it goes on.

    Args:
        group: The replicas of a stage.
        failed: It was given up here.
        limit_seconds: How long to wait for another replica.

    Raises:
        RuntimeError: It was given up in another replica, and not here.
        TransferError: One did not come.
    """
    rows = exchange([failed], group, limit_seconds=limit_seconds)
    others = [rank for rank, row in enumerate(rows) if row[0]]
    if others and not failed:
        raise RuntimeError(f"replicas of this stage failed: ranks {others} of its data-parallel group")
    return not others


def standing_of(module: nn.Module, param: nn.Parameter) -> Standing | None:
    """Returns how a parameter's gradient stands after the last backward; None where a wrapper lets nobody know.

    Args:
        module: The stage's.
        param: One of its parameters.
    """
    shard = shard_of(param)
    axes = () if shard is None else tuple(axis.group for axis in shard.axes if axis.held is Held.SHARD)
    groups = tuple(group for group in axes if group.size > 1)
    place: tuple[int, int, int, Ranges] = (0, param.numel(), param.numel(), ())
    if shard is not None:
        place = shard.start, shard.stop, shard.numel, shard.ranges
    wrapper = next((one for one in _outermost(module) if any(param is other for other in one.parameters())), None)
    if wrapper is None:
        return Standing(Reduced.NEVER, groups, *place)
    if isinstance(wrapper, DistributedDataParallel):
        return Standing(Reduced.AT_ONCE, (*groups, group_of(wrapper.process_group)), *place)
    if unit_shard_of(param) is not None:
        return Standing(Reduced.AT_ONCE, groups, *place)
    if _reduces_on_call(wrapper, param):
        return Standing(Reduced.ON_CALL, groups, *place)
    return None


def check_apart(stages: Mapping[int, nn.Module]) -> None:
    """Checks that no two wrappers of a rank reduce the gradient of one parameter, each by itself.

    Args:
        stages: Of this rank, by number.

    Raises:
        ValueError: They do.
    """
    first: dict[int, tuple[int, nn.Module]] = {}
    for index, stage in stages.items():
        for wrapper in _outermost(stage):
            if isinstance(wrapper, DistributedDataParallel):
                continue  # It reduces nothing itself here.
            for name, param in wrapper.named_parameters():
                other, before = first.setdefault(id(param), (index, wrapper))
                if before is not wrapper:
                    raise ValueError(
                        f"{name} of stage {index} is one parameter with that of stage {other} on the same rank, and "
                        f"each {type(wrapper).__name__} around them would reduce its gradient: wrap both in torch's "
                        "DistributedDataParallel, or take a schedule that has these stages on two ranks, such as 1f1b"
                    )


def gradients_of(module: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each parameter of a stage with what has its averaged gradient: itself, or a piece in an optimizer.

    Args:
        module: The stage's.
    """
    pieces: dict[int, Tensor] = {}
    for wrapper in _outermost(module):
        for optimizer in getattr(wrapper, "sharded_optimizers", ()):
            pieces.update((id(param), piece) for param, piece in optimizer.measured())
    for param in module.parameters():
        yield param, pieces.get(id(param), param)


def _reduces_on_call(wrapper: nn.Module, param: nn.Parameter) -> bool:
    """Whether a wrapper lets whole gradients wait for its `reduce()`, that of this parameter among them."""
    waits = callable(getattr(wrapper, "reduce", None)) and hasattr(wrapper, "group") and unit_shard_of(param) is None
    return waits and any(param is other for other in wrapper.parameters())


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


_WRAPPED = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def plain_names(stage: nn.Module) -> dict[str, str]:
    """Returns by the name of each module that holds tensors its name in the plain model.

    Args:
        stage: A part of a model, whose modules have their own names; wrapped or not.
    """
    names: dict[str, str] = {}
    hidden: set[str] = set()
    for path, module in stage.named_modules(remove_duplicate=False):
        inner = "module" if callable(getattr(module, "no_sync", None)) else _WRAPPED.get(type(module).__name__)
        if inner is not None and inner in module._modules:
            hidden.add(f"{path}.{inner}".lstrip("."))
        parent, _, last = path.rpartition(".")
        known = names.get(parent, "")
        names[path] = known if path in hidden else f"{known}.{last}".lstrip(".") if path else ""
    return names


def plain_name(names: dict[str, str], listed: str) -> str:
    """Returns the plain name of a tensor.

    Args:
        names: Of `plain_names`.
        listed: Its name in the stage.
    """
    path, _, last = listed.rpartition(".")
    return f"{names.get(path, path)}.{last}".lstrip(".")
