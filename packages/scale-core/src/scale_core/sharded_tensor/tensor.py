"""`ShardedParameter` and `ShardedTensor`: each rank has a part, and they behave as the full tensor.

They are ordinary tensors of this rank's elements with a record, a `Shard`, which says which elements these are. Only
their class differs, so memory, views, autograd and kernels are unchanged. Python calls go through `rules.dispatch`,
which computes the result of the full tensor or raises an error.

Inside `torch._C.DisableTorchFunctionSubclass()` they are plain tensors of this rank's elements. Code that knows about
shards runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from scale_core.shard import NOT_COPIED, Shard, as_local, is_divided_shard, record_shard, shard_of
from scale_core.sharded_tensor import description
from scale_core.sharded_tensor.full_tensor import gather_shard


class ShardedTensor(Tensor):
    """A tensor that is divided over the ranks: a gradient, a state of an optimizer, or a result computed from them.

    Its attributes, for example `shape` and `numel()`, describe the full tensor. A function that computes each element
    by itself returns a `ShardedTensor`. A reduction returns a plain tensor with the result of the full tensor; all
    ranks that share the tensor call it together. Other functions raise `ShardedTensorError`.

    Examples:
        >>> import torch
        >>> from scale_core.sharded_tensor.tensor import ShardedTensor
        >>> issubclass(ShardedTensor, torch.Tensor)  # gradients and optimizer state of sharded parameters
        True

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """

    dispatch: ClassVar[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]]
    """Handles a function of torch. `rules.dispatch` sets it, because the rules make these tensors themselves."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for kind in types:  # A generator would take as long as all else here.
            if hasattr(kind, "wait_gathered"):
                return NotImplemented  # An all-gather writes to a parameter among the arguments, whose class waits.
        return ShardedTensor.dispatch(func, args, kwargs or {})

    def to_local(self) -> Tensor:
        """Returns a plain tensor of this rank's elements, in the same memory."""
        with as_local():
            return _plain(self)

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """Returns a copy of the full tensor on all ranks that share it. They call it together."""
        with as_local():
            return gather_shard(_plain(self.detach()), _record(self))

    @property
    def placements(self) -> tuple[Any, ...]:
        """For each axis of ranks torch's placement: `Shard(dim)`, or `Replicate()`."""
        return description.placements(_record(self))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that share it. Raises ShardedTensorError if its axes are not of one mesh."""
        return description.device_mesh(_record(self))

    def __copy__(self) -> Any:
        with as_local():
            return mark_sharded(_plain(self.detach()), _record(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with as_local():
                memo[id(self)] = mark_sharded(_plain(self.detach()).clone(), _record(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles this rank's elements, as a plain tensor."""
        with as_local():
            return _plain(self).__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # Tensor's own takes keywords that vary
        with as_local():
            return description.describe(type(self).__name__, _plain(self), _record(self))


class ShardedParameter(nn.Parameter):
    """A parameter that is divided over the ranks; see `ShardedTensor`.

    Examples:
        >>> import torch
        >>> from scale_core.sharded_tensor.tensor import ShardedParameter
        >>> issubclass(ShardedParameter, torch.nn.Parameter)  # `model.parameters()` under fully_shard yields these
        True

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """

    __torch_function__ = ShardedTensor.__torch_function__
    __repr__ = ShardedTensor.__repr__  # type: ignore[assignment]  # torch has no types here
    to_local = ShardedTensor.to_local
    full_tensor = ShardedTensor.full_tensor
    placements = ShardedTensor.placements
    device_mesh = ShardedTensor.device_mesh

    def __copy__(self) -> Any:
        with as_local():
            copied = nn.Parameter(_plain(self.detach()), self.requires_grad)
            vars(copied).update({name: value for name, value in vars(self).items() if name not in NOT_COPIED})
            set_shard(copied, _record(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with as_local():
                memo[id(self)] = nn.Parameter(_plain(self.detach()).clone(), self.requires_grad)
                set_shard(memo[id(self)], _record(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles this rank's elements as a plain parameter; the reader says which tensor it is a part of."""
        with as_local():
            plain = nn.Parameter(_plain(self.detach()), self.requires_grad)
            vars(plain).update({name: value for name, value in vars(self).items() if name not in NOT_COPIED})
            return plain.__reduce_ex__(protocol)


def set_shard(param: Tensor, shard: Shard) -> None:
    """Records that `param` is this piece; a plain parameter becomes a `ShardedParameter` if it is divided.

    Examples:
        >>> import torch
        >>> from scale_core.shard import Shard, shard_of
        >>> from scale_core.sharded_tensor.tensor import set_shard
        >>> param = torch.nn.Parameter(torch.ones(2, 3))
        >>> set_shard(param, Shard("weight", (4, 3), 0, 6))  # the first two of four rows
        >>> shard_of(param).stop
        6

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """
    record_shard(param, shard)
    if is_divided_shard(shard):
        if type(param) is nn.Parameter:
            param.__class__ = ShardedParameter
    elif type(param) is ShardedParameter:
        cast(Any, param).__class__ = nn.Parameter


def mark_sharded(tensor: Tensor, shard: Shard) -> Tensor:
    """Makes a plain tensor a `ShardedTensor` with this record, in place, and returns it."""
    if type(tensor) is Tensor and is_divided_shard(shard):
        tensor.__class__ = ShardedTensor
        record_shard(tensor, shard)
    return tensor


def is_sharded(value: object) -> bool:
    """Whether it is a tensor of one of these types.

    Examples:
        >>> import torch
        >>> from scale_core.sharded_tensor.tensor import is_sharded
        >>> is_sharded(torch.nn.Parameter(torch.ones(3)))
        False

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """
    return isinstance(value, ShardedTensor | ShardedParameter)


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the plain tensor of this rank's elements; of a plain tensor itself.

    Examples:
        >>> import torch
        >>> from scale_core.sharded_tensor.tensor import local_tensor
        >>> local_tensor(torch.ones(3))
        tensor([1., 1., 1.])

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def _plain(tensor: Tensor) -> Tensor:
    """The same elements as a plain tensor; inside of `as_local`."""
    plain: Tensor = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
    if type(plain) is not Tensor:
        plain = plain.as_subclass(Tensor)
    return plain


def _record(tensor: Tensor) -> Shard:
    shard = shard_of(tensor)
    assert shard is not None, "a sharded tensor has its record"
    return shard
