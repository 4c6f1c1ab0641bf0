"""What a sharded module can do beyond the plain one: clip, accumulate without sending, and be seen whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from scale_core.events import Event
from scale_core.norms import clip_grad_norm
from scale_fsdp.guard import refuse_conversion, refuse_copy
from scale_fsdp.root import Root
from scale_fsdp.unit import Unit, root_of, show_tensors, unit_of, units_in


class ShardedModule(nn.Module):
    """The methods that `fully_shard` adds to a module. Call them on the outermost one."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients in place so that their norm over all ranks is at most `max_norm`.

        All ranks call it together, after `backward()`. `torch.nn.utils.clip_grad_norm_` sees local shards only.

        Args:
            max_norm: The largest norm allowed.
            norm_type: p of the p-norm; `math.inf` is the largest magnitude.

        Returns:
            The norm before, scalar; equal on all ranks and to that of the plain model.

        Raises:
            ValueError: `norm_type` is not above 0.
        """
        contract = outermost_root(self).contract
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
            if unit.uses or unit.in_backward or unit.summoned:
                raise RuntimeError(
                    "summon_full_params: the parameters are in use, by a forward or backward pass or by another "
                    "summon_full_params around this one: call it between steps"
                )
        wholes = [_summon(unit) for unit in units]
        try:
            yield
        finally:
            for unit, tensors in zip(units, wholes, strict=True):
                _dismiss(unit, tensors, keep=not volatile)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """What `to`, `half`, `float`, `cuda` and the like are made of."""
        for unit in units_in(self):
            refuse_conversion(unit, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle ask for."""
        refuse_copy(self)
        return {}


def outermost_root(module: nn.Module) -> Root:
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


def _summon(unit: Unit) -> list[list[nn.Parameter]]:
    wholes = []
    for buffer in unit.buffers:
        trains = buffer.trains and buffer.dtype.is_floating_point
        wholes.append([nn.Parameter(tensor, requires_grad=trains) for tensor in unit.gather_whole(buffer)])
    unit.summoned = True
    show_tensors(unit, {id(buffer): tensors for buffer, tensors in zip(unit.buffers, wholes, strict=True)})
    return wholes


@torch.no_grad()
def _dismiss(unit: Unit, wholes: list[list[nn.Parameter]], *, keep: bool) -> None:
    unit.summoned = False
    unit.show_shards()
    if not keep:
        return
    for buffer, tensors in zip(unit.buffers, wholes, strict=True):
        buffer.release()
        for index, tensor in enumerate(tensors):
            buffer.load(index, tensor)
