"""`ReplicatedParameter`: full on every rank, with an averaged gradient that is divided over the ranks (ZeRO-2).

The class of such a parameter is its state. To torch's functions a `ReplicatedParameter` is a plain parameter, at no
cost. Only its attribute `grad` differs, which shows this rank's part of the averaged gradient. While an all-gather
writes to it, it is an `AwaitedParameter`: a function of torch that needs its values waits first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core import compat
from scale_core.shard import NOT_COPIED, as_local, shard_of, wait_for
from scale_core.sharded_tensor.tensor import ShardedParameter, set_shard
from scale_core.tree import tensors_in

_REDUCED = "_reduced_gradient"
_GRAD: Any = torch.Tensor.grad

unreduced_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
"""Returns the gradient that autograd has accumulated on this rank."""
set_unreduced_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""Sets the gradient to which autograd adds on this rank."""


class ReducedGradient(Protocol):
    """Where the averaged gradient of a parameter is. The parameter carries it."""

    @property
    def name(self) -> str:
        """The name of the parameter in errors."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that steps with it."""

    @property
    def wrapper(self) -> nn.Module | None:
        """The module that averages it; None when that is gone, and the parameter is like any other."""

    def holder(self) -> Tensor:
        """Returns the tensor whose `grad` it is: this rank's part of the parameter.

        Raises:
            RuntimeError: This rank has a gradient that was not averaged yet.
        """

    def read(self) -> Tensor | None:
        """Returns this rank's part, as a `ShardedTensor` in the memory that the optimizer reads."""

    def write(self, grad: Tensor | None) -> Tensor | None:
        """Replaces the averaged gradient; returns `grad` itself if it is this rank's own, which is not averaged yet.

        Raises:
            ValueError: `grad` is divided between the ranks in other places.
        """

    def wait(self) -> None:
        """Returns when the all-gather has written the parameter.

        Raises:
            RuntimeError: It never will.
        """


def reduced_gradient_of(param: Tensor) -> ReducedGradient | None:
    """Returns where the averaged gradient of a parameter is; None where it is in `param.grad`, as autograd left it."""
    reduced: ReducedGradient | None = vars(param).get(_REDUCED)
    return None if reduced is None or reduced.wrapper is None else reduced


class _ReducedGrad:
    """The attribute `grad`, and copies that are parameters of no wrapper."""

    __slots__ = ()
    counterpart: ClassVar[type[nn.Parameter]]  # the class with an all-gather under way, or without

    @property
    def grad(self) -> Tensor | None:
        """This rank's own gradient until it is averaged, then this rank's part of the average."""
        param = cast(Tensor, self)
        grad = unreduced_grad(param)
        if grad is None and (reduced := reduced_gradient_of(param)) is not None and not compat.is_tracing():
            return reduced.read()
        return grad  # A compiler makes a tensor like the parameter, and its gradient with it.

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        param = cast(Tensor, self)
        reduced = reduced_gradient_of(param)
        set_unreduced_grad(param, grad if reduced is None else reduced.write(grad))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _without_wrapper(cast(Tensor, self), copies=True)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _without_wrapper(cast(Tensor, self), copies=False).__reduce_ex__(protocol)


class ReplicatedParameter(_ReducedGrad, nn.Parameter):
    """A parameter under a wrapper that averages its gradient into parts."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl


class ReplicatedShard(_ReducedGrad, ShardedParameter):
    """A `ReplicatedParameter` that its layer divides between other ranks, for example for tensor parallelism."""


class _Awaited:
    """The wait before a function of torch."""

    __slots__ = ()

    def wait_gathered(self) -> None:
        """Returns when the all-gather has written it."""
        vars(self)[_REDUCED].wait()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _WITHOUT_VALUES:
            return super().__torch_function__(func, (), args, kwargs or {})  # type: ignore[misc]  # a mixin
        awaited = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, _Awaited)]
        wait_for(*awaited)
        if not awaited:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)}: got a parameter whose update is still on its way from other "
                "ranks. It can't be waited for here, because it is inside of an object that is not a list, tuple or "
                "dict. Call optimizer.wait() after the step"
            )
        return func(*args, **(kwargs or {}))


class AwaitedParameter(_Awaited, ReplicatedParameter):
    """A parameter to which an all-gather writes."""


class AwaitedShard(_Awaited, ReplicatedShard):
    """A `ReplicatedShard` to which an all-gather writes."""


_REPLICATED: dict[type[Tensor], type[nn.Parameter]] = {
    nn.Parameter: ReplicatedParameter,
    ShardedParameter: ReplicatedShard,
}
ReplicatedParameter.counterpart, AwaitedParameter.counterpart = AwaitedParameter, ReplicatedParameter
ReplicatedShard.counterpart, AwaitedShard.counterpart = AwaitedShard, ReplicatedShard


def set_reduced_gradient(param: Tensor, reduced: ReducedGradient) -> None:
    """Records where the averaged gradient of a parameter is, and has its attribute `grad` show it."""
    vars(param)[_REDUCED] = reduced
    # Parameters of other classes, for example of a user or of a simulation, keep their class.
    param.__class__ = _REPLICATED.get(type(param), type(param))


def can_be_awaited(param: Tensor) -> bool:
    """Whether the class of a parameter can say that an all-gather writes to it."""
    return isinstance(param, _ReducedGrad)


def _without_wrapper(param: Tensor, *, copies: bool) -> nn.Parameter:
    """A parameter with the same values, or a copy of them, and attributes, that no wrapper knows."""
    wait_for(param)
    with as_local():
        values = param.detach()
        other = nn.Parameter(
            values.clone(memory_format=torch.preserve_format) if copies else values, param.requires_grad
        )
        shard = shard_of(param) if copies else None
        if shard is not None:
            set_shard(other, shard)
        if shard is not None or not copies:  # A copy of a plain parameter has no attributes in torch either.
            vars(other).update(
                {name: value for name, value in vars(param).items() if name not in (_REDUCED, *NOT_COPIED)}
            )
    return other


# Functions that need no values of their arguments, and return nothing that has them.
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "requires_grad", "is_leaf", "grad"),
    *("grad_fn", "_version", "output_nr", "retains_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized"),
    *("is_nested", "is_xla", "is_mps", "is_mkldnn", "is_sparse_csr", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "get_device", "__len__", "requires_grad_", "register_hook"),
    *("register_post_accumulate_grad_hook", "is_inference", "is_conj", "is_neg", "has_names"),
)
_WITHOUT_VALUES: frozenset[Callable[..., Any]] = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)),
        *(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)),
        *(getattr(torch, name) for name in ("numel", "is_floating_point", "is_complex", "is_signed")),
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # torch's stubs have plain attributes.
        torch.Tensor.grad.__set__,  # type: ignore[union-attr]
        torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
    )
)
