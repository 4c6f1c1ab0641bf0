"""What programs read of FairScale's wrapper, and the errors of methods that are called at another time."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

import scale_fsdp
from fairscale.nn.data_parallel.fsdp_arguments import WrapperArguments
from fairscale.nn.data_parallel.inner_wrapper import InnerWrapper, name_through_wrappers
from fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper
from scale_fsdp.runtime.unit import Unit, unit_of, units_in


class TrainingState(enum.Enum):
    """What a wrapper is doing."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


class TrainingStateError(ValueError, RuntimeError):
    """A method was called amid a pass; a ValueError as in FairScale, and a RuntimeError as in scale-fsdp."""


class NotTheRootError(AssertionError, ValueError):
    """A method of the outermost wrapper was called on one inside; an AssertionError as in FairScale."""


def predivide_factor(world_size: int) -> float:
    """FairScale's factor before the sum: 1, doubled while it divides the world size and is below its root.

    >>> [predivide_factor(ranks) for ranks in (1, 2, 4, 6, 8)]
    [1.0, 2.0, 2.0, 4.0, 4.0]
    """
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


class WrapperAttributes(scale_fsdp.FullyShardedDataParallel):
    """The attributes of FairScale's wrapper, on scale-fsdp's."""

    _inner: InnerWrapper
    _divide_factors: tuple[float, float] | None = None  # before and after the sum, where they were set

    def _set_attributes(self, given: WrapperArguments) -> None:
        """Sets those that FairScale derives from its arguments."""
        self._mixed_precision = given.mixed_precision
        self.fp32_reduce_scatter = bool(given.fp32_reduce_scatter)
        self.compute_dtype = given.computes_in
        self.buffer_dtype = given.buffer_dtype or given.computes_in
        self.move_params_to_cpu = given.is_offloaded
        self.move_grads_to_cpu = given.is_offloaded if given.move_grads_to_cpu is None else given.move_grads_to_cpu
        self.force_input_to_fp32 = given.force_input_to_fp32
        self.state_dict_on_rank_0_only = given.state_dict_on_rank_0_only
        self.uncollected_opt_state: dict[int, Any] = {}
        self._set_inner()

    def _set_inner(self) -> None:
        inner = InnerWrapper(self.sharded_module, is_flattened=self.flatten_parameters)
        object.__setattr__(self, "_inner", inner)

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self.sharded_module)
        assert unit is not None
        return unit

    @property
    def mixed_precision(self) -> bool:
        """As given."""
        return self._mixed_precision

    @property
    def module(self) -> FlattenParamsWrapper:  # type: ignore[override]  # the base registers it
        """The wrapper inside, as in FairScale; its `.module` is the module that was given."""
        inner: FlattenParamsWrapper = self._inner
        return inner

    @property
    def _fsdp_wrapped_module(self) -> FlattenParamsWrapper:
        """`.module`, by the name that is in the names of parameters."""
        return self.module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters; while they are flat, the names have the wrappers in them, as in FairScale.

        As in `_fsdp_wrapped_module._fpw_module.0._fsdp_wrapped_module.flat_param_0`. The names of a state dict, of full
        parameters and of a model that is not flattened are the plain module's.
        """
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        if not self.flatten_parameters or self._unit.in_summon:
            yield from named
            return
        wrappers = {name for name, module in self.named_modules() if isinstance(module, WrapperAttributes)}
        start = f"{prefix}." if prefix else ""
        for name, param in named:
            yield start + name_through_wrappers(name.removeprefix(start), wrappers), param

    @property
    def process_group_reduce_scatter(self) -> Any:
        """The group of all collectives, `process_group`."""
        return self.process_group

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed, as FairScale would: about the root of the world size.

        Here sums are divided once, by this and `gradient_postdivide_factor` together.
        """
        return self._factors[0]

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, factor: float) -> None:
        self.set_gradient_divide_factors(factor, self._factors[1], recursive=False)

    @property
    def gradient_postdivide_factor(self) -> float:
        """What sums of gradients are divided by, beside `gradient_predivide_factor`."""
        return self._factors[1]

    @gradient_postdivide_factor.setter
    def gradient_postdivide_factor(self, factor: float) -> None:
        self.set_gradient_divide_factors(self._factors[0], factor, recursive=False)

    @property
    def _factors(self) -> tuple[float, float]:
        if self._divide_factors is not None:
            return self._divide_factors
        before = predivide_factor(self.world_size)
        return before, self.world_size / before

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divides summed gradients by `pre * post`, once, in place of the number of ranks."""
        wrappers = (
            (module for module in self.modules() if isinstance(module, WrapperAttributes)) if recursive else (self,)
        )
        for wrapper in wrappers:
            wrapper._divide_factors = pre, post
        for unit in units_in(self.sharded_module) if recursive else [self._unit]:
            cast(Any, unit.module).set_gradient_divide_factor(pre * post)

    @property
    def numel_padded_per_param(self) -> list[int]:
        """Elements of padding at the end of this rank's shard of each of `params`: 0, it is between parameters."""
        return [0 for _ in self.params]

    @property
    def cpu_offload(self) -> bool:
        """The older name of `move_params_to_cpu`."""
        return self.move_params_to_cpu

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes."""
        return next((buffer.compute_device for buffer in self._unit.buffers), torch.device("cpu"))

    @property
    def state_dict_device(self) -> torch.device:
        """Where `state_dict()` puts its tensors."""
        return self._options.state_dict_config.device or self.compute_device

    @property
    def params(self) -> list[nn.Parameter]:
        """This wrapper's own parameters: flat ones, or local shards; without the parameters of wrappers inside."""
        return list(dict.fromkeys(param for buffer in self._unit.buffers for param in buffer.sharded_params))

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All parameters, of wrappers inside too, that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    def non_shared_params(self) -> list[nn.Parameter]:
        """This wrapper's own parameters, but for those that a wrapper around has as well."""
        return self.params

    @property
    def has_full_params(self) -> bool:
        """Whether the parameters are gathered now."""
        return bool(self._unit.gathered) or self._unit.in_summon

    @property
    def training_state(self) -> TrainingState:
        """What the wrapper is doing."""
        unit = self._unit
        if unit.in_summon:
            return TrainingState.SUMMON_FULL_PARAMS
        if unit.in_backward:
            return TrainingState.BACKWARD_PRE
        return TrainingState.FORWARD if unit.use_count else TrainingState.IDLE

    @property
    def _is_root(self) -> bool | None:
        """Whether the model is entered by this wrapper; None before the first forward pass."""
        root = self._unit.root
        return None if root is None else getattr(root, "outermost", None) is self._unit
