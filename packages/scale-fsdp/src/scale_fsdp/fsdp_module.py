"""What a sharded module can do beyond the plain one: clip, accumulate without sending, and be seen whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

from torch import Tensor, nn

from scale_core.consistency.execution_order import Event
from scale_core.optim.clip_grad import clip_grad_norm
from scale_fsdp.backward import BackwardRoot
from scale_fsdp.description import one_line
from scale_fsdp.guards import guarded_forward, refuse_in_use, watch_modules
from scale_fsdp.param_registry import remember
from scale_fsdp.reshard.convert import Converting
from scale_fsdp.state_dict.methods import WithState
from scale_fsdp.step import follow_trainable, root_of
from scale_fsdp.summon import applying, summoned
from scale_fsdp.unit import Unit, unit_of, units_in

# What is otherwise done by itself, done by hand: gather, release, fetch ahead, leave gradients unreduced.
#
# The verbs are those that FSDP2's users know. Each acts on the unit that the module is; those with `recurse` on the
# units inside as well.


class Unsharding:
    """A gather that `unshard(async_op=True)` has started."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Returns when the module's parameters are whole."""
        _wait_pinned(self._unit)


class ByHand(nn.Module):
    """The methods of a sharded module by which its user takes over."""

    def unshard(self, async_op: bool = False) -> Unsharding | None:
        """Gathers this unit's parameters; they stay whole, in the dtype that they are computed in, until `reshard()`.

        All ranks call it together. What is shown are copies: a change to them is lost.

        Args:
            async_op: Return a handle whose `wait()` ends the gather, in place of waiting here.
        """
        unit = _unit_at(self, "unshard")
        _pin(unit)
        if async_op:
            return Unsharding(unit)
        _wait_pinned(unit)
        return None

    def reshard(self) -> None:
        """Releases this unit's parameters, unless they are in use by a forward or backward pass."""
        _unpin(_unit_at(self, "reshard"))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> Self:
        """Whether backward passes reduce the gradients; without, they wait on this rank, as inside `no_sync()`."""
        for unit in _units_at(self, "set_requires_gradient_sync", recurse):
            unit.synchronizes = requires_gradient_sync
        return self

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> Self:
        """Whether the parameters are released between forward and backward, from the next pass on."""
        for unit in _units_at(self, "set_reshard_after_forward", recurse):
            unit.reshard_after_forward = reshard_after_forward
        return self

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> Self:
        """Whether the parameters are released after the backward; what stays is gathered anew after a step."""
        for unit in _units_at(self, "set_reshard_after_backward", recurse):
            unit.reshard_after_backward = reshard_after_backward
        return self

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Begins to gather these units whenever this one is opened in a forward, beside the one that comes next."""
        unit = _unit_at(self, "set_modules_to_forward_prefetch")
        unit.prefetch["forward"] = [_unit_at(module, "set_modules_to_forward_prefetch") for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Begins to gather these units whenever this one is opened in a backward, beside the one that comes next."""
        unit = _unit_at(self, "set_modules_to_backward_prefetch")
        unit.prefetch["backward"] = [_unit_at(module, "set_modules_to_backward_prefetch") for module in modules]


def _pin(unit: Unit) -> None:
    """Starts to gather a unit, which stays gathered until `_unpin`."""
    root_of(unit).recover()
    unit.kept_unsharded = True
    for each in (*unit.shared_owners, unit):
        if not each.use_count and each.is_stale:
            each.release()  # An optimizer has stepped since it was gathered.
        each.gather()


def _wait_pinned(unit: Unit) -> None:
    """Waits for what `_pin` has started, and puts the whole parameters into the module."""
    if unit.kept_unsharded:
        for each in (*unit.shared_owners, unit):
            each.wait_gathered()
        follow_trainable(unit)
        unit.to_unsharded()


def _unpin(unit: Unit) -> None:
    """Back to the shards, unless a forward or a backward is under way."""
    unit.kept_unsharded = False
    if unit.root is not None and not unit.use_count and not unit.in_backward:
        for each in (unit, *unit.shared_owners):
            if not (each.use_count or each.in_backward or each.kept_unsharded):
                each.release()
        unit.to_sharded()


def _unit_at(module: nn.Module, method: str) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise ValueError(
            f"{method}: this {type(module).__name__} is not sharded by itself: call fully_shard(module) first"
        )
    return unit


def _units_at(module: nn.Module, method: str, recurse: bool) -> list[Unit]:
    return units_in(module) if recurse else [_unit_at(module, method)]


class ShardedModule(WithState, ByHand, Converting):
    """The methods that `fully_shard` adds to a module. Call them on the outermost one."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients in place so that their norm over all ranks is at most `max_norm`.

        All ranks call it together, after `backward()`. `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`
        does the same.

        Args:
            max_norm: The largest norm allowed; `math.inf` only measures.
            norm_type: p of the p-norm; `math.inf` is the largest magnitude.

        Returns:
            The norm before, scalar; equal on all ranks and to that of the plain model.

        Raises:
            ValueError: `max_norm` is below 0 or not a number, or `norm_type` is not above 0.
        """
        root = outermost_root(self)
        contract = root.contract
        with contract.waiting(Event("gradient norm", "")):
            return clip_grad_norm(self.parameters(), float(max_norm), float(norm_type), contract.limit_seconds)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, those that wait under `no_sync` for their reduction included.

        An optimizer's own `zero_grad` can't see these: where a micro-batch is thrown away under `no_sync`, call this.
        """
        for unit in units_in(self):
            unit.drop_gradients()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes keep their gradients on this rank, unreduced; the first one outside sends the sum.

        Less to send for gradient accumulation, at the price of the full gradients' memory.

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
        """Inside, the parameters are whole, in the dtype that they are trained in, under their names.

        All ranks enter together. Changes are kept: each rank takes its own piece of what it sees at the end, so all
        must make the same change.

        Args:
            recurse: The units inside as well.
            volatile: Throw changes away.

        Raises:
            RuntimeError: Inside a forward or backward pass, or inside another `summon_full_params`.
        """
        units = units_in(self) if recurse else [unit for unit in (unit_of(self),) if unit is not None]
        for unit in units:
            if unit.root is not None:
                unit.root.recover()
            if unit.use_count or unit.in_backward or unit.in_summon:
                raise RuntimeError(
                    "summon_full_params: the parameters are in use, by a forward or backward pass or by another "
                    "summon_full_params around this one: call it between steps"
                )
        with summoned(units, keep=not volatile):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Calls `fn` with each module inside, children first, and with this one, as to initialise their weights.

        The parameters of the unit that a module belongs to are whole, in the dtype that they are trained in, and what
        `fn` makes of them is kept: on all ranks, what it makes of them on rank 0. No more is gathered at a time than
        one unit and those around it. All ranks call it together.

        Args:
            fn: Called with each module; must not touch parameters of units inside that.

        Raises:
            RuntimeError: The parameters are in use.
        """
        unit = unit_of(self)
        assert unit is not None
        refuse_in_use([unit], "apply")
        with applying(unit):
            return super().apply(fn)

    def extra_repr(self) -> str:
        """What `print(model)` shows beside the class: the plain module's own words, and what is sharded."""
        unit = unit_of(self)
        assert unit is not None
        return ", ".join(filter(None, [super().extra_repr(), one_line(unit)]))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """What deepcopy and pickle ask for: the plain class, of which the copy's own class is made, and the state.

        Raises:
            RuntimeError: The parameters are in use, so that what is in the module is not what it keeps.
        """
        unit = unit_of(self)
        assert unit is not None
        refuse_in_use([unit], "deepcopy and pickle")
        _, plain = type(self).__bases__
        return _new, (plain,), super().__getstate__()  # type: ignore[no-untyped-call]  # typeshed leaves it untyped

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._make_known()

    def _make_known(self) -> None:
        """Enters a copy, or what was read from a file, where the process looks for units; once it is whole."""
        unit = unit_of(self)
        if unit is not None and unit.is_restored and "_modules" in vars(self):
            remember(unit)
            watch_modules(unit)


def _new(plain: type[nn.Module]) -> nn.Module:
    """Returns a module of the class that one of class `plain` has as a unit, without any state yet."""
    cls = sharded_class(cast(Hashable, plain))
    return cls.__new__(cls)


@functools.cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that a module of this class has as a unit, under the same name."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": guarded_forward(cls)}
    return type(cls.__name__, (ShardedModule, cls), names)


def outermost_root(module: nn.Module) -> BackwardRoot:
    """Returns what the units of a model share, given the model.

    Raises:
        ValueError: The module is a unit inside a sharded model.
    """
    unit = unit_of(module)
    assert unit is not None
    root = root_of(unit)
    if root.outermost is not unit:
        raise ValueError(
            f"'{unit.name}' is a unit inside a sharded model: call this on the outermost one, a "
            f"{type(root.outermost.module).__name__}"
        )
    return root
