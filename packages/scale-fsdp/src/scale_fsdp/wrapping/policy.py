"""Auto-wrap policies: which modules become units, in a form of our own and in FSDP1's.

A unit is gathered and released together: too small, and the collectives' latency shows; too large, and the memory does.
A policy is asked about one module at a time, changes nothing, and can be read, printed and tested without any rank;
`scale_fsdp.wrapping.auto_wrap` walks the model and applies it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from scale_core.arguments import checked_arguments, did_you_mean

# Modules that are never called, so that nothing would gather their parameters.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Modules that are never entered: their children are used without being called.
FORCE_LEAF_MODULES = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class Candidate:
    """A module that a policy is asked about.

        >>> from torch import nn
        >>> from scale_fsdp.wrapping.policy import Candidate
        >>> Candidate("blocks.0", nn.Linear(8, 8), num_params=72, is_root=False).num_params
        72

    Attributes:
        name: Qualified name below the root, which is "" itself.
        module: The module.
        num_params: Elements of the parameters below it that no unit holds yet.
        is_root: `plan_units` was called with it.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    name: str
    module: nn.Module
    num_params: int
    is_root: bool


class Policy(ABC):
    """Selects units; called for a module before (`enters`) and after its children (`selects`).

    Attributes:
        wraps_leaves: A module may be a unit even if `enters` is False for it.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp.wrapping.auto_wrap import plan_units
        >>> from scale_fsdp.wrapping.policy import Policy
        >>> class Wide(Policy):
        ...     def selects(self, candidate):
        ...         return isinstance(candidate.module, nn.Linear) and candidate.module.out_features > 100
        >>> plan_units(nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 8)), Wide())
        ['0']

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    wraps_leaves = True

    @abstractmethod
    def selects(self, candidate: Candidate) -> bool:
        """Whether the module becomes a unit, given the parameters that its children left over."""

    def enters(self, candidate: Candidate) -> bool:
        """Whether modules inside it may become units: not where they are used without being called."""
        return not isinstance(candidate.module, FORCE_LEAF_MODULES)

    def check(self, root: nn.Module) -> None:  # noqa: B027  most policies fit every model
        """Raises ValueError where the policy does not fit this model."""


KeywordPolicy: TypeAlias = Callable[..., bool]
"""FSDP1's form, as `torch.distributed.fsdp.wrap.size_based_auto_wrap_policy`.

Called with `module=`, `recurse=` (whether it asks for what is inside) and `nonwrapped_numel=`.
"""


@dataclass(frozen=True)
class _KeywordPolicyAdapter(Policy):
    """A policy in the form of FSDP1's; it wraps no module that it doesn't enter."""

    policy: KeywordPolicy
    wraps_leaves = False

    def selects(self, candidate: Candidate) -> bool:
        return self._ask(candidate, recurse=False)

    def enters(self, candidate: Candidate) -> bool:
        return self._ask(candidate, recurse=True)

    def _ask(self, candidate: Candidate, recurse: bool) -> bool:
        return self.policy(module=candidate.module, recurse=recurse, nonwrapped_numel=candidate.num_params)


@dataclass(frozen=True)
class _SizePolicy(Policy):
    min_num_params: float
    wraps_leaves = False

    def selects(self, candidate: Candidate) -> bool:
        return self._is_large(candidate) and not isinstance(candidate.module, CONTAINERS)

    def enters(self, candidate: Candidate) -> bool:
        return self._is_large(candidate) and super().enters(candidate)

    def _is_large(self, candidate: Candidate) -> bool:
        return candidate.num_params >= self.min_num_params


@checked_arguments
def size_policy(min_num_params: float) -> Policy:
    """Units of at least `min_num_params` elements each, counted without the units inside them.

    Raises:
        ValueError: `min_num_params` is negative.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp import size_policy
        >>> from scale_fsdp.wrapping.auto_wrap import plan_units
        >>> model = nn.Sequential(nn.Linear(32, 32), nn.Linear(4, 4), nn.Linear(32, 32))
        >>> plan_units(model, size_policy(min_num_params=1000))
        ['0', '2']

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    if min_num_params < 0:
        raise ValueError(f"a unit has 0 elements or more, but min_num_params is {min_num_params}")
    return _SizePolicy(min_num_params)


@dataclass(frozen=True)
class _ClassPolicy(Policy):
    classes: tuple[type[nn.Module] | str, ...]

    def selects(self, candidate: Candidate) -> bool:
        return candidate.num_params > 0 and self._matches(candidate.module)

    def check(self, root: nn.Module) -> None:
        if not any(self._matches(module) for module in root.modules()):
            present = sorted({type(module).__name__ for module in root.modules()})
            class_names = [cls if isinstance(cls, str) else cls.__name__ for cls in self.classes]
            raise ValueError(
                f"class_policy: no module is a {' or '.join(class_names)}; {did_you_mean(class_names, present)}"
            )

    def _matches(self, module: nn.Module) -> bool:
        names = {cls.__name__ for cls in type(module).__mro__}
        return any(cls in names if isinstance(cls, str) else isinstance(module, cls) for cls in self.classes)


def class_policy(*classes: type[nn.Module] | str) -> Policy:
    """Units are the modules of these classes or of subclasses of them.

    Args:
        classes: Classes, or their names as transformers lists them: `class_policy(*model._no_split_modules)`. At least
            one of them has to occur, not all: such a list serves several models.

    Raises:
        TypeError: An argument is neither a class nor a name.
        ValueError: There are no arguments; or, with the model, no module is of any of the classes.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp import class_policy
        >>> from scale_fsdp.wrapping.auto_wrap import plan_units
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        >>> plan_units(model, class_policy(nn.TransformerEncoderLayer))
        ['layers.0', 'layers.1']

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    for cls in classes:
        if not isinstance(cls, (str, type)):
            raise TypeError(f"class_policy takes classes or their names, but got {cls!r}; write class_policy(*names)")
    if not classes:
        raise ValueError("class_policy needs at least one class; write class_policy(nn.TransformerEncoderLayer)")
    return _ClassPolicy(classes)


@checked_arguments
def no_split_policy(model: nn.Module) -> Policy:
    """Units are the blocks of a model of transformers, or of any library whose models have `_no_split_modules`.

    Reads that attribute, a set or list of class names, of the model and of all models inside it.

    Raises:
        ValueError: No model in it names any class.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp import no_split_policy
        >>> from scale_fsdp.wrapping.auto_wrap import plan_units
        >>> class Model(nn.Sequential):  # as models of transformers do
        ...     _no_split_modules = ["Bilinear"]
        >>> model = Model(nn.Bilinear(2, 2, 2), nn.Linear(2, 2))
        >>> plan_units(model, no_split_policy(model))
        ['0']

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    names: set[str] = set()
    for module in model.modules():
        listed = getattr(module, "_no_split_modules", None)
        names.update(listed if isinstance(listed, (set, frozenset, list, tuple)) else ())
    if names:
        return class_policy(*sorted(names))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    listed_blocks = [(type(child).__name__, len(module)) for module in lists for child in module]
    blocks = {name for name, length in listed_blocks if length > 1} or {name for name, _ in listed_blocks}
    write = f"class_policy({', '.join(map(repr, sorted(blocks)))})" if blocks else "size_policy(min_num_params=...)"
    raise ValueError(
        f"no_split_policy: this {type(model).__name__} has no _no_split_modules that name its blocks; write {write}"
    )


@dataclass(frozen=True)
class _NamePolicy(Policy):
    patterns: tuple[re.Pattern[str], ...]

    def selects(self, candidate: Candidate) -> bool:
        if candidate.num_params == 0 or isinstance(candidate.module, CONTAINERS):
            return False
        return any(pattern.fullmatch(candidate.name) for pattern in self.patterns)

    def check(self, root: nn.Module) -> None:
        modules = dict(root.named_modules())
        for pattern in self.patterns:
            matched = [name for name in modules if pattern.fullmatch(name)]
            if not matched:
                plain = re.sub(r"\\d\+|\[[^]]*\][+*]?", "0", pattern.pattern).replace("\\", "")
                hint = did_you_mean(plain, list(modules)[1:])
                raise ValueError(f"name_policy: {pattern.pattern!r} matches the name of no module; {hint}")
            if all(isinstance(modules[name], CONTAINERS) for name in matched):
                class_name, inside = type(modules[matched[0]]).__name__, re.escape(matched[0]) + r"\.[^.]+"
                raise ValueError(
                    f"name_policy: {pattern.pattern!r} matches only {matched[0]!r}, a {class_name}, which is never "
                    f"called; select what it holds: name_policy(r'{inside}')"
                )


def name_policy(*patterns: str) -> Policy:
    r"""Units are the modules whose full qualified name matches a regular expression, as `r"layers\.\d+"`.

    Lists and dicts of modules, which are never called, and modules without parameters are no units.

    Raises:
        ValueError: There are no patterns, or one is not a regular expression; or, with the model, one matches no module
            that could be a unit.

    Examples:
        >>> from torch import nn
        >>> from scale_fsdp import name_policy
        >>> from scale_fsdp.wrapping.auto_wrap import plan_units
        >>> plan_units(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), name_policy(r"[02]"))
        ['0', '2']

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    if not patterns:
        raise ValueError(r'name_policy needs at least one pattern; write name_policy(r"layers\.\d+")')
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(f"name_policy: {pattern!r} is not a regular expression: {error}") from error
    return _NamePolicy(tuple(compiled))


def as_policy(policy: Policy | KeywordPolicy) -> Policy:
    """The policy in either form as a `Policy`."""
    if isinstance(policy, Policy):
        return policy
    if not callable(policy):
        raise TypeError(f"a policy is a Policy or a function of module=, recurse=, ..., but got {policy!r}")
    return _KeywordPolicyAdapter(policy)
