"""`FullyShardedDataParallel`: a module around a sharded one, as FairScale's; and `FSDPConfig`, its arguments."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn

from scale_core.comm.group import GroupLike
from scale_fsdp.api import MixedPrecision, UnitOptions
from scale_fsdp.fsdp_module import FSDPModule
from scale_fsdp.runtime.unit import unit_of
from scale_fsdp.shard_module import fully_shard
from scale_fsdp.state_dict.local import consolidate_shard_weights

# FairScale's arguments that tuned its own machinery, on which no result depends.
_WITHOUT_EFFECT = frozenset(
    {
        "process_group_reduce_scatter",
        "disable_reshard_on_root",
        "bucket_cap_mb",
        "no_broadcast_optim_state",
        "clear_autocast_cache",
        "verbose",
        "gradient_predivide_factor",
        "allow_reset_parameters",
    }
)

# FairScale's arguments that have another name here.
_REPLACED = {
    "force_input_to_fp32": "it casts what comes into a unit to fp32, as every unit does that computes in it: give that "
    "unit a policy of its own, mixed_precision=MixedPrecision(param_dtype=torch.float32)",
}


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _delegate(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[FullyShardedDataParallel, _P], _R]:
    """Returns a method of the wrapper that calls this one of its module."""

    @functools.wraps(method)
    def call(self: FullyShardedDataParallel, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        found: _R = getattr(self.module, method.__name__)(*args, **kwargs)
        return found

    return call


class FullyShardedDataParallel(nn.Module):
    """Shards `module` in place by `fully_shard` and wraps it, as FairScale's class of this name does.

    `named_parameters`, `named_modules` and the state dict have the names of the plain module, without the wrapper.
    Attributes that the wrapper lacks are those of the module.

    Args:
        module: The module to shard; `.module` gives it back. For one that is sharded already there is no other
            argument.
        **kwargs: The arguments of `fully_shard`, some of which may be given by position as in FairScale. FairScale's
            arguments that only tuned its machinery have no effect, and warn.

    Raises:
        TypeError: An unknown argument; names the nearest one.
        ValueError: As for `fully_shard`; an argument of FairScale's that has another name here; an argument for a
            module that is sharded already.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: GroupLike = None,
        reshard_after_forward: bool = True,
        mixed_precision: bool | MixedPrecision = False,
        flatten_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        options = {
            "process_group": process_group,
            "reshard_after_forward": reshard_after_forward,
            "mixed_precision": mixed_precision,
            "flatten_parameters": flatten_parameters,
            **_known_arguments(kwargs),
        }
        if isinstance(module, FSDPModule):
            _refuse_options(module, options)
        else:
            fully_shard(module, **options)
        self.module = module
        self.register_load_state_dict_pre_hook(_add_module_prefix)  # type: ignore[no-untyped-call]  # torch has no types here

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):  # Asked for by copy and pickle.
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]  # what the module answers

    @property
    def rank(self) -> int:
        """This process's rank among those that share the model."""
        return self._options.mesh_info.whole.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share the model."""
        return self._options.mesh_info.whole.size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's group of these ranks; None in a world of one without torch.distributed."""
        return self._options.mesh_info.whole.process_group

    @property
    def flatten_parameters(self) -> bool:
        """Whether an optimizer sees one flat tensor. `.module` is the module itself either way."""
        return self._options.flatten

    @property
    def reshard_after_forward(self) -> bool | int:
        """As given when the module was sharded."""
        return self._options.reshard_after_forward

    @property
    def mixed_precision(self) -> bool:
        """Whether the module computes in another dtype than its parameters are trained in."""
        return self._options.precision.param_dtype is not None

    # FSDPModule's, which nn.Module has too or subclasses call by super().
    clip_grad_norm_ = _delegate(FSDPModule.clip_grad_norm_)
    zero_grad = _delegate(FSDPModule.zero_grad)
    no_sync = _delegate(FSDPModule.no_sync)
    summon_full_params = _delegate(FSDPModule.summon_full_params)
    state_dict = _delegate(FSDPModule.state_dict)
    load_state_dict = _delegate(FSDPModule.load_state_dict)
    local_state_dict = _delegate(FSDPModule.local_state_dict)
    local_metadata_dict = _delegate(FSDPModule.local_metadata_dict)
    load_local_state_dict = _delegate(FSDPModule.load_local_state_dict)
    gather_full_optim_state_dict = _delegate(FSDPModule.gather_full_optim_state_dict)
    get_shard_from_optim_state_dict = _delegate(FSDPModule.get_shard_from_optim_state_dict)
    consolidate_shard_weights = staticmethod(consolidate_shard_weights)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields this wrapper, then the module and all in it under the names that they have without the wrapper."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint: this wrapper's `module` is no part of the names."""
        return {"module": "module"}

    @property
    def _options(self) -> UnitOptions:
        unit = unit_of(self.module)
        assert unit is not None
        return unit.options


def _add_module_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames a plain state dict's entries to where torch looks for them, below `module`."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)


def _refuse_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuses options for a module that is sharded already: they would have no effect."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(fully_shard).parameters.items()}
    given = [
        f"{name}={value!r}"
        for name, value in options.items()
        if type(value) is not type(defaults[name]) or value != defaults[name]  # 1 equals True, and means another thing.
    ]
    if given:
        raise ValueError(
            f"this {type(module).__name__} is sharded already, and a FullyShardedDataParallel around it can't change "
            f"how: give {', '.join(given)} to the fully_shard(...) that made it a unit, or leave that call out"
        )


def _known_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(fully_shard).parameters)
    if kwargs.pop("cpu_offload", False):  # FairScale's first name for it, which fairseq still uses.
        kwargs["move_params_to_cpu"] = True
    ignored = sorted(_WITHOUT_EFFECT & kwargs.keys())
    unknown = sorted(kwargs.keys() - known - _WITHOUT_EFFECT - _REPLACED.keys())
    for name, how in _REPLACED.items():
        if kwargs.get(name):
            raise ValueError(f"FullyShardedDataParallel({name}={kwargs[name]!r}) is said in another way: {how}")
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise TypeError(f"FullyShardedDataParallel: unexpected argument '{unknown[0]}'{hint}")
    if ignored:
        warnings.warn(f"FullyShardedDataParallel: {', '.join(ignored)} has no effect here", UserWarning, stacklevel=3)
    return {name: value for name, value in kwargs.items() if name in known}


@dataclass(frozen=True)
class FSDPConfig:
    """Arguments of `FullyShardedDataParallel` and `fully_shard` as one value, as a configuration file holds them.

    The names are those of Tango's class.

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
        """Returns as keyword arguments what differs from the defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in self._items() if value != defaults[name]}

    def wrap(self, module: nn.Module) -> FullyShardedDataParallel:
        """Returns a wrapper around the module, sharded by these arguments; `.module` gives it back.

        Raises:
            ValueError: As for `FullyShardedDataParallel`.
        """
        return FullyShardedDataParallel(module, **self.as_kwargs())

    def _items(self) -> list[tuple[str, Any]]:
        """The values as they are; `dataclasses.asdict` would take a policy apart."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
