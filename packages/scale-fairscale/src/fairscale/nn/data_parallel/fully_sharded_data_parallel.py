"""`FullyShardedDataParallel`: FairScale's arguments, methods and attributes on scale-fsdp's wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

import scale_fsdp
from fairscale._warnings import warn_argument, warn_once
from fairscale.internal.process_group import ProcessGroupName
from fairscale.nn.data_parallel.consolidate_shard_weights import consolidate_shard_weights
from fairscale.nn.data_parallel.fsdp_arguments import WrapperArguments
from fairscale.nn.data_parallel.fsdp_attributes import (
    NotTheRootError,
    TrainingState,
    TrainingStateError,
    WrapperAttributes,
)
from fairscale.nn.data_parallel.fsdp_optim_utils import by_name, by_number, shard_by_number
from fairscale.nn.data_parallel.initial_weights import InitialWeights, compare_weights, digests_of_params
from fairscale.nn.data_parallel.param_metadata import param_metadata
from scale_core.records import Record
from scale_core.state.gathered_tensor import plain_tensor
from scale_core.state.torch_state_dict import SHARDS
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.state_dict.local import shard_metadata


class _Options(Record):
    """The options that a module was wrapped with."""

    attribute = "_fairscale_options"
    values: dict[str, Any] | None = None


class FullyShardedDataParallel(WrapperAttributes):
    """Shards a module in place and wraps it, as FairScale's class of this name.

    In new code: `scale_fsdp.fully_shard(module, ...)`, or `scale_fsdp.FullyShardedDataParallel`.

        >>> import torch
        >>> from fairscale.nn import FullyShardedDataParallel
        >>> model = FullyShardedDataParallel(torch.nn.Linear(2, 2))
        >>> [name for name, _ in model.named_parameters()]
        ['_fsdp_wrapped_module.flat_param_0']

    Args:
        module: As in FairScale.
        process_group: As in FairScale; None is the default group. In a world of one anything with `rank()` and `size()`
            will do.
        process_group_reduce_scatter: Without effect.
        reshard_after_forward: As in FairScale.
        disable_reshard_on_root: Without effect.
        mixed_precision: As in FairScale.
        fp32_reduce_scatter: As in FairScale; None is False.
        flatten_parameters: As in FairScale.
        move_params_to_cpu: As in FairScale; with it the module may also be on the device.
        compute_dtype: As in FairScale; `torch.bfloat16` works.
        buffer_dtype: As in FairScale: None is the compute dtype under `mixed_precision`, or else leaves buffers alone;
            state dicts have them in their own dtype.
        move_grads_to_cpu: As in FairScale, in every combination.
        bucket_cap_mb: Without effect.
        compute_device: As in FairScale.
        no_broadcast_optim_state: Without effect.
        state_dict_device: As in FairScale.
        clear_autocast_cache: Without effect.
        force_input_to_fp32: As in FairScale.
        verbose: Without effect.
        cpu_offload: The older name of `move_params_to_cpu`.
        state_dict_on_rank_0_only: As in FairScale, by the rank in `process_group`.
        gradient_predivide_factor: Without effect.
        allow_reset_parameters: Lets `reset_parameters()` run, on full parameters.

    Raises:
        TypeError: `process_group_reduce_scatter` is not a group.
        ValueError: `fp32_reduce_scatter` without `mixed_precision`; as for `scale_fsdp.fully_shard`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool | None = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        arguments = WrapperArguments.of(locals())
        digests, options = digests_of_params(module), arguments.options()
        if isinstance(module, scale_fsdp.FSDPModule) and _Options.get_or_create(module).values == options:
            super().__init__(module)  # Wrapped anew as it was, as for evaluation: its unit stays.
        else:
            super().__init__(module, **cast(Any, options))
            _Options.get_or_create(module).values = options
        self._weights: InitialWeights | None = InitialWeights.of(digests, self._unit)
        self.bucket_cap_mb = bucket_cap_mb
        self.no_broadcast_optim_state = bool(no_broadcast_optim_state)
        self.verbose, self.clear_autocast_cache = verbose, clear_autocast_cache
        self.disable_reshard_on_root = disable_reshard_on_root
        if gradient_predivide_factor is not None:  # What the sum is divided by in all stays the number of ranks.
            self._divide_factors = gradient_predivide_factor, self.world_size / gradient_predivide_factor
        self.allow_reset_parameters = allow_reset_parameters
        self._set_attributes(arguments)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if self._weights is not None:
            self._compare_weights()
        return super().forward(*args, **kwargs)

    def _compare_weights(self) -> None:
        ranks = self._options.mesh_info.whole.ranks
        lines: list[str] = []
        for name, module in self.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._weights is not None:
                if module._options.mesh_info.whole.ranks == ranks:
                    lines += [f"{name} {line}" for line in module._weights.lines(module._unit)]
                module._weights = None
        compare_weights(lines, self._options)

    # Methods of FairScale's own.

    @property
    def _fsdp_instances(self) -> list[FullyShardedDataParallel]:
        return get_fsdp_instances(self)

    def _reset_lazy_init(self) -> None:
        """Takes FairScale's reset, which is not needed: which wrapper is the root is found in each pass."""

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Checks what the wrapper is doing.

        Raises:
            ValueError: It is doing something else.
        """
        states = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in states:
            raise ValueError(f"expected to be in states {states} but current state is {self.training_state}")

    def _free_full_params(self, params: Any = None) -> None:
        """Releases the full parameters, unless a pass uses them."""
        self.sharded_module.reshard()

    # Methods whose errors or results were others.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the full state dict. As in FairScale, a write to its parameters does not change the model."""
        state = super().state_dict(*args, **kwargs)
        state.update({name: plain_tensor(value) for name, value in state.items() if isinstance(value, Tensor)})
        return state

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips by the norm over all ranks; on the outermost wrapper.

        Raises:
            AssertionError: This is a wrapper inside another one.
        """
        self._check_outermost("clip_grad_norm should only be called on the root (parent) instance")
        norm: Tensor = self.sharded_module.clip_grad_norm_(max_norm, norm_type)
        return norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated on this rank.

        Raises:
            AssertionError: This is a wrapper inside another one.
        """
        self._check_outermost("no_sync on inner FSDP is not supported")
        with self.sharded_module.no_sync():
            yield

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Inside, parameters are full, under their own names.

        Raises:
            ValueError: The parameters are in use; a RuntimeError, too.
        """
        for unit in units_in(self.sharded_module) if recurse else [self._unit]:
            if unit.use_count or unit.in_backward or unit.in_summon:
                raise TrainingStateError(
                    f"expected to be in states [{TrainingState.IDLE}] but current state is {self.training_state}: "
                    "call summon_full_params() between steps, and not inside of another one"
                )
        with self.sharded_module.summon_full_params(recurse=recurse, volatile=volatile):
            yield

    def gather_full_optim_state_dict(
        self, optim: Any, recipient_rank: int | None = 0, **ignored: Any
    ) -> dict[str, Any] | None:
        """Gathers the optimizer's full state, which a plain optimizer of the plain model loads.

        Returns:
            On rank 0 the state by numbers, as torch's optimizers have it, with `param_id_map`, the number of each
            parameter by name; None on the others.
        """
        full = scale_fsdp.full_optim_state_dict(self.sharded_module, optim, recipient_rank=recipient_rank)
        return None if full is None else by_number(full)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Turns what `gather_full_optim_state_dict` gave into this rank's shard, for `optim.load_state_dict`.

        As in FairScale the argument is changed, so that the full state is released although the program still has the
        argument: pass `copy.deepcopy(full)` to keep it. Like this rank's own `optim.state_dict()` the shard says which
        elements it has; loading it raises where a rank holds others. A shard is returned unchanged.

        Returns:
            The argument.
        """
        if SHARDS in (full_optim_state_dict or ()):
            return full_optim_state_dict
        shard = shard_by_number(by_name(full_optim_state_dict), self.sharded_module)
        full_optim_state_dict.clear()
        full_optim_state_dict.update(shard)
        return full_optim_state_dict

    def local_metadata_dict(self) -> dict[str, Any]:
        """Returns which elements this rank's shards are; with FairScale's `param_metadata` beside scale-fsdp's own."""
        metadata = shard_metadata(self.sharded_module)
        wrappers = [
            (name, module) for name, module in self.named_modules() if isinstance(module, FullyShardedDataParallel)
        ]
        units = [(name, wrapper._unit, wrapper.no_broadcast_optim_state) for name, wrapper in wrappers]
        return {**metadata, "param_metadata": param_metadata(units, metadata)}

    consolidate_shard_weights = staticmethod(consolidate_shard_weights)

    def reset_parameters(self) -> None:
        """Has the module initialize its full parameters again.

        Raises:
            RuntimeError: `allow_reset_parameters` was not given.
        """
        if not self.allow_reset_parameters:
            raise RuntimeError(
                "reset parameters after FSDP wrapping is not allowed: initialize before, or build it with "
                "allow_reset_parameters=True"
            )
        plain = self.sharded_module
        if self._unit.in_summon:  # They are full already; what is written is kept as the context says.
            cast(Any, plain).reset_parameters()
            return
        plain.apply(lambda module: module.reset_parameters() if module is plain else None)

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Without effect: a parameter that two wrappers share is found when they are made, and its gradients summed.

        Raises:
            ValueError: The module does not have it.
        """
        if all(param is not p for param in self.parameters()):
            raise ValueError(
                f"expected a parameter that the module of unit '{self._unit.name}' shares with another one, got one of "
                f"shape {list(p.shape)} that is not in it: share it before the modules are wrapped, a.weight = b.weight"
            )
        warn_once(
            "FullyShardedDataParallel.append_shared_param()",
            "has no effect, leave it out: parameters that two units share are found when they are made",
        )

    # nn.Module's own.

    def extra_repr(self) -> str:
        """What printing the model shows of the wrapper."""
        return (
            f"world_size={self.world_size}, flatten_parameters={self.flatten_parameters}, "
            f"mixed_precision={self.mixed_precision}, "
        )

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return {name: value for name, value in state.items() if name != "_inner"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._set_inner()

    def _check_outermost(self, text: str) -> None:
        if self._is_root is False:
            raise NotTheRootError(f"{text}: this is a unit inside a sharded model, '{self._unit.name}'")


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Returns the wrappers in a module, itself included; those without parameters of their own only if wanted."""
    instances = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    return [instance for instance in instances if instance.params or not skip_empty]


@contextmanager
def no_pre_load_state_dict_hook() -> Iterator[None]:
    """Takes FairScale's switch, which changes nothing: names need no hook here."""
    yield


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Any = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wraps each batch norm by itself, in fp32 and gathered until its backward.

    Args:
        module: The module around them.
        single_rank_pg: Without effect: there it left the gradients of batch norms unreduced.
        process_group: The ranks.
        fsdp_config: Arguments of the wrapper, in place of FairScale's own for batch norms.
        wrap_it: False only sets `wrapper_config`.
        assert_on_collision: Refuse a batch norm that has a `wrapper_config` already.

    Returns:
        The module, or the wrapper around it.
    """
    from fairscale.nn.wrap.auto_wrap import auto_wrap, config_auto_wrap_policy, enable_wrap

    if single_rank_pg:
        warn_argument(
            "auto_wrap_bn",
            "single_rank_pg",
            "has no effect, leave it out: batch norms are sharded over all ranks, and their gradients averaged",
        )
    config = {"mixed_precision": False, "flatten_parameters": False, "reshard_after_forward": False}
    config = dict(config if fsdp_config is None else fsdp_config)
    if process_group is not None:
        config = {"process_group": process_group, **config}
    for norm in [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]:
        assert not (assert_on_collision and hasattr(norm, "wrapper_config")), (
            f"a {type(norm).__name__} has a wrapper_config already: pass assert_on_collision=False to replace it"
        )
        norm.wrapper_config = config  # type: ignore[assignment]
    if not wrap_it:
        return module
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
        return auto_wrap(module)


__all__ = [
    "FullyShardedDataParallel",
    "NotTheRootError",
    "ProcessGroupName",
    "TrainingState",
    "TrainingStateError",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
]
