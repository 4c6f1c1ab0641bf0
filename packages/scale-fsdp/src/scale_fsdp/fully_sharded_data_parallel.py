"""`FullyShardedDataParallel`: a module around a sharded one, as FairScale's and FSDP1's."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from scale_core.arguments import checked_arguments, did_you_mean
from scale_core.comm.group import GroupLike
from scale_fsdp.api import (
    UnitOptions,
    UnitPrecision,
    placement_of,
    resolve_precision,
    resolve_state_dict_config,
)
from scale_fsdp.fsdp_module import FSDPModule
from scale_fsdp.mesh_info import resolve_mesh_info
from scale_fsdp.options import ShardOptions
from scale_fsdp.runtime.param_registry import managed_params
from scale_fsdp.runtime.unit import unit_of
from scale_fsdp.shard_module import check_modules, shard_modules

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

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
    "force_input_to_fp32": "a unit casts its inputs to the dtype that it computes in: for fp32 inputs give that unit "
    "mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float32)",
}


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _delegate(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[FullyShardedDataParallel, _P], _R]:
    """Returns a method of the wrapper that calls this one of its module."""

    @functools.wraps(method)
    def call(self: FullyShardedDataParallel, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        result: _R = getattr(self.sharded_module, method.__name__)(*args, **kwargs)
        return result

    return call


@dataclass(frozen=True)
class WrapperOptions:
    """Arguments of `FullyShardedDataParallel` that only FairScale has; torch's policies say the same.

    Attributes:
        move_params_to_cpu: Keep the shards on the host.
        move_grads_to_cpu: Bring each reduced gradient to the host at once, during the backward pass; False lets all
            wait on the device until the pass is over. None is as for the parameters. Either way `param.grad` stands
            where the parameter is when `backward()` returns.
        state_dict_device: Where the tensors of this module's `state_dict()` are to be; None is where the shards are.
        state_dict_on_rank_0_only: Its `state_dict()` gives the tensors to rank 0 alone, and the others an empty dict.
        compute_dtype: `param_dtype` of the policy.
        fp32_reduce_scatter: `reduce_dtype=torch.float32` of the policy.
    """

    move_params_to_cpu: bool = False
    move_grads_to_cpu: bool | None = None
    state_dict_device: torch.device | str | None = None
    state_dict_on_rank_0_only: bool = False
    compute_dtype: torch.dtype | None = None
    fp32_reduce_scatter: bool | None = None

    def __post_init__(self) -> None:
        for name in ("move_params_to_cpu", "move_grads_to_cpu"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")


_DEFAULTS: dict[str, Any] = {
    "process_group": None,
    "reshard_after_forward": True,
    "mixed_precision": False,
    **{field.name: field.default for options in (WrapperOptions, ShardOptions) for field in fields(options)},
}
"""All arguments of the wrapper after the module."""


def _shard(
    module: nn.Module,
    process_group: GroupLike,
    reshard_after_forward: bool | int,
    mixed_precision: bool | MixedPrecisionPolicy,
    **others: Any,
) -> None:
    """Shards a module in place as `fully_shard` does, by the names of the wrapper's arguments."""
    shared = {field.name for field in fields(ShardOptions)}
    options = ShardOptions(**{name: value for name, value in others.items() if name in shared})
    wrapper = WrapperOptions(**{name: value for name, value in others.items() if name not in shared})
    check_modules([module], options.flatten_parameters)
    ranks = resolve_mesh_info(process_group, (info.param for info in managed_params(module)))
    grads = wrapper.move_params_to_cpu if wrapper.move_grads_to_cpu is None else wrapper.move_grads_to_cpu
    unit_options = UnitOptions.of(
        options,
        ranks,
        _precision_of(mixed_precision, wrapper.compute_dtype, options.buffer_dtype, wrapper.fp32_reduce_scatter),
        placement_of(wrapper.move_params_to_cpu, grads, options.compute_device, ranks),
        reshard_after_forward=None if reshard_after_forward is True else reshard_after_forward,
        state_dict_config=resolve_state_dict_config(wrapper.state_dict_device, wrapper.state_dict_on_rank_0_only),
    )
    shard_modules([module], unit_options, options.init, sync=options.sync_module_states)


def _precision_of(
    mixed_precision: bool | MixedPrecisionPolicy,
    compute_dtype: torch.dtype | None,
    buffer_dtype: torch.dtype | None,
    fp32_reduce_scatter: bool | None,
) -> UnitPrecision:
    """The dtypes behind FairScale's arguments; `mixed_precision=True` is fp16 parameters and reduction.

    FairScale cast inputs at the root alone; a policy says itself whether its unit casts them.
    """
    if not isinstance(mixed_precision, bool):
        if compute_dtype is not None or fp32_reduce_scatter is not None:
            raise ValueError(
                "a MixedPrecisionPolicy was given, and compute_dtype or fp32_reduce_scatter as well: say it in the "
                "policy, MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)"
            )
        return resolve_precision(mixed_precision, buffer_dtype)
    if not mixed_precision:
        if fp32_reduce_scatter:
            raise ValueError("fp32_reduce_scatter requires mixed_precision=True: without it gradients keep their dtype")
        return UnitPrecision(compute_dtype, compute_dtype, cast_forward_inputs="root", buffer_dtype=buffer_dtype)
    param_dtype = compute_dtype or torch.float16
    reduce_dtype = torch.float32 if fp32_reduce_scatter else param_dtype
    return UnitPrecision(param_dtype, reduce_dtype, cast_forward_inputs="root", buffer_dtype=buffer_dtype)


class FullyShardedDataParallel(nn.Module):
    """Shards `module` in place as `fully_shard` does and wraps it, as FairScale's class of this name.

    `named_parameters`, `named_modules` and the state dict have the names of the plain module, without the wrapper.
    Attributes that the wrapper lacks are looked up in the module.

    Args:
        module: The module to shard; `.module` gives it back. For one that is sharded already there is no other
            argument.
        process_group: The ranks to shard over: a ParallelDims, a process group or a DeviceMesh, as `mesh` of
            `fully_shard`.
        reshard_after_forward: As for `fully_shard`; the unit that is called first stays gathered.
        mixed_precision: torch's `MixedPrecisionPolicy`. True means fp16 parameters and reduction, and casts only the
            inputs of the outermost unit.
        flatten_parameters: As for `fully_shard`.
        **kwargs: `move_params_to_cpu`, `move_grads_to_cpu`, `compute_dtype`, `fp32_reduce_scatter`,
            `state_dict_device` and `state_dict_on_rank_0_only` as in FairScale, and the fields of `ShardOptions`.
            FairScale's arguments that only tuned its machinery have no effect, and warn.

    Raises:
        TypeError: An unknown argument; names the nearest one.
        ValueError: As for `fully_shard`. Also: an argument of FairScale has a different name here, or the module is
            sharded already and gets arguments.

    Examples:
        >>> import torch
        >>> from scale_fsdp import FullyShardedDataParallel
        >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 3), flatten_parameters=True)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> [name for name, _ in model.named_parameters()]
        ['flat_param_0']

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    @checked_arguments
    def __init__(
        self,
        module: nn.Module,
        process_group: GroupLike = None,
        reshard_after_forward: bool = True,
        mixed_precision: bool | MixedPrecisionPolicy = False,
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
            _shard(module, **options)
        self.module = module
        self.register_load_state_dict_pre_hook(_add_module_prefix)  # type: ignore[no-untyped-call]  # torch has no types here

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self.sharded_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):  # Asked for by copy and pickle.
                raise
            return getattr(self.sharded_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.sharded_module[key]

    @property
    def sharded_module(self) -> Any:
        """The module, also where a subclass shows something else as `.module`."""
        return self._modules["module"]

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
        return self._options.flatten_parameters

    @property
    def reshard_after_forward(self) -> bool | int:
        """As given when the module was sharded."""
        setting = self._options.reshard_after_forward
        return True if setting is None else setting

    @property
    def mixed_precision(self) -> bool:
        """Whether the module computes in a different dtype than its parameters are trained in."""
        return self._options.precision.param_dtype is not None

    # FSDPModule's, which nn.Module has too or subclasses call by super().
    clip_grad_norm_ = _delegate(FSDPModule.clip_grad_norm_)
    zero_grad = _delegate(FSDPModule.zero_grad)
    no_sync = _delegate(FSDPModule.no_sync)
    summon_full_params = _delegate(FSDPModule.summon_full_params)
    state_dict = _delegate(FSDPModule.state_dict)
    load_state_dict = _delegate(FSDPModule.load_state_dict)
    local_state_dict = _delegate(FSDPModule.local_state_dict)
    load_local_state_dict = _delegate(FSDPModule.load_local_state_dict)

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
        yield from self.sharded_module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint: this wrapper's `module` is not a part of the names."""
        return {"module": "module"}

    @property
    def _options(self) -> UnitOptions:
        unit = unit_of(self.sharded_module)
        assert unit is not None
        return unit.options


def _add_module_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames a plain state dict's entries to where torch looks for them, below `module`."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)


def _refuse_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuses options for a module that is sharded already: they would have no effect."""
    refused = [
        f"{name}={value!r}"
        for name, value in options.items()
        if type(value) is not type(default := _DEFAULTS[name]) or value != default  # 1 equals True, and means no bool.
    ]
    if refused:
        raise ValueError(
            f"this {type(module).__name__} is sharded already, and a FullyShardedDataParallel around it can't change "
            f"how: give {', '.join(refused)} to the fully_shard(...) that made it a unit, or leave that call out"
        )


def _known_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.pop("cpu_offload", False):  # FairScale's first name for it, which fairseq still uses.
        kwargs["move_params_to_cpu"] = True
    ignored = sorted(_WITHOUT_EFFECT & kwargs.keys())
    unknown = sorted(kwargs.keys() - _DEFAULTS.keys() - _WITHOUT_EFFECT - _REPLACED.keys())
    for name, how in _REPLACED.items():
        if kwargs.get(name):
            raise ValueError(f"FullyShardedDataParallel({name}={kwargs[name]!r}) is not supported: {how}")
    if unknown:
        hint = did_you_mean(unknown[0], sorted(_DEFAULTS))
        raise TypeError(f"FullyShardedDataParallel: unexpected argument '{unknown[0]}'; {hint}")
    if ignored:
        warnings.warn(f"FullyShardedDataParallel: {', '.join(ignored)} has no effect here", UserWarning, stacklevel=4)
    return {name: value for name, value in kwargs.items() if name in _DEFAULTS}
