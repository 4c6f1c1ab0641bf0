"""The blocks of a model: the modules for which a plan decides.

Models say themselves what must not be cut (`_no_split_modules`, as those of the Hugging Face libraries do), or show it
by repetition: the items of a `ModuleList` or a `Sequential` that have the class of a neighbour. The outermost ones are
taken, and all other modules of the same classes, so that a middle block of its own list counts as well.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, blocks: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Returns the blocks of a model by qualified name, in the order of registration.

    Args:
        model: Any module.
        blocks: Qualified names of modules, none inside another; None finds them.

    Raises:
        ValueError: No blocks are found, a name is not a module's, one block lies in another, or two names are one's.
    """
    if blocks is None:
        return _found(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in blocks:
        if name not in modules or not name:
            near = difflib.get_close_matches(name, modules, n=3) or list(modules)[1:4]
            raise ValueError(f"blocks are named by modules of the model, but {name!r} is none; near: {', '.join(near)}")
    chosen = {name: modules[name] for name in modules if name in set(blocks)}
    _check_apart(chosen)
    return chosen


def _found(model: nn.Module) -> dict[str, nn.Module]:
    told = set(getattr(model, "_no_split_modules", None) or ())
    classes = {type(module) for module in model.modules() if type(module).__name__ in told}
    names: set[str] = set()
    if not classes:
        repeated = dict(_repeated(model, ""))
        names = set(repeated)
        classes = {type(module) for module in repeated.values() if type(module) not in _CONTAINERS}
    found: dict[str, nn.Module] = {}
    for name, block in _outermost(model, "", names, classes):
        if block not in found.values():  # One that stands in two places is visited twice, and treated in one way.
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


def _check_apart(blocks: dict[str, nn.Module]) -> None:
    for name, block in blocks.items():
        for other, around in blocks.items():
            if name != other and any(inner is block for inner in around.modules()):
                is_same = around is block
                told = f"{name!r} and {other!r} are one module" if is_same else f"{name!r} lies in {other!r}"
                raise ValueError(f"blocks lie beside one another, but {told}; name one of them")
