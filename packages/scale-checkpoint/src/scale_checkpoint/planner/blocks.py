"""Blocks: the modules of a model for which a plan decides.

Models say themselves what must not be cut (`_no_split_modules`, as those of the Hugging Face libraries do), or show it
by repetition: the items of a `ModuleList` or a `Sequential` that have the class of a neighbour. The outermost ones are
taken, and all other modules of the same classes, so that a middle block of its own list counts as well.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, blocks: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Returns the blocks of a model by qualified name, in the order of registration."""
    if blocks is None:
        return _find(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in blocks:
        if name not in modules or not name:
            near = difflib.get_close_matches(name, modules, n=3) or list(modules)[1:4]
            raise ValueError(f"blocks are named by modules of the model, but {name!r} is none; near: {', '.join(near)}")
    chosen = {name: modules[name] for name in modules if name in set(blocks)}
    _check_disjoint(chosen)
    return chosen


def _find(model: nn.Module) -> dict[str, nn.Module]:
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    classes = {type(module) for module in model.modules() if type(module).__name__ in unsplit}
    names: set[str] = set()
    if not classes:
        repeated = dict(_repeated(model, ""))
        names = set(repeated)
        classes = {type(module) for module in repeated.values() if type(module) not in _CONTAINERS}
    found: dict[str, nn.Module] = {}
    for name, block in _outermost(model, "", names, classes):
        if block not in found.values():  # One in two places is visited twice, with one strategy.
            found[name] = block
    if not found:
        inner = [name for name, child in model.named_children() if _has_children(child)]
        example = ", ".join(map(repr, inner[:3])) or "'name'"
        raise ValueError(
            f"{type(model).__name__} has no repeated modules with children in a ModuleList or Sequential: "
            f"name what is to be planned: blocks=[{example}]"
        )
    return found


def _repeated(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Items of lists that have children and a neighbour of the same class; the outermost first, and only those.

    An item that is a list itself counts where nothing inside it does.
    """
    children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    items = Counter(type(child) for _, child in children if _has_children(child)) if _is_list(module) else Counter()
    for qualified, child in children:
        is_item = items[type(child)] > 1 and _has_children(child)
        if is_item and not _is_list(child):
            yield qualified, child
            continue
        inner = list(_repeated(child, qualified))
        yield from inner
        if is_item and not inner and isinstance(child, nn.Sequential):
            yield qualified, child


def _outermost(
    module: nn.Module, name: str, names: set[str], classes: set[type[nn.Module]]
) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        qualified = f"{name}.{key}" if name else key
        if qualified in names or type(child) in classes:
            yield qualified, child
        else:
            yield from _outermost(child, qualified, names, classes)


def _is_list(module: nn.Module) -> bool:
    return type(module) in _CONTAINERS


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _check_disjoint(blocks: dict[str, nn.Module]) -> None:
    for name, block in blocks.items():
        for other, around in blocks.items():
            if name != other and any(inner is block for inner in around.modules()):
                is_same = around is block
                found = f"{name!r} and {other!r} are one module" if is_same else f"{name!r} is inside {other!r}"
                raise ValueError(f"blocks must not contain one another, but {found}; name one of them")


@dataclass(frozen=True)
class BlockSignature:
    """Class and parameters of a block."""

    kind: str  # the name of its class
    parameters: Mapping[str, tuple[int, ...]]  # shapes by name


def block_signature(block: nn.Module) -> BlockSignature:
    """Returns the signature of a block."""
    return BlockSignature(type(block).__name__, {key: tuple(param.shape) for key, param in block.named_parameters()})


def excluded_modules(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Returns the names of the modules that have the class of a block, and are none, nor inside or around one."""
    kinds = {type(block).__name__ for block in blocks.values()}
    return tuple(_modules_of_class(model, {id(block) for block in blocks.values()}, kinds))


def check_same_blocks(model: nn.Module, known: Mapping[str, BlockSignature], excluded: Collection[str]) -> None:
    """Checks that a model has the blocks that a profile was made of, and no more of their kind."""
    modules = dict(model.named_modules(remove_duplicate=False))
    fix = "plan again with plan_memory(model, ...)"
    for name, block in known.items():
        module = modules.get(name)
        description = f"the plan was made for another model: {name!r}"
        if module is None:
            raise ValueError(
                f"{description} is a {block.kind} there, but {type(model).__name__} has no such module; {fix}"
            )
        if type(module).__name__ != block.kind:
            raise ValueError(f"{description} is a {block.kind} there, but a {type(module).__name__} here; {fix}")
        shapes = block_signature(module).parameters
        for key in [*block.parameters, *shapes]:
            planned, present = block.parameters.get(key), shapes.get(key)
            if planned != present:
                raise ValueError(
                    f"{description} has the parameter {key!r} of shape {planned} there, but {present} here; {fix}"
                )
    kinds = {block.kind for block in known.values()}
    for name in _modules_of_class(model, {id(modules[name]) for name in known}, kinds):
        if name not in excluded:
            raise ValueError(
                f"the plan was made for another model: {name!r} is a {type(modules[name]).__name__} here, as its "
                f"blocks are, but the plan has no such block; {fix}"
            )


def _modules_of_class(model: nn.Module, blocks: Collection[int], kinds: Collection[str]) -> list[str]:
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
