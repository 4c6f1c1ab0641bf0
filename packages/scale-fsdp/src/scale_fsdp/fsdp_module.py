"""`FSDPModule`: the methods that `fully_shard` adds to a module, under the names of FSDP2."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from scale_core.consistency.all_ranks import format_traceback, raise_on_all_ranks
from scale_core.consistency.execution_order import Event, unit_title
from scale_core.errors import ScaleDistributedError, StepError
from scale_core.flat.buffer import FlatBuffer, State
from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.shard import on_local_tensors
from scale_fsdp.reshard.convert import ConversionMethods
from scale_fsdp.runtime.checks import check_not_in_use, check_not_replaced
from scale_fsdp.runtime.param_registry import register_owner
from scale_fsdp.runtime.root import Root
from scale_fsdp.runtime.step import follow_user_changes, guarded_forward, root_of
from scale_fsdp.runtime.unit import Unit, unit_of, units_in
from scale_fsdp.state_dict.full import state_dict_of
from scale_fsdp.state_dict.loading import load_full_state_dict
from scale_fsdp.state_dict.local import load_local_state_dict, local_state_dict
from scale_fsdp.summon import full_params, full_params_for_apply


class UnshardHandle:
    """Returned by `unshard(async_op=True)`.

        >>> import torch
        >>> from scale_fsdp import fully_shard
        >>> model = fully_shard(torch.nn.Linear(4, 3))
        >>> handle = model.unshard(async_op=True)  # the gather runs
        >>> handle.wait()  # before the parameters are used
        >>> model.reshard()

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Returns when the module's parameters are unsharded."""
        _wait_unshard(self._unit)


class FSDPModule(ConversionMethods):
    """The methods that `fully_shard` adds to a module. Call them on the outermost one.

    `unshard`, `reshard` and the setters are FSDP2's. They act on the unit of the module. With `recurse` they also act
    on the units inside.

    Examples:
        >>> import torch
        >>> from scale_fsdp import FSDPModule, fully_shard
        >>> model = fully_shard(torch.nn.Linear(4, 3))
        >>> isinstance(model, FSDPModule), isinstance(model, torch.nn.Linear)
        (True, True)
        >>> with model.no_sync():  # gradients add up, nothing is sent
        ...     model(torch.ones(2, 4)).sum().backward()

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Keeps `__init_subclass__` of the module's own class from the unit's class, which users do not write.

        It may take arguments that are not known here, or register its subclasses by their names.
        """

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients in place so that their norm over all ranks is at most `max_norm`.

        All ranks call it together, after `backward()`. `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`
        does the same.

        Args:
            max_norm: The largest norm allowed; `math.inf` only measures.
            norm_type: p of the p-norm; `math.inf` is the largest magnitude.

        Returns:
            The norm before, scalar; equal on all ranks, and to the norm of the plain model.

        Raises:
            ValueError: `max_norm` is below 0 or not a number, or `norm_type` is not above 0.
        """
        root = outermost_root(self)
        contract = root.contract
        with contract.waiting("gradient norm"):
            return clip_grad_norm_(self.parameters(), float(max_norm), float(norm_type), contract.limit_seconds)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, with those accumulated under `no_sync`."""
        for unit in units_in(self):
            for buffer in unit.buffers:
                buffer.gradient.rollback_pass()
                buffer.gradient.zero_accumulated(range(len(buffer.names)), set_to_none=set_to_none)
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes accumulate gradients on this rank; the first one outside reduces the sum.

        Gradient accumulation sends less so, at the price of the full gradients' memory.

        Raises:
            ValueError: Called on a unit inside the sharded model.
        """
        root = outermost_root(self)
        before, root.synchronizes = root.synchronizes, False
        try:
            yield
        finally:
            root.synchronizes = before

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Inside, the parameters are unsharded, in the dtype that they are trained in, under their names.

        All ranks enter together. Changes are kept: at the end each rank takes its own shard of the parameters it has,
        so all must make the same change.

        Args:
            recurse: The units inside as well.
            volatile: Drop changes.

        Raises:
            RuntimeError: It is called inside a forward or backward pass, or inside a `summon_full_params`.
        """
        units = _units_at(self, "summon_full_params", recurse)
        for unit in units:
            if unit.root is not None:
                unit.root.recover()
            if unit.use_count or unit.in_backward or unit.in_summon:
                raise RuntimeError(
                    "summon_full_params: the parameters are in use, by a forward or backward pass or by another "
                    "summon_full_params around this one: call it between steps"
                )
        check_not_replaced(units)
        with full_params(units, keep=not volatile):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Calls `fn` with each module inside, children first, and with this one, as to initialize their weights.

        The parameters of the module's unit are unsharded, in the dtype that they are trained in, and all ranks keep the
        values that `fn` gives them on rank 0. No more is gathered at a time than one unit and those around it. All
        ranks call it together.

        Args:
            fn: Called with each module; must not touch parameters of units inside that.

        Raises:
            RuntimeError: The parameters are in use.
        """
        unit = _unit_at(self, "apply")
        check_not_in_use([unit], "apply")
        check_not_replaced([unit])
        with full_params_for_apply(unit):
            return super().apply(fn)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, in the dtype that they are computed in.

        They stay unsharded until `reshard()`, or until a pass that runs the unit has released them, as in FSDP2. All
        ranks call it together. The full parameters are copies: a change to them is lost.

        Args:
            async_op: Return a handle whose `wait()` ends the gather, in place of waiting here. A write to the
                shards in between is not gathered.

        Raises:
            StepError: A different rank had no memory for it, or could not quantize its message. That rank raises its
                own error. Nothing is unsharded.
        """
        unit = _unit_at(self, "unshard")
        root_of(unit).recover()
        check_not_replaced([unit])
        units = (*unit.shared_owners, unit)
        for other_unit in units:
            if not other_unit.use_count and other_unit.is_stale:
                other_unit.release()  # An optimizer has stepped since it was gathered.
        _allocate_on_all_ranks(
            unit, [buffer for other_unit in units for buffer in other_unit.buffers if buffer.state is State.SHARDED]
        )
        unit.kept_unsharded = True
        for other_unit in units:
            other_unit.gather(copies_shard=async_op)
        if async_op:
            return UnshardHandle(unit)
        _wait_unshard(unit)
        return None

    def reshard(self) -> None:
        """Releases this unit's parameters, unless they are in use by a forward or backward pass."""
        unit = _unit_at(self, "reshard")
        check_not_replaced([unit])
        unit.kept_unsharded = False
        if unit.root is not None and not unit.use_count and not unit.in_backward:
            for owner in (unit, *unit.shared_owners):
                if not (owner.use_count or owner.in_backward or owner.kept_unsharded):
                    owner.release()
                    for buffer in owner.buffers:
                        buffer.wait_sent()  # The caller may write to shards on the host now.
            unit.to_sharded()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> Self:
        """Whether backward passes reduce the gradients; if not, they accumulate on this rank, as in `no_sync()`."""
        for unit in _units_at(self, "set_requires_gradient_sync", recurse):
            unit.synchronizes = requires_gradient_sync
        return self

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> Self:
        """Whether the parameters are released between forward and backward, from the next pass on.

        True holds for the unit that is called first as well, as in FSDP2.

        Raises:
            TypeError: It is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"set_reshard_after_forward: expected True or False, got {reshard_after_forward!r}")
        for unit in _units_at(self, "set_reshard_after_forward", recurse):
            unit.reshard_after_forward, unit.reshards_entry = reshard_after_forward, True
        return self

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> Self:
        """Whether the parameters are released after the backward; otherwise they are gathered again after a step."""
        for unit in _units_at(self, "set_reshard_after_backward", recurse):
            unit.reshard_after_backward = reshard_after_backward
        return self

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Units whose gathers start with this one's in a forward, in addition to the next one."""
        unit = _unit_at(self, "set_modules_to_forward_prefetch")
        unit.prefetch["forward"] = [_unit_at(module, "set_modules_to_forward_prefetch") for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Units whose gathers start with this one's in a backward, in addition to the next one."""
        unit = _unit_at(self, "set_modules_to_backward_prefetch")
        unit.prefetch["backward"] = [_unit_at(module, "set_modules_to_backward_prefetch") for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """The divisor of this unit's summed gradients, in place of the number of ranks.

        Raises:
            ValueError: The factor is not above 0.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor: expected a factor above 0, got {factor}")
        for buffer in _unit_at(self, "set_gradient_divide_factor").buffers:
            buffer.gradient_divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Changes nothing: each backward that reduces does so over the shards and the replicas together.

        After the last micro-batch the gradients are equal to FSDP2's. There, backwards with False reduce only over the
        shards. With False and hybrid sharding it warns, because FSDP2 would send less.
        """
        units = _units_at(self, "set_requires_all_reduce", recurse)
        if not requires_all_reduce and any(unit.options.mesh_info.replicas.size > 1 for unit in units):
            warnings.warn(
                "set_requires_all_reduce(False) has no effect here: each backward reduces over the shards and the "
                "replicas together, and the gradients after the last micro-batch are the same. To send less, write "
                "set_requires_gradient_sync(False) for the micro-batches before the last",
                UserWarning,
                stacklevel=2,
            )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Takes FSDP2's hint, which changes nothing: each backward has waited for its reductions when it returns."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Takes FSDP2's switch, which changes nothing: a parameter that only some ranks used counts as zeros there."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Takes FSDP2's switch, which changes nothing: reductions are sums, and are divided after."""

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Has the current stream, and so the next gather, wait for an event that was recorded after the step.

        None, as `torch.cpu.current_stream().record_event()` returns it, is nothing to wait for.
        """
        if event is not None:
            event.wait()

    def reset_iter_state(self) -> None:
        """Ends a pass that an error has cut off, as the next forward does by itself. Call it on the outermost module.

        Gradients of earlier micro-batches stay; `zero_grad()` drops them.
        """
        root = outermost_root(self)
        root.recover()
        if root.entry_unit is not None:
            root.abort(RuntimeError("reset_iter_state() was called inside a forward pass that was cut off"))

    # State dicts: full, or of this rank alone.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the plain module's state dict: full tensors under plain names. All ranks call it together.

        A write to the tensors is written to the shards; all ranks write the same. Which ranks get it, and on
        which device, is set by `state_dict_on_rank_0_only` and `state_dict_device` of
        `FullyShardedDataParallel`; `full_state_dict` takes both at the call. The arguments are as in `nn.Module`.

        Raises:
            RuntimeError: torch's checkpoint functions call it, and parameters are flat.
            ScaleDistributedError: A rank did something else.
        """
        return state_dict_of(self, super().state_dict, *args, **kwargs)

    @on_local_tensors
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads full tensors, as the plain module's state dict has them; each rank takes its elements of its own state.

        All ranks call it together, and say whether their states fit. DTensors are taken as well, and gathered by all
        ranks together. With `assign`, values of the module's dtypes are copied to shards and buffers, which stay where
        they are.

        Raises:
            RuntimeError: On one rank or several, names or shapes are not the module's, or dtypes with `assign`, or the
                parameters are in use. Nothing has been loaded then, on any rank.
            ValueError: The state belongs to only one rank.
            ScaleDistributedError: A rank did something else, or has other DTensors.
        """
        return load_full_state_dict(self, super().load_state_dict, state_dict, strict, assign)

    @on_local_tensors
    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the local state: its shards, and the module's buffers. Nothing is sent.

        The tensors share the shards' memory. The arguments are as in `nn.Module.state_dict`.
        `consolidate_local_state_dicts` makes the state of the plain model from the states of all ranks.

        Raises:
            ValueError: A parameter of the module belongs to a unit outside of it.
        """
        return local_state_dict(self, super().state_dict, *args, **kwargs)

    @on_local_tensors
    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads the result of `local_state_dict()` on this rank, under the same wrapping. Nothing is sent.

        Returns:
            Missing and unexpected names, as `nn.Module.load_state_dict` does.

        Raises:
            ValueError: The state belongs to a different rank, number of ranks or wrapping, or a tensor has a different
                shape. Nothing was loaded.
            RuntimeError: The parameters are in use.
        """
        return load_local_state_dict(self, super().state_dict, super().load_state_dict, state_dict, strict)

    # Methods that nn.Module calls.

    def extra_repr(self) -> str:
        """The text of `print(model)` next to the class: the text of the plain module, and its sharding."""
        from scale_fsdp.description import unit_summary  # Not needed by any step.

        return ", ".join(filter(None, [super().extra_repr(), unit_summary(_unit_at(self, "extra_repr"))]))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For deepcopy and pickle: the plain class, from which the copy's class is made, and the state.

        Raises:
            RuntimeError: The parameters are in use.
        """
        check_not_in_use([_unit_at(self, "deepcopy and pickle")], "deepcopy and pickle")
        _, plain = type(self).__bases__
        return _new, (plain,), super().__getstate__()  # type: ignore[no-untyped-call]  # typeshed leaves it untyped

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._register_unit()

    @on_local_tensors
    def _register_unit(self) -> None:
        """Registers the parameters of a copy, or of a module read from a file, once it is complete."""
        unit = unit_of(self)
        if unit is not None and unit.is_restored and "_modules" in vars(self):
            register_owner(unit)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Takes FSDP2's call for the stages of a pipeline, which changes nothing: collectives run on their group's stream.

    Raises:
        ValueError: A module is not sharded.

    Examples:
        >>> import torch
        >>> from scale_fsdp import fully_shard, share_comm_ctx
        >>> stages = [fully_shard(torch.nn.Linear(4, 4)) for _ in range(2)]
        >>> share_comm_ctx(stages)

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    for module in modules:
        _unit_at(module, "share_comm_ctx")


# FSDP2's methods that tune its own machinery, on which no result depends.
_WITHOUT_EFFECT = (
    "set_unshard_in_backward",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
)
# And those that put other computation in the place of its collectives.
_REFUSED = {
    "set_custom_all_gather": "shards are gathered into the buffer that the module computes with: leave it out",
    "set_custom_reduce_scatter": "set mp_policy's reduce_dtype, or set_gradient_divide_factor(factor)",
    "set_keep_unsharded_storage": "full parameters have no lasting memory: write reshard_after_forward=False",
    "set_manual_backward_finalization": "each backward() ends its reductions; write no_sync() around all but the last",
    "finalize_backward": "each backward() ends its reductions: leave it out",
    "set_all_reduce_hook": "give fully_shard a mesh of two dimensions, or change param.grad after backward()",
}


def _method_without_effect(name: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        warnings.warn(f"{name} has no effect here: it tunes what FSDP2 does in another way", UserWarning, stacklevel=2)

    return method


def _refused_method(name: str, how: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} is a method of FSDP2 that is not supported here: {how}")

    return method


for _name in _WITHOUT_EFFECT:
    setattr(FSDPModule, _name, _method_without_effect(_name))
for _name, _how in _REFUSED.items():
    setattr(FSDPModule, _name, _refused_method(_name, _how))


_METHODS = sorted(name for name in dir(FSDPModule) if not name.startswith("_") and not hasattr(nn.Module, name))


def _allocate_on_all_ranks(unit: Unit, buffers: Sequence[FlatBuffer]) -> None:
    """Allocates the buffers of an unshard. If that fails on one rank, all raise before any waits for its shard."""
    if not buffers:
        return
    root = root_of(unit)
    try:
        try:
            for buffer in buffers:
                buffer.allocate()
        except Exception as error:
            if not root.contract.is_single_rank:
                error.add_note(root.contract.abort(format_traceback(error)))
            _keep_shared(root, error)
            raise
        root.contract.sync_point(Event("unshard", unit.name), always=True)
    except Exception:
        for buffer in buffers:
            buffer.release(keep_part=True)
        raise


def _keep_shared(root: Root, error: Exception) -> None:
    """Remembers an error of this rank that the others know of, inside a pass: they abort it, too."""
    if root.contract.history.is_open:
        root.shared_error = error


def _wait_unshard(unit: Unit) -> None:
    if unit.kept_unsharded:
        units = (*unit.shared_owners, unit)
        gathering = [buffer for unit in units for buffer in unit.buffers if buffer.state is State.GATHERING]
        makes_messages = any(buffer.transport.traits.gathers_messages for buffer in gathering)
        failure = None
        try:
            for other_unit in units:
                other_unit.wait_gathered()
        except Exception as error:
            if isinstance(error, ScaleDistributedError) or not makes_messages:
                raise
            failure = error
        if makes_messages:
            _compare_unshard(unit, gathering, failure)
        follow_user_changes([unit])
        unit.to_unsharded()


def _compare_unshard(unit: Unit, gathered: Sequence[FlatBuffer], failure: Exception | None) -> None:
    """Releases the gathered parameters, and raises, if a rank could not make its message: others have zeros."""
    root = root_of(unit)
    try:
        raise_on_all_ranks(failure, f"unshard() of {unit_title(unit.name)}", root.contract, StepError)
    except Exception as error:
        if error is failure:
            _keep_shared(root, error)
        unit.kept_unsharded = False
        for buffer in gathered:
            buffer.release()
        raise


def _unit_at(module: nn.Module, method: str) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise ValueError(f"{method}: this {type(module).__name__} is not an FSDP unit: call fully_shard(module) first")
    return unit


def _units_at(module: nn.Module, method: str, recurse: bool) -> list[Unit]:
    return units_in(module) if recurse else [_unit_at(module, method)]


def _new(plain: type[nn.Module]) -> nn.Module:
    """Returns an empty module of the class that one of class `plain` has as a unit."""
    cls = sharded_class(cast(Hashable, plain))
    return cls.__new__(cls)


@functools.cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that a module of this class has as a unit, under the same name."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": guarded_forward(cls)}
    return type(cls.__name__, (FSDPModule, cls), names)


def shadowed_name(module: nn.Module) -> str | None:
    """Returns a name of the module's own that a method of `FSDPModule` would take, or None."""
    instance = {*module._modules, *module._parameters, *module._buffers, *vars(module)}
    foreign_classes = (cls for cls in type(module).__mro__ if cls.__module__.partition(".")[0] != "scale_fsdp")
    classes = [vars(cls) for cls in foreign_classes if cls not in nn.Module.__mro__]
    return next((name for name in _METHODS if name in instance or any(name in names for names in classes)), None)


def outermost_root(module: nn.Module) -> Root:
    """Returns the root of a model, given its outermost unit.

    Raises:
        ValueError: The module is a unit inside a sharded model.
    """
    unit = _unit_at(module, "clip_grad_norm_ and no_sync")
    root = root_of(unit)
    if root.outermost is not unit:
        raise ValueError(
            f"'{unit.name}' is a unit inside a sharded model: call this on the outermost one, a "
            f"{type(root.outermost.module).__name__}"
        )
    return root
