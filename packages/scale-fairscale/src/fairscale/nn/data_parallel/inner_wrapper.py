"""What FairScale has between a wrapper and its module: the names of flat parameters go through it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, cast

from torch import nn

from fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper
from scale_fsdp.runtime.unit import unit_of


class InnerWrapper(FlattenParamsWrapper):
    """What FairScale has between a wrapper and the module: shows its flat parameters, and is not a step itself."""

    def __init__(self, module: nn.Module, *, is_flattened: bool) -> None:
        nn.Module.__init__(self)
        unit = unit_of(module)
        assert unit is not None
        self._modules["_fpw_module"] = module
        self.flat_param_names = [f"flat_param_{number}" for number, _ in enumerate(unit.buffers)]
        self.is_flattened_here = is_flattened

    @property
    def module(self) -> nn.Module:
        """The module that was given."""
        return cast(nn.Module, self._modules["_fpw_module"])

    @property
    def flat_params(self) -> list[nn.Parameter]:  # type: ignore[override]  # an attribute there
        """The flat parameters, this rank's shards of them."""
        unit = unit_of(self.module)
        assert unit is not None
        return [buffer.sharded_params[0] for buffer in unit.buffers] if self.is_flattened_here else []

    @property
    def num_params_managed(self) -> int:  # type: ignore[override]  # an attribute there
        """How many parameters are in the flat ones."""
        unit = unit_of(self.module)
        assert unit is not None
        return sum(len(buffer.names) for buffer in unit.buffers) if self.is_flattened_here else 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of the wrapped module, by their names in it."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)


def name_through_wrappers(name: str, wrappers: Container[str]) -> str:
    """The name of a parameter with the wrappers on the way to it, whose plain names are given."""
    parts: list[str] = []
    plain = name.split(".")
    for depth, part in enumerate(plain):
        if ".".join(plain[:depth]) in wrappers:
            is_flat = depth == len(plain) - 1 and part.startswith("flat_param_")
            parts += ["_fsdp_wrapped_module"] if is_flat else ["_fsdp_wrapped_module", "_fpw_module"]
        parts.append(part)
    return ".".join(parts)
