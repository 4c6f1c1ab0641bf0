"""What a plan knows a model by: its blocks, by name, class and parameters, and that it has no more of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn


@dataclass(frozen=True)
class BlockShape:
    """What a plan knows a block by.

    Attributes:
        kind: The name of its class.
        parameters: Shapes by name.
    """

    kind: str
    parameters: Mapping[str, tuple[int, ...]]


class ModelShape(Protocol):
    """What a profile says of the model that it was made of.

    Attributes:
        blocks: What the blocks are, by name.
        left_out: See `left_out`.
    """

    @property
    def blocks(self) -> Mapping[str, BlockShape]: ...

    @property
    def left_out(self) -> Collection[str]: ...


def shape_of(block: nn.Module) -> BlockShape:
    """Returns what a plan knows a block by.

    Args:
        block: Any module.
    """
    return BlockShape(type(block).__name__, {key: tuple(param.shape) for key, param in block.named_parameters()})


def left_out(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Returns the names of the modules that have the class of a block, and are none, nor inside or around one.

    Args:
        model: Any module.
        blocks: Of it, by name.
    """
    kinds = {type(block).__name__ for block in blocks.values()}
    return tuple(_alike(model, {id(block) for block in blocks.values()}, kinds))


def check_same_blocks(model: nn.Module, known: ModelShape) -> None:
    """Checks that a model has the blocks that a profile was made of, and no more of their kind.

    Args:
        model: Any module.
        known: What it is compared with.

    Raises:
        ValueError: It has others: names the first difference.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    mend = "plan again with plan_memory(model, ...)"
    for name, block in known.blocks.items():
        module = modules.get(name)
        told = f"the plan was made for another model: {name!r}"
        if module is None:
            raise ValueError(f"{told} is a {block.kind} there, but {type(model).__name__} has no such module; {mend}")
        if type(module).__name__ != block.kind:
            raise ValueError(f"{told} is a {block.kind} there, but a {type(module).__name__} here; {mend}")
        shapes = shape_of(module).parameters
        for key in [*block.parameters, *shapes]:
            planned, present = block.parameters.get(key), shapes.get(key)
            if planned != present:
                raise ValueError(
                    f"{told} has the parameter {key!r} of shape {planned} there, but {present} here; {mend}"
                )
    kinds = {block.kind for block in known.blocks.values()}
    for name in _alike(model, {id(modules[name]) for name in known.blocks}, kinds):
        if name not in known.left_out:
            raise ValueError(
                f"the plan was made for another model: {name!r} is a {type(modules[name]).__name__} here, as its "
                f"blocks are, but the plan has no such block; {mend}"
            )


def _alike(model: nn.Module, blocks: Collection[int], kinds: Collection[str]) -> list[str]:
    """The outermost modules of these classes beside the blocks, which are known by their identity."""
    found: list[str] = []
    waiting = [(name, child) for name, child in model.named_children()]
    while waiting:
        name, module = waiting.pop(0)
        if id(module) in blocks:
            continue
        is_around = any(id(part) in blocks for part in module.modules())
        if type(module).__name__ in kinds and not is_around:
            found.append(name)
        else:
            waiting += [(f"{name}.{key}", child) for key, child in module.named_children()]
    return found
