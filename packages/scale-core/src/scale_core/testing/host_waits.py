"""Counts how often a step would make the host wait for a device, on tensors of a simulation or of the CPU.

A device computes ahead of nobody if the host waits for it: each wait costs the time to fill its queue again. torch's
`torch.cuda.set_sync_debug_mode` counts them on a GPU; this mode counts them where there is none.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scale_core import compat
from scale_core.tree import tensors_in

# Operators whose result the host has to read before it knows the size of the next tensor, or which line runs next.
_ALWAYS = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim")
)
_COPIES = frozenset(("aten::_to_copy", "aten::copy_"))


class HostWaits(TorchDispatchMode):
    """Counts the waits of the host for tensors of one type of device while it is active.

    A wait is a read of a value, for example by `item()`, `torch.equal` or a boolean index, or a blocking copy between
    device and host. On "cpu" there are no such copies: there each tensor is taken for one of a device, and those that
    the library exchanges between ranks on the host are read without an operator, and so are not counted.

    Args:
        device_type: Of the tensors: "sim" in a simulation, or "cpu".

    Attributes:
        places: The line of code of each wait, in order.

    Example:
        >>> import torch
        >>> with HostWaits("cpu") as waits:
        ...     torch.ones(3).sum().item()
        3.0
        >>> len(waits.places)
        1
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[str] = []
        self._device_type = device_type
        self._values_of = compat.values_of

    def __enter__(self) -> Self:
        compat.values_of = self._count_values
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        compat.values_of = self._values_of
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Counts `func` if the host waits in it, and runs it."""
        kwargs = kwargs or {}
        if any(map(compat.is_wrapper, types)):
            return NotImplemented  # Its operators on plain tensors come by afterwards.
        result = func(*args, **kwargs)
        name = func._schema.name
        if name in _ALWAYS or self._is_index_of_booleans(name, args) or self._has_unknown_size(name, args, kwargs):
            waits = any(self._is_on_device(tensor) for tensor in tensors_in(list(args)))
        else:
            waits = name in _COPIES and self._is_blocking_copy(result, args, kwargs)
        if waits:
            self._count()
        return result

    def _count_values(self, tensor: Tensor, *, simulated: list[float]) -> list[float]:
        before = len(self.places)
        values = self._values_of(tensor, simulated=simulated)
        del self.places[before:]  # Operators of the reading itself: it is one wait, of the line that asks for it.
        if self._is_on_device(tensor):
            self._count()
        return values

    def _count(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        frame = next(frame for frame in reversed(frames) if frame.filename != __file__)
        self.places.append(f"{frame.filename.rpartition('/src/')[2]}:{frame.lineno}")

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type

    def _is_index_of_booleans(self, name: str, args: Sequence[Any]) -> bool:
        indexes = name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
        return indexes and any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(list(args[1])))

    def _has_unknown_size(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return name == "aten::repeat_interleave" and kwargs.get("output_size") is None

    def _is_blocking_copy(self, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        source = args[1] if isinstance(args[1] if len(args) > 1 else None, Tensor) else args[0]
        crosses = source.device.type != result.device.type
        is_asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return crosses and self._device_type in (source.device.type, result.device.type) and not is_asynchronous
