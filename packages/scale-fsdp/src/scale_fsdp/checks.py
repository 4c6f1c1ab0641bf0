"""What must hold when a unit runs: each a rule that would otherwise be broken without a word.

Whether a unit's parameters may be used, changed or copied past the unit is asked in `guards`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.comm.group import Group
from scale_core.consistency.execution_order import unit_title
from scale_core.flat.buffer import FlatBuffer
from scale_fsdp.unit import Unit


def check_no_gradients(unit: Unit) -> None:
    """Nothing that is summoned takes part in training.

    Raises:
        RuntimeError: The unit trains and is called with gradients enabled.
    """
    if torch.is_grad_enabled() and unit.trains:
        raise RuntimeError(
            f"{unit_title(unit.name)} was called with gradients enabled inside summon_full_params, whose tensors "
            "are copies that no optimizer knows: call it under torch.no_grad(), or outside"
        )


def check_own_parameters(unit: Unit) -> None:
    """What stands in the module is about to be replaced by what is gathered, whatever it is.

    Raises:
        RuntimeError: It is neither shard nor whole parameter of the unit.
    """
    for module, attribute, buffer, number in unit.slots:
        here = module._parameters.get(attribute)
        shard = None if buffer.flatten else buffer.exposed[number]
        if here is not shard and here is not buffer.wholes[number]:
            raise RuntimeError(
                f"another tensor stands in the place of '{buffer.names[number]}', as torch.func.functional_call puts "
                f"it there, and {unit_title(unit.name)} would compute with its own parameter all the same: call it on "
                "a plain copy of the model, or write the values: with torch.no_grad(), model.summon_full_params(): "
                "param.copy_(values)"
            )


def check_not_overwritten(unit: Unit) -> None:
    """What a unit computes with is a copy of its shards, and what is written to it goes with it.

    Raises:
        RuntimeError: Somebody has written to one of its parameters while it was whole.
    """
    for buffer in unit.buffers:
        if buffer.is_overwritten:
            names = ", ".join(f"'{name}'" for name in buffer.names[:4]) + (", ..." if len(buffer.names) > 4 else "")
            which = names if len(buffer.names) == 1 else f"one of {names}"
            raise RuntimeError(
                f"{which} was written to in place while {unit_title(unit.name)} ran, as nn.Embedding(max_norm=...) "
                "does, and that would be lost, since it is a gathered copy: keep what a forward updates in a buffer, "
                "change parameters between steps inside model.summon_full_params(), or leave the module that holds it "
                "unsharded"
            )


def check_unchanged(unit: Unit, versions: Sequence[int]) -> None:
    """Autograd's own rule: what a forward has used, its shards of these versions, must not change before its backward.

    Raises:
        RuntimeError: They differ.
    """
    if versions != unit.versions:
        raise RuntimeError(
            f"the parameters of {unit_title(unit.name)} were changed between its forward and its backward, by an "
            "optimizer step, load_state_dict, a conversion or another in-place operation, so its gradients would be "
            "wrong: call loss.backward() first"
        )


def refuse_hooks(buffer: FlatBuffer) -> None:
    """A hook on a shard would never be called.

    Raises:
        RuntimeError: There is one.
    """
    for index, param in enumerate(buffer.exposed):
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(
                f"a hook is registered on the local shard of '{buffer.names[index]}', where no gradient ever "
                "arrives by itself: see the gradients before they are reduced by scale_core.on_local_grads(...), "
                "and those after it in param.grad when backward() has returned"
            )


def refuse_second_derivatives(unit: Unit) -> None:
    """A graph through a backward pass would need parameters that are released after it.

    Raises:
        RuntimeError: The backward pass that runs now keeps a graph of itself, `create_graph=True`.
    """
    if torch.is_grad_enabled() and not all(buffer.is_aliased for buffer in unit.buffers):
        raise RuntimeError(
            f"a backward pass with create_graph=True has come to {unit_title(unit.name)}, whose parameters are "
            "released after it, so that no second derivative can be taken through it: call backward() and "
            "autograd.grad() without create_graph=True, or leave the module that the penalty is on unsharded"
        )


def check_same_model(unit: Unit, other: Unit) -> None:
    """What one unit fetches ahead must be a unit of the same model.

    Raises:
        ValueError: It is not.
    """
    if other.root is not unit.root:
        raise ValueError(
            f"{unit_title(unit.name)} was told to fetch a {type(other.module).__name__} ahead that is no unit of this "
            "model: pass modules of the same model to set_modules_to_forward_prefetch(...) and "
            "set_modules_to_backward_prefetch(...)"
        )


# Memory that was allocated and not written to: found before somebody computes with it.
#
# What comes from the meta device has no values. torch fills its memory later, by an initialisation or a checkpoint, and
# says nothing where either of them leaves something out: what `__init__` has computed for a buffer is in no checkpoint.


class Blank(NamedTuple):
    """Memory that something must still be written to.

    Attributes:
        tensor: The memory: NaN throughout, where its dtype knows that.
        version: Of the tensor, before anybody wrote to it.
    """

    tensor: Tensor
    version: int

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> Blank:
        if tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.fill_(torch.nan)
        return cls(tensor, tensor._version)

    def is_filled(self, now: Tensor | None) -> bool:
        """Whether what stands in its place now is another tensor, or the same one with something written to it."""
        if now is not self.tensor or not self.tensor.numel() or self.tensor._version != self.version:
            return now is not None and not now.is_meta
        # A write to `tensor.data` leaves no trace but the values; a simulation has none to look at.
        if not self.tensor.is_floating_point() or self.tensor.itemsize == 1:
            return False
        return compat.active_fake_mode() is not None or not bool(self.tensor.isnan().all())


# What `to_empty` has given memory to, until somebody has written to it: buffers, by module and attribute, and shards.
_blank_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, Blank]] = weakref.WeakKeyDictionary()
_blank_shards: weakref.WeakKeyDictionary[FlatBuffer, int] = weakref.WeakKeyDictionary()


def note_blank_buffers(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Records which buffers of a module have got memory in place of none, and no values with it.

    Args:
        module: The module.
        before: Its buffers, as they were.
    """
    for name, old in before.items():
        now = module._buffers.get(name)
        if old is not None and old.is_meta and now is not None and not now.is_meta:
            _blank_buffers.setdefault(module, {})[name] = Blank.of(now)


def note_blank_shard(buffer: FlatBuffer) -> None:
    """Records that the shard of a flat buffer has got memory in place of none, and no values with it."""
    Blank.of(buffer.shard)
    _blank_shards[buffer] = buffer.version


def refuse_blank(unit: Unit) -> None:
    """Refuses to compute with what has no values.

    Raises:
        RuntimeError: A parameter of the unit is on the meta device still, or nothing was written to it or to a buffer
            since it was; names it.
    """
    for buffer in unit.buffers:
        if buffer.is_meta:
            raise RuntimeError(
                f"'{buffer.names[0]}' of {unit_title(unit.name)} is on the meta device and has no values to compute "
                "with: call model.to_empty(device=...) and load a checkpoint, or shard the model without init=False"
            )
        if _blank_shards.get(buffer, -1) == buffer.version:
            raise RuntimeError(
                f"nothing was written to '{buffer.names[0]}' of {unit_title(unit.name)} since it was on the meta "
                "device: load a checkpoint first, model.load_state_dict(...) or load_snapshot(...)"
            )
        _blank_shards.pop(buffer, None)
    for path, module in unit.module.named_modules(prefix=unit.name):
        for attribute, blank in list(_blank_buffers.get(module, {}).items()):
            if not blank.is_filled(module._buffers.get(attribute)):
                raise RuntimeError(
                    f"the buffer '{f'{path}.{attribute}'.lstrip('.')}' has had no values since it was on the meta "
                    "device, and the checkpoint has none for it: write what its module's __init__ computes, "
                    f"module.{attribute}.copy_(...), or build that module outside of torch.device('meta')"
                )
            del _blank_buffers[module][attribute]


# What must be alike before the units of a model run: among themselves, and on all ranks.
#
# Ranks that would cut, cast or fetch differently read each other's bytes as something else. So every rank describes in
# words all that decides what is sent and when, and the descriptions are compared before the first gather.


def check_units(units: Sequence[Unit], group: Group) -> None:
    """Checks that the units of one model can run together.

    Args:
        units: All of them.
        group: The ranks that share the model.

    Raises:
        ValueError: A unit shares a parameter with one outside of the model, or is sharded over other ranks.
        RuntimeError: A parameter or a buffer has no values.
    """
    for unit in units:
        refuse_blank(unit)
        for lender in unit.shared_owners:
            if lender not in units:
                raise ValueError(
                    f"a {type(unit.module).__name__} shares a parameter with a {type(lender.module).__name__} that is "
                    "sharded too, but no sharded module holds both: call fully_shard on the module around them"
                )
        ranks = unit.options.ranks.whole
        if unit.buffers and ranks.size > 1 and ranks.ranks != group.ranks:
            raise ValueError(
                f"{unit_title(unit.name)} is sharded over ranks {list(ranks.ranks)} and the rest over "
                f"{list(group.ranks)}: pass one process_group to every fully_shard of a model"
            )


def describe_units(units: Sequence[Unit]) -> list[str]:
    """Returns, line by line, all that decides what the units send: equal lines mean equal messages."""
    lines = []
    for unit in units:
        title = unit.name or "root"
        for buffer in unit.buffers:
            lines += [
                f"{title}: {name.removesuffix(unit.of_ranks)} {entry.shape} {buffer.dtype} "
                f"trains={buffer.exposed_of(index).requires_grad} cut at {entry.cut}"
                for index, (name, entry) in enumerate(zip(buffer.names, buffer.layout.entries, strict=True))
            ]
            lines.append(
                f"{title}: computes in {buffer.compute_dtype}, reduces in {buffer.reduce_dtype}, "
                f"flatten={buffer.flatten}, layout {buffer.layout.digest()}"
            )
        lines.append(
            f"{title}: over {unit.options.ranks.replicas.size} x {unit.options.ranks.shard.size} ranks, "
            f"reshard_after_forward={unit.options.reshard_after_forward}, "
            f"shares with {[lender.name for lender in unit.shared_owners]}"
        )
    return lines
