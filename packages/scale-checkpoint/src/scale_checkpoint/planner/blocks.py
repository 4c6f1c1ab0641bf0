"""Blocks, the modules of a model for which a plan decides, and the strategies among which it does.

Models name the modules that must not be cut (`_no_split_modules`, as the Hugging Face libraries do), or show
it by repetition: the items of a `ModuleList` or a `Sequential` that have the class of a neighbor. The outermost ones
are taken, and all other modules of the same classes, so that a middle block of its own list counts as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from scale_checkpoint.recompute.policy import SELECTIVE, resolve_policy
from scale_checkpoint.recompute.recompute import get_forward, unwrap_forward, wrap_forward
from scale_checkpoint.wrapper import apply_checkpointing
from scale_core.arguments import did_you_mean

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, blocks: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Returns the blocks of a model by qualified name, in the order of registration."""
    if blocks is None:
        return _find(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in blocks:
        if name not in modules or not name:
            hint = did_you_mean(name, list(modules)[1:])
            raise ValueError(f"blocks: expected names of modules of the model, got {name!r}; {hint}")
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
    blocks: dict[str, nn.Module] = {}
    for name, block in _outermost(model, "", names, classes):
        if block not in blocks.values():  # One in two places is visited twice, with one strategy.
            blocks[name] = block
    if not blocks:
        inner = [name for name, child in model.named_children() if _has_children(child)]
        example = ", ".join(map(repr, inner[:3])) or "'name'"
        raise ValueError(
            f"{type(model).__name__} has no repeated modules with children in a ModuleList or Sequential: "
            f"name what is to be planned: blocks=[{example}]"
        )
    return blocks


def _repeated(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Items of lists that have children and a neighbor of the same class; the outermost first, and only those.

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
                overlap = f"{name!r} and {other!r} are one module" if is_same else f"{name!r} is inside {other!r}"
                raise ValueError(f"blocks must not contain one another, but {overlap}; name one of them")


@dataclass(frozen=True)
class BlockSignature:
    """Class and parameters of a block."""

    kind: str  # the name of its class
    parameters: Mapping[str, tuple[int, ...]]  # shapes by name


def block_signature(block: nn.Module) -> BlockSignature:
    """Returns the signature of a block."""
    return BlockSignature(type(block).__name__, {key: tuple(param.shape) for key, param in block.named_parameters()})


def excluded_modules(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Returns the names of the outermost modules that have a block's class, and are none, nor inside or around one."""
    kinds = {type(block).__name__ for block in blocks.values()}
    block_ids = set(map(id, blocks.values()))
    excluded: list[str] = []
    waiting = list(model.named_children())
    while waiting:
        name, module = waiting.pop(0)
        if id(module) in block_ids:
            continue
        is_around = any(id(part) in block_ids for part in module.modules())
        if type(module).__name__ in kinds and not is_around:
            excluded.append(name)
        else:
            waiting += [(f"{name}.{key}", child) for key, child in module.named_children()]
    return tuple(excluded)


def check_same_blocks(model: nn.Module, known: Mapping[str, BlockSignature], excluded: Collection[str]) -> None:
    """Checks that a model has the blocks that a profile was made of, and no more of their kind."""
    modules = dict(model.named_modules(remove_duplicate=False))

    def other_model(name: str, difference: str) -> ValueError:
        fix = "plan again with plan_memory(model, ...)"
        return ValueError(f"the plan was made for another model: {name!r} {difference}; {fix}")

    for name, block in known.items():
        module = modules.get(name)
        if module is None:
            raise other_model(name, f"is a {block.kind} there, but {type(model).__name__} has no such module")
        present = block_signature(module)
        if present.kind != block.kind:
            raise other_model(name, f"is a {block.kind} there, but a {present.kind} here")
        for key in [*block.parameters, *present.parameters]:
            then, now = block.parameters.get(key), present.parameters.get(key)
            if then != now:
                raise other_model(name, f"has the parameter {key!r} of shape {then} there, but {now} here")
    for name in excluded_modules(model, {name: modules[name] for name in known}):
        if name not in excluded:
            kind = type(modules[name]).__name__
            raise other_model(name, f"is a {kind} here, as its blocks are, but the plan has no such block")


KEEP = "keep"
RECOMPUTE = "recompute"
OFFLOAD = "offload"

Strategies: TypeAlias = Sequence[str] | Mapping[str, str | Sequence[str]]
"""Strategies by name: "keep", "recompute", "selective", "offload"; or names of your own for operators whose results are
kept, as {"keep": "keep", "recompute": "recompute", "attention": ["_scaled_dot_product.*"]}."""

ResolvedStrategies: TypeAlias = Mapping[str, str | tuple[str, ...]]
"""By name, what `apply_checkpointing` takes."""

_KNOWN = (KEEP, RECOMPUTE, SELECTIVE, OFFLOAD)


def resolve_strategies(strategies: Strategies | None, device: torch.device) -> dict[str, str | tuple[str, ...]]:
    """Returns the setting of each strategy, by name; "keep" and "recompute" are always among them.

    None takes all known ones, "offload" only where the device is not the host.
    """
    if strategies is None:
        strategies = [name for name in _KNOWN if name != OFFLOAD or device.type != "cpu"]
    if not isinstance(strategies, Mapping):
        unknown = [name for name in strategies if name not in _KNOWN]
        if unknown:
            raise ValueError(
                f"a strategy is one of {', '.join(map(repr, _KNOWN))}, got {unknown[0]!r}: write "
                f'strategies={{"{unknown[0]}": ["addmm"], ...}} for operators whose results are kept'
            )
        strategies = {name: name for name in strategies}
    resolved: dict[str, str | tuple[str, ...]] = {KEEP: KEEP, RECOMPUTE: RECOMPUTE}
    for name, how in strategies.items():
        if isinstance(how, str):
            if how not in _KNOWN:
                raise ValueError(f"strategy {name!r}: expected one of {_KNOWN} or operators, got {how!r}")
            resolved[name] = how
        else:
            operators = tuple(how)
            if not operators or not all(isinstance(operator, str) for operator in operators):
                raise TypeError(f"strategy {name!r}: plans are saved, so give names of operators, not {operators!r}")
            resolve_policy(operators)
            resolved[name] = operators
    return resolved


@contextmanager
def applied(module: nn.Module, how: str | Sequence[str]) -> Iterator[None]:
    """Inside, a module follows one strategy, as `apply_checkpointing` takes it; afterwards the one before."""
    before = get_forward(module)
    apply_checkpointing(module, how)
    try:
        yield
    finally:
        unwrap_forward(module)
        if before is not None:
            wrap_forward(module, before)
