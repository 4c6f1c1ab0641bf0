"""The attribute in place of a parameter that is part of a flat tensor (`flatten_parameters=True`)."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from scale_core.flat.buffer import FlatBuffer
from scale_core.records import Record
from scale_core.shard import title_of


class FlattenedParameter:
    """`module.weight` outside of passes: the shape and dtype of the full parameter, and no values.

    So `module.bias is not None` holds where the module has a bias, as printing it asks; all else raises an error.
    """

    def __init__(self, buffer: FlatBuffer, number: int) -> None:
        self._buffer, self._number = buffer, number

    @property
    def shape(self) -> torch.Size:
        """Of the full parameter."""
        return torch.Size(self._buffer.layout.entries[self._number].shape)

    @property
    def ndim(self) -> int:
        """Of the full parameter."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the shards."""
        return self._buffer.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the flat parameter trains."""
        return self._buffer.sharded_param(self._number).requires_grad

    def __repr__(self) -> str:
        return f"FlattenedParameter({self._buffer.names[self._number]!r}, shape={tuple(self.shape)})"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # Asked of any object, for example by copy.
            raise AttributeError(attribute)
        raise AttributeError(self._error(f"has no {attribute!r}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return flattened_parameter, (self._buffer, self._number)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses to be computed with."""
        arguments = [*args, *(kwargs or {}).values()]
        parameter = next((argument for argument in arguments if isinstance(argument, cls)), None)
        called = getattr(func, "__name__", str(func))
        if parameter is None:
            raise TypeError(f"{called}: got a FlattenedParameter, which has no values outside of its unit's forward")
        raise RuntimeError(parameter._error(f"can't be given to {called}"))

    def _error(self, what: str) -> str:
        return (
            f"'{self._buffer.names[self._number]}' {what}: outside of its unit's forward and backward it is a part of "
            f"{title_of(self._buffer.sharded_params[0])}, since the module was sharded with flatten_parameters=True. "
            "Write with model.summon_full_params(): around this, or shard with flatten_parameters=False"
        )


class _FlattenedParameters(Record):
    """The `FlattenedParameter`s of a flat buffer, by index."""

    attribute = "_scale_flattened"

    def __init__(self) -> None:
        self.by_number: WeakValueDictionary[int, FlattenedParameter] = WeakValueDictionary()


def flattened_parameter(buffer: FlatBuffer, number: int) -> FlattenedParameter:
    """Returns one object for all places of a parameter, so that it can be seen to be tied."""
    by_number = _FlattenedParameters.get_or_create(buffer).by_number
    param = by_number.get(number)
    if param is None:
        param = by_number[number] = FlattenedParameter(buffer, number)
    return param


def flat_param_name(number: int) -> str:
    """Returns the name under which a module holds the flat parameter of one buffer."""
    return f"flat_param_{number}"
