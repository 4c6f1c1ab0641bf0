"""`FullyShardedDataParallel`: a thin module around a sharded one, for those who construct, subclass and unwrap it."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from scale_core.comm.group import GroupLike
from scale_fsdp.api import MixedPrecision, UnitOptions
from scale_fsdp.fsdp_module import ShardedModule
from scale_fsdp.shard_module import fully_shard
from scale_fsdp.state_dict.local import consolidate_shard_weights
from scale_fsdp.state_dict.optimizer import HasState
from scale_fsdp.unit import unit_of

# FairScale's arguments that tuned its own machinery: nothing here corresponds to them, and no result depends on them.
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

# What an argument of FairScale's that is not here stands for, and what says the same.
_SAID_OTHERWISE = {
    "force_input_to_fp32": "it casts what comes into a unit to fp32, as every unit does that computes in it: give that "
    "unit a policy of its own, mixed_precision=MixedPrecision(param_dtype=torch.float32)",
}


class FullyShardedDataParallel(nn.Module):
    """Shards `module` in place by `fully_shard` and stands around it, as FairScale's class of this name does.

    Names are those of the plain module throughout: in `named_parameters`, `named_modules` and the state dict the
    wrapper leaves no trace. Attributes that it lacks are those of the module.

    Args:
        module: The module to shard; `.module` gives it back. Around one that is sharded already the wrapper adds
            nothing, and takes no other argument.
        process_group: As for `fully_shard`.
        reshard_after_forward: As for `fully_shard`.
        mixed_precision: As for `fully_shard`; True is fp16.
        flatten_parameters: As for `fully_shard`.
        **kwargs: The other arguments of `fully_shard`. Arguments of FairScale's that only tuned its machinery are
            taken with a warning and have no effect.

    Raises:
        TypeError: An unknown argument; names the nearest one.
        ValueError: As for `fully_shard`; an argument of FairScale's that is said in another way here; an argument
            beside a module that is sharded already, and keeps to what was said then.
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
            **_known(kwargs),
        }
        if isinstance(module, ShardedModule):
            _refuse_options(module, options)
        else:
            fully_shard(module, **options)
        self.module = module
        self.register_load_state_dict_pre_hook(_into_module)  # type: ignore[no-untyped-call]  # torch has no types here

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):  # Those are asked for by name only to copy or pickle this.
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._sharded[key]  # type: ignore[index]  # whatever the module answers

    @property
    def rank(self) -> int:
        """This process's number among the ranks that share the model."""
        return self._options.ranks.whole.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share the model."""
        return self._options.ranks.whole.size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """These ranks, to torch; None in a world of one that torch.distributed knows nothing of."""
        return self._options.ranks.whole.process_group

    @property
    def flatten_parameters(self) -> bool:
        """Whether an optimizer sees one flat tensor. `.module` is the module itself either way."""
        return self._options.flatten

    @property
    def reshard_after_forward(self) -> bool | int:
        """What was asked for when the module was sharded."""
        return self._options.reshard_after_forward

    @property
    def mixed_precision(self) -> bool:
        """Whether the module computes in another dtype than its parameters have between the passes."""
        return self._options.precision.param_dtype is not None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `ShardedModule.clip_grad_norm_`."""
        return self._sharded.clip_grad_norm_(max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `ShardedModule.zero_grad`."""
        self._sharded.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """See `ShardedModule.no_sync`."""
        return self._sharded.no_sync()

    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> AbstractContextManager[None]:
        """See `ShardedModule.summon_full_params`."""
        return self._sharded.summon_full_params(recurse, volatile)

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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `ShardedModule.state_dict`."""
        return self._sharded.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """See `ShardedModule.load_state_dict`."""
        return self._sharded.load_state_dict(state_dict, strict, assign)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `ShardedModule.local_state_dict`."""
        return self._sharded.local_state_dict(*args, **kwargs)

    def local_metadata_dict(self) -> dict[str, Any]:
        """See `ShardedModule.local_metadata_dict`."""
        return self._sharded.local_metadata_dict()

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """See `ShardedModule.load_local_state_dict`."""
        return self._sharded.load_local_state_dict(state_dict, strict)

    consolidate_shard_weights = staticmethod(consolidate_shard_weights)

    def gather_full_optim_state_dict(self, optim: HasState, recipient_rank: int | None = 0) -> dict[str, Any] | None:
        """See `ShardedModule.gather_full_optim_state_dict`."""
        return self._sharded.gather_full_optim_state_dict(optim, recipient_rank)

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: Mapping[str, Any], optim: HasState | None = None
    ) -> dict[str, Any]:
        """See `ShardedModule.get_shard_from_optim_state_dict`."""
        return self._sharded.get_shard_from_optim_state_dict(full_optim_state_dict, optim)

    def _fqn_modifiers(self) -> dict[str, str]:
        """What torch.distributed.checkpoint asks: `module` is no part of the names, unless it is the module's own."""
        return {"module": "module"}

    @property
    def _options(self) -> UnitOptions:
        unit = unit_of(self.module)
        assert unit is not None
        return unit.options

    @property
    def _sharded(self) -> ShardedModule:
        module = self.module
        assert isinstance(module, ShardedModule)
        return module


def _into_module(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames a plain state dict's entries to where torch looks for them: below `module`."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)


def _refuse_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """A unit was told how it is sharded when it became one: what a wrapper says later would be lost in silence."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(fully_shard).parameters.items()}
    told = [
        f"{name}={value!r}"
        for name, value in options.items()
        if type(value) is not type(defaults[name]) or value != defaults[name]  # 1 equals True, and means another thing.
    ]
    if told:
        raise ValueError(
            f"this {type(module).__name__} is sharded already, and a FullyShardedDataParallel around it can't change "
            f"how: give {', '.join(told)} to the fully_shard(...) that made it a unit, or leave that call out"
        )


def _known(kwargs: dict[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(fully_shard).parameters)
    if kwargs.pop("cpu_offload", False):  # FairScale's first name for it, which fairseq still uses.
        kwargs["move_params_to_cpu"] = True
    ignored = sorted(_WITHOUT_EFFECT & kwargs.keys())
    unknown = sorted(kwargs.keys() - known - _WITHOUT_EFFECT - _SAID_OTHERWISE.keys())
    for name, how in _SAID_OTHERWISE.items():
        if kwargs.get(name):
            raise ValueError(f"FullyShardedDataParallel({name}={kwargs[name]!r}) is said in another way: {how}")
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise TypeError(f"FullyShardedDataParallel: unexpected argument '{unknown[0]}'{hint}")
    if ignored:
        warnings.warn(f"FullyShardedDataParallel: {', '.join(ignored)} has no effect here", UserWarning, stacklevel=3)
    return {name: value for name, value in kwargs.items() if name in known}
