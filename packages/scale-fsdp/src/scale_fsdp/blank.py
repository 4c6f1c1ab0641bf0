"""Memory that was allocated and not written to: found before somebody computes with it.

What comes from the meta device has no values. torch fills its memory later, by an initialisation or a checkpoint, and
says nothing where either of them leaves something out: what `__init__` has computed for a buffer is in no checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.events import unit_title
from scale_core.flat import FlatBuffer

if TYPE_CHECKING:  # unit.py stands on what asks here.
    from scale_fsdp.unit import Unit


class Blank(NamedTuple):
    """Memory that something must still be written to.

    Attributes:
        tensor: The memory: NaN throughout, where its dtype knows that.
        version: Of the tensor, before anybody wrote to it.
    """

    tensor: Tensor
    version: int

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> Blank:
        if tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.fill_(torch.nan)
        return cls(tensor, tensor._version)

    def is_filled(self, now: Tensor | None) -> bool:
        """Whether what stands in its place now is another tensor, or the same one with something written to it."""
        if now is not self.tensor or not self.tensor.numel() or self.tensor._version != self.version:
            return now is not None and not now.is_meta
        # A write to `tensor.data` leaves no trace but the values; a simulation has none to look at.
        if not self.tensor.is_floating_point() or self.tensor.itemsize == 1:
            return False
        return compat.active_fake_mode() is not None or not bool(self.tensor.isnan().all())


# What `to_empty` has given memory to, until somebody has written to it: buffers, by module and attribute, and shards.
_blank_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, Blank]] = weakref.WeakKeyDictionary()
_blank_shards: weakref.WeakKeyDictionary[FlatBuffer, int] = weakref.WeakKeyDictionary()


def note_blank_buffers(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Records which buffers of a module have got memory in place of none, and no values with it.

    Args:
        module: The module.
        before: Its buffers, as they were.
    """
    for name, old in before.items():
        now = module._buffers.get(name)
        if old is not None and old.is_meta and now is not None and not now.is_meta:
            _blank_buffers.setdefault(module, {})[name] = Blank.of(now)


def note_blank_shard(buffer: FlatBuffer) -> None:
    """Records that the shard of a flat buffer has got memory in place of none, and no values with it."""
    Blank.of(buffer.shard)
    _blank_shards[buffer] = buffer.version


def refuse_blank(unit: Unit) -> None:
    """Refuses to compute with what has no values.

    Raises:
        RuntimeError: A parameter of the unit is on the meta device still, or nothing was written to it or to a buffer
            since it was; names it.
    """
    for buffer in unit.buffers:
        if buffer.is_meta:
            raise RuntimeError(
                f"'{buffer.names[0]}' of {unit_title(unit.name)} is on the meta device and has no values to compute "
                "with: call model.to_empty(device=...) and load a checkpoint, or shard the model without init=False"
            )
        if _blank_shards.get(buffer, -1) == buffer.version:
            raise RuntimeError(
                f"nothing was written to '{buffer.names[0]}' of {unit_title(unit.name)} since it was on the meta "
                "device: load a checkpoint first, model.load_state_dict(...) or load_snapshot(...)"
            )
        _blank_shards.pop(buffer, None)
    for path, module in unit.module.named_modules(prefix=unit.name):
        for attribute, blank in list(_blank_buffers.get(module, {}).items()):
            if not blank.is_filled(module._buffers.get(attribute)):
                raise RuntimeError(
                    f"the buffer '{f'{path}.{attribute}'.lstrip('.')}' has had no values since it was on the meta "
                    "device, and the checkpoint has none for it: write what its module's __init__ computes, "
                    f"module.{attribute}.copy_(...), or build that module outside of torch.device('meta')"
                )
            del _blank_buffers[module][attribute]
