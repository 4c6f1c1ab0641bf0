"""Full tensors of a state dict that write through: writes to them reach the shards they were gathered from.

The state dict of a plain module aliases its parameters. Programs rely on it: an average is written through the tensors
of `state_dict()`, and weights are loaded by `own[name].copy_(value)`. A full tensor gathered from shards is a copy, so
these lines would change nothing. A `GatheredTensor` is that copy for torch, with the same memory and kernels. After a
function of torch has written to it, this rank's elements are copied to its shard. All ranks run the same lines, so
nothing is sent.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

_Owner = TypeVar("_Owner")

_plain_tensors = torch._C.DisableTorchFunctionSubclass


class Gather(ABC, Generic[_Owner]):
    """One gather: where the tensors that came from it write to.

    Args:
        owner: The holder of the shards, a flat buffer or a parameter. It is held weakly, because without its model
            there is nothing to write to.
    """

    # Why a write can't reach the shards, and the line to use instead.
    reason: ClassVar[str] = (
        "the model has other values now than when state_dict() was called, because of an optimizer step, a load or a "
        "move, and they would be lost. To write to the model, call state_dict() again. To keep a copy, write "
        "{name: value.clone() for name, value in model.state_dict().items()}"
    )

    def __init__(self, owner: _Owner) -> None:
        self._owner: Callable[[], _Owner | None] = weakref.ref(owner)
        self._version = self.version(owner)

    @abstractmethod
    def version(self, owner: _Owner) -> int:
        """A number that changes whenever the shards are written to or replaced."""

    @abstractmethod
    def local_part(self, owner: _Owner, number: int, full: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's elements of full tensor `number` of the gather, and the shard that they belong to."""

    def load(self, owner: _Owner, number: int, full: Tensor) -> None:
        """Copies this rank's elements out of a full tensor."""
        part, shard = self.local_part(owner, number, full)
        shard.copy_(part)

    def is_of(self, owner: _Owner) -> bool:
        """Whether the tensors were gathered from `owner`, which was not written to since."""
        return self._owner() is owner and self.version(owner) == self._version

    def is_current(self, number: int, full: Tensor) -> bool:
        """Whether the shards still have the values of a full tensor, also where they were written to since."""
        owner = self._owner()
        if owner is None or self.is_of(owner):
            return True
        part, shard = self.local_part(owner, number, full)
        return part.dtype == shard.dtype and part.shape == shard.shape and torch.equal(part.to(shard.device), shard)

    def write(self, number: int, full: Tensor, name: str, *, was_current: bool) -> None:
        """Writes a full tensor to the shards.

        Raises:
            RuntimeError: These had other values than it before, which its old values would overwrite.
        """
        owner = self._owner()
        if owner is None:
            return
        is_unchanged = self.is_of(owner)
        if not (was_current or is_unchanged):
            raise RuntimeError(f"'{name}' of a state dict was written to, but {self.reason}")
        with torch.no_grad():
            self.load(owner, number, full)
        if is_unchanged:
            self._version = self.version(owner)


class ConvertedCopy(Gather[Tensor]):
    """A copy of one tensor in another dtype or on another device."""

    def __init__(self, owner: Tensor) -> None:
        super().__init__(owner)
        self._owner = lambda: owner  # It may be one of many aliases of the model's tensor, which nobody else keeps.

    def version(self, owner: Tensor) -> int:
        return version_of(owner)

    def local_part(self, owner: Tensor, number: int, full: Tensor) -> tuple[Tensor, Tensor]:
        return full.to(owner.device, owner.dtype), owner


class Source(NamedTuple):
    """Where a tensor was gathered from; views of it have the same."""

    gather: Gather[Any]
    number: int  # In the gather
    name: str
    full: Tensor  # All of it, as a plain tensor over the same memory

    def is_current(self) -> bool:
        """Whether the shards have its values."""
        return self.gather.is_current(self.number, self.full)

    def write(self, *, was_current: bool) -> None:
        """Writes the full tensor to the shards, which had its values before, or are unchanged since the gather."""
        self.gather.write(self.number, self.full, self.name, was_current=was_current)


class GatheredTensor(Tensor):
    """A full tensor that a state dict hands out, or a view of one.

    To torch it is the plain tensor with the same memory. Writes of torch's functions to it are writes to the model,
    as in plain PyTorch, where a state dict aliases the parameters. Views, `detach()`, `.data` and conversions that
    return the tensor itself write through as well; results with memory of their own are plain tensors. The copies of
    `copy.deepcopy`, pickle and `torch.save` are plain tensors. `nn.Parameter(tensor)` is a parameter of its own, which
    trains without the model. A numpy array of it is read-only, because torch does not see writes of numpy.
    """

    source: Source

    @staticmethod
    def of(full: Tensor, gather: Gather[Any], number: int, name: str) -> GatheredTensor:
        """Makes a full tensor, which nobody else has, one that writes through; `name` is for errors."""
        if full.is_inference():  # These count no versions, by which writes are seen.
            with torch.inference_mode(False):
                full = full.clone()
        with _plain_tensors():
            return _connected(full, Source(gather, number, name, full.detach()))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        only_ours = all(issubclass(kind, GatheredTensor) for kind in types)
        with _plain_tensors():
            tensors = list(_gathered_in((args, kwargs)))
            versions = [tensor._version for tensor in tensors]
            current = {id(tensor) for tensor in tensors if _writes(func, kwargs) and tensor.source.is_current()}
            if only_ours:
                result = func(*args, **kwargs)
        if not only_ours:  # The other types have a say as well.
            with _plain_tensors():
                args, kwargs = _with_plain(args), _with_plain(kwargs)
            result = func(*args, **kwargs)
        with _plain_tensors():
            written = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version]
            for tensor in written or _written_without_version(func, args, result):
                if _shares_memory(tensor, tensor.source.full):
                    tensor.source.write(was_current=id(tensor) in current)
            return _with_aliases(result, tensors) if tensors else result

    def full_tensor(self) -> Tensor:
        """Returns a plain tensor over the same memory, as programs for FSDP2 ask for; nothing is sent."""
        return plain_tensor(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(plain_tensor(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_tensor(self).__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # Tensor's own takes keywords that vary
        return str(plain_tensor(self).__repr__(**kwargs))


def plain_tensor(tensor: Tensor) -> Tensor:
    """Returns a plain tensor over the memory of one that may write through; writes to it stay there."""
    if not isinstance(tensor, GatheredTensor) or _made_parameter(tensor):
        return tensor
    with _plain_tensors():
        return tensor.detach().requires_grad_(tensor.requires_grad)


def converted(tensor: Tensor, name: str, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Returns a model's tensor in a different dtype or on a different device; writes to it also write to the model."""
    result = tensor.to(device=device, dtype=dtype)
    return result if result is tensor else GatheredTensor.of(result, ConvertedCopy(tensor), 0, name)


def version_of(tensor: Tensor) -> int:
    """Returns the number of writes to a tensor; 0 of an inference tensor, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _connected(tensor: Tensor, source: Source) -> GatheredTensor:
    """Makes a plain tensor over the memory of a source one that writes through, in place."""
    tensor.__class__ = GatheredTensor
    result = cast(GatheredTensor, tensor)
    result.source = source
    return result


def _made_parameter(tensor: GatheredTensor) -> bool:
    """Makes a result of `nn.Parameter(tensor)` a plain parameter, and says whether it was one."""
    if not vars(tensor).pop("_is_param", False):  # torch sets it on parameters of other types than its own.
        return False
    del tensor.source
    tensor.__class__ = nn.Parameter  # type: ignore[assignment]  # As torch allows for types of one layout
    return True


def _gathered_in(tree: Any) -> Iterator[GatheredTensor]:
    """The tensors in arguments that write through, each once."""
    if isinstance(tree, GatheredTensor):
        if not _made_parameter(tree):
            yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _gathered_in(part)
    elif isinstance(tree, dict):
        yield from _gathered_in(tuple(tree.values()))


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to its arguments, by its name."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and name[:2] != "__") or name == "__setitem__" or "out" in kwargs


def _written_without_version(func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Iterator[GatheredTensor]:
    """The tensors that a fused optimizer or a collective has written to, which count no version."""
    name = getattr(func, "__name__", "")
    if name.startswith("_fused_"):
        yield from _gathered_in(args)
    elif getattr(func, "__module__", "") == "torch.distributed.distributed_c10d" and name not in ("send", "isend"):
        if hasattr(result, "wait"):  # `async_op=True`: the values are there now, and not when the program waits.
            result.wait()
        yield from _gathered_in(args[1:] if name == "gather" else args[:1])


def _with_plain(tree: Any) -> Any:
    """The arguments with plain tensors; autograd sees them as views."""
    if isinstance(tree, GatheredTensor):
        return tree.as_subclass(Tensor)
    if type(tree) in (list, tuple):
        return type(tree)(map(_with_plain, tree))
    return {key: _with_plain(value) for key, value in tree.items()} if type(tree) is dict else tree


def _with_aliases(result: Any, tensors: list[GatheredTensor]) -> Any:
    """The result of a function; one that shares memory with one of the tensors writes through as that does."""
    if type(result) is Tensor:
        for tensor in tensors:
            if _shares_memory(result, tensor):
                return _connected(result, tensor.source)
    elif type(result) in (list, tuple):
        return type(result)([_with_aliases(part, tensors) for part in result])
    elif type(result).__name__ == "ndarray" and not result.flags.owndata:
        result.flags.writeable = False
    return result


def _shares_memory(tensor: Tensor, other: Tensor) -> bool:
    has_memory = torch._C._has_storage(tensor) and torch._C._has_storage(other)
    return has_memory and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
