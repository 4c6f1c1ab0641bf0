"""How modules are sharded, as one value: what a configuration file or a command line can hold.

Whoever wraps modules at several places, or reads from a file how, wants to say it once. The names are those by which
users of Tango know it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from scale_fsdp.api import MixedPrecision
from scale_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel


@dataclass(frozen=True)
class FSDPConfig:
    """Arguments of `FullyShardedDataParallel` and `fully_shard`, said once for many modules.

        >>> FSDPConfig(reshard_after_forward=False).as_kwargs()
        {'reshard_after_forward': False}

    Attributes:
        reshard_after_forward: Release the parameters between forward and backward.
        move_params_to_cpu: Keep the shards on the host.
        move_grads_to_cpu: Keep the gradients of the shards on the host; None is where the shards are.
        mixed_precision: A policy; True is fp16 parameters and reduction.
        error_if_nonfinite: Give a step up in which a rank computes an infinity or a NaN.

    Raises:
        TypeError: A value is of another type.
    """

    reshard_after_forward: bool = True
    move_params_to_cpu: bool = False
    move_grads_to_cpu: bool | None = None
    mixed_precision: bool | MixedPrecision = False
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        # A file gives whatever its author wrote, and the string "false" counts as true.
        for name, value in self._items():
            kinds = (bool, MixedPrecision) if name == "mixed_precision" else (bool,)
            may_be_none = name == "move_grads_to_cpu" and value is None
            if not isinstance(value, kinds) and not may_be_none:
                expected = " or a ".join(["bool", *(kind.__name__ for kind in kinds[1:])])
                raise TypeError(
                    f"FSDPConfig({name}=...): expected a {expected}{' or None' * (name == 'move_grads_to_cpu')}, "
                    f"got {value!r}; write {name}=True or {name}=False"
                )

    def as_kwargs(self) -> dict[str, Any]:
        """Returns as keyword arguments what differs from the defaults; the rest stays open to whoever is called."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in self._items() if value != defaults[name]}

    def wrap(self, module: nn.Module) -> FullyShardedDataParallel:
        """Returns the module, sharded as said here, inside of its wrapper; `.module` gives it back.

        Raises:
            ValueError: As for `FullyShardedDataParallel`.
        """
        return FullyShardedDataParallel(module, **self.as_kwargs())

    def _items(self) -> list[tuple[str, Any]]:
        """The values as they are; `dataclasses.asdict` would take a policy apart."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
