r"""Which modules become units, and the way to make them so.

A unit is what is gathered and released together: too small, and the collectives' latency shows; too large, and the
memory does. So the choice stands apart from the sharding: a *policy* says which modules, `plan_units` turns it into a
list of names that can be printed, and then either `auto_wrap` puts a wrapper around each, or `fully_shard_modules`
shards each in place.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    >>> plan_units(model, class_policy(nn.Linear))
    ['0', '2.0', '2.1']
    >>> plan_units(model, name_policy(r"2\..*", "2"))  # nothing is left for 2 itself
    ['2.0', '2.1']
    >>> plan_units(model, size_policy(min_num_params=40))
    ['2']

`enable_wrap`, `wrap`, `auto_wrap` and the two policies in `*_auto_wrap_policy` keep the names and the meaning that they
have in FairScale. What differs: the context is a context variable, so threads and tasks don't see each other's;
an inner context replaces the outer one until it ends; shared modules and parameters count once.
"""

from __future__ import annotations

import difflib
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from scale_core.shard import shard_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, so that nothing would gather them."""


@dataclass(frozen=True)
class Candidate:
    """A module that a policy is asked about.

    Attributes:
        name: Qualified name below the module that planning started from, which is "" itself.
        module: The module.
        num_params: Elements of the parameters below it that no unit holds yet.
        is_root: Planning started from it.
    """

    name: str
    module: nn.Module
    num_params: int
    is_root: bool


class Policy(ABC):
    """Chooses units; asked about a module before and after its children.

    Attributes:
        wraps_leaves: A module that `enters` refuses may still be a unit.
    """

    wraps_leaves = True

    @abstractmethod
    def selects(self, candidate: Candidate) -> bool:
        """Whether the module becomes a unit, given what its children left over."""

    def enters(self, candidate: Candidate) -> bool:
        """Whether modules inside it may become units: not where they are used without being called."""
        return not isinstance(candidate.module, tuple(default_auto_wrap_policy.FORCE_LEAF_MODULES))

    def check(self, root: nn.Module) -> None:  # noqa: B027  most policies fit every model
        """Raise ValueError where the policy can't mean this model."""


KeywordPolicy: TypeAlias = Callable[..., bool]
"""FairScale's form: called with `module=`, `recurse=`, `unwrapped_params=` and `module_is_root=`."""


class _DefaultPolicy:
    """The type of `default_auto_wrap_policy`, whose two sets of classes may be changed in place.

    Attributes:
        EXCLUDE_WRAP_MODULES: Classes that are entered, but never wrapped.
        FORCE_LEAF_MODULES: Classes that are never entered: their children are used without being called.
    """

    EXCLUDE_WRAP_MODULES: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}  # noqa: RUF012  FairScale's surface
    FORCE_LEAF_MODULES: set[type[nn.Module]] = {nn.MultiheadAttention}  # noqa: RUF012

    def __call__(
        self,
        module: nn.Module,
        recurse: bool,
        unwrapped_params: int,
        module_is_root: bool,
        min_num_params: float = int(1e8),
        force_leaf_modules: Iterable[type[nn.Module]] | None = None,
        exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
        skip_params_check_for_root: bool = False,
    ) -> bool:
        leaves = self.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        excluded = self.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
        large = unwrapped_params >= min_num_params or (module_is_root and skip_params_check_for_root)
        return large and not isinstance(module, tuple(leaves if recurse else excluded))


default_auto_wrap_policy = _DefaultPolicy()
"""FairScale's default: modules of at least `min_num_params` elements that no unit inside them holds."""


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """FairScale's policy by tag: modules that have a `wrapper_config`, whose entries are the wrapper's arguments."""
    return recurse or hasattr(module, "wrapper_config")


@dataclass(frozen=True)
class _ByKeywords(Policy):
    """A policy in FairScale's form, which never wraps what it doesn't enter."""

    policy: KeywordPolicy
    wraps_leaves = False

    def selects(self, candidate: Candidate) -> bool:
        return self._ask(candidate, recurse=False)

    def enters(self, candidate: Candidate) -> bool:
        return self._ask(candidate, recurse=True)

    def _ask(self, candidate: Candidate, recurse: bool) -> bool:
        return self.policy(
            module=candidate.module,
            recurse=recurse,
            unwrapped_params=candidate.num_params,
            module_is_root=candidate.is_root,
        )


def size_policy(min_num_params: float) -> Policy:
    """Units of at least `min_num_params` elements each, counted without the units inside them.

    Raises:
        ValueError: `min_num_params` is negative.
    """
    if min_num_params < 0:
        raise ValueError(f"a unit has 0 elements or more, but min_num_params is {min_num_params}")
    return _ByKeywords(functools.partial(default_auto_wrap_policy, min_num_params=min_num_params))


@dataclass(frozen=True)
class _ByClass(Policy):
    classes: tuple[type[nn.Module] | str, ...]

    def selects(self, candidate: Candidate) -> bool:
        return candidate.num_params > 0 and self._matches(candidate.module)

    def check(self, root: nn.Module) -> None:
        if not any(self._matches(module) for module in root.modules()):
            present = sorted({type(module).__name__ for module in root.modules()})
            wanted = [wanted if isinstance(wanted, str) else wanted.__name__ for wanted in self.classes]
            raise ValueError(f"class_policy: no module is a {' or '.join(wanted)}; {_near(wanted, present)}")

    def _matches(self, module: nn.Module) -> bool:
        names = {cls.__name__ for cls in type(module).__mro__}
        return any(
            wanted in names if isinstance(wanted, str) else isinstance(module, wanted) for wanted in self.classes
        )


def class_policy(*classes: type[nn.Module] | str) -> Policy:
    """Units are the modules of these classes or of subclasses of them.

    Args:
        classes: Classes, or their names as transformers lists them: `class_policy(*model._no_split_modules)`. At least
            one of them has to occur, not all: such a list serves several models.

    Raises:
        TypeError: An argument is neither a class nor a name.
        ValueError: There are no arguments; or, once it meets the model, no module is of any of the classes.
    """
    for wanted in classes:
        if not isinstance(wanted, (str, type)):
            raise TypeError(
                f"class_policy takes classes or their names, but got {wanted!r}; write class_policy(*names)"
            )
    if not classes:
        raise ValueError("class_policy needs at least one class; write class_policy(nn.TransformerEncoderLayer)")
    return _ByClass(classes)


@dataclass(frozen=True)
class _ByName(Policy):
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
                raise ValueError(
                    f"name_policy: {pattern.pattern!r} matches the name of no module; {_near([plain], list(modules))}"
                )
            if all(isinstance(modules[name], CONTAINERS) for name in matched):
                held, inside = type(modules[matched[0]]).__name__, re.escape(matched[0]) + r"\.[^.]+"
                raise ValueError(
                    f"name_policy: {pattern.pattern!r} matches only {matched[0]!r}, a {held}, which is never called; "
                    f"select what it holds: name_policy(r'{inside}')"
                )


def name_policy(*patterns: str) -> Policy:
    r"""Units are the modules whose whole qualified name matches a regular expression, as `r"layers\.\d+"`.

    Lists and dicts of modules are passed over, since they are never called, and so are modules without parameters.

    Raises:
        ValueError: There are no patterns, or one is no regular expression; or, once it meets the model, one of them
            matches nothing that could be a unit.
    """
    if not patterns:
        raise ValueError(r'name_policy needs at least one pattern; write name_policy(r"layers\.\d+")')
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(f"name_policy: {pattern!r} is no regular expression: {error}") from error
    return _ByName(tuple(compiled))


def plan_units(
    module: nn.Module, policy: Policy | KeywordPolicy, wrapper_cls: type[nn.Module] | None = None
) -> list[str]:
    """The qualified names of the modules that `policy` makes units, children before parents; changes nothing.

    A module that stands at several places is planned once, under its first name. What is a `wrapper_cls` already, or
    holds nothing but local shards, is left alone, and its parameters count for no other unit.

    Raises:
        TypeError: `policy` is neither a Policy nor callable.
        ValueError: The policy doesn't fit the model.
    """
    if not callable(policy) and not isinstance(policy, Policy):
        raise TypeError(f"a policy is a Policy or a function of module=, recurse=, ..., but got {policy!r}")
    chosen = policy if isinstance(policy, Policy) else _ByKeywords(policy)
    chosen.check(module)
    units: list[str] = []
    visited: set[nn.Module] = set()
    taken = {param for param in module.parameters() if shard_of(param) is not None}

    def candidate(name: str, part: nn.Module) -> Candidate:
        return Candidate(name, part, sum(p.numel() for p in part.parameters() if p not in taken), part is module)

    def visit(name: str, part: nn.Module) -> None:
        if part in visited:
            return
        visited.add(part)
        params = list(part.parameters())
        if (wrapper_cls is not None and isinstance(part, wrapper_cls)) or (params and taken.issuperset(params)):
            taken.update(params)
            return
        if chosen.enters(candidate(name, part)):
            for key, child in part.named_children():
                visit(f"{name}.{key}" if name else key, child)
        elif not chosen.wraps_leaves:
            return
        if chosen.selects(candidate(name, part)):
            units.append(name)
            taken.update(params)

    visit("", module)
    return units


def _near(wanted: Iterable[str], present: list[str]) -> str:
    """Names that are there, the nearest to the wanted ones first."""
    found = [name for want in wanted for name in difflib.get_close_matches(want, present, n=3)]
    names = ", ".join(repr(name) for name in dict.fromkeys(found or present[:8]))
    return f"near names in the model: {names}" if found else f"the model has {names}"


@dataclass(frozen=True)
class _Context:
    """What `enable_wrap` was given."""

    policy: Policy | KeywordPolicy | None
    wrapper_cls: type[nn.Module] | None
    kwargs: Mapping[str, Any]

    @property
    def wrapper(self) -> type[nn.Module]:
        if self.wrapper_cls is not None:
            return self.wrapper_cls
        from scale_fsdp.wrapper import FullyShardedDataParallel  # it stands above this module

        return FullyShardedDataParallel


_context: ContextVar[_Context | None] = ContextVar("scale_fsdp.wrap", default=None)


@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | KeywordPolicy | None = None,
    *,
    wrapper_cls: type[nn.Module] | None = None,
    **wrapper_kwargs: Any,
) -> Iterator[None]:
    """Let `wrap` and `auto_wrap` inside the block wrap modules; outside of it they return them as they are.

    An inner block replaces the outer one altogether until it ends: neither its policy nor its arguments are inherited.

    Args:
        auto_wrap_policy: For calls of `auto_wrap` that name none.
        wrapper_cls: Called as `wrapper_cls(module, **arguments)`; FullyShardedDataParallel by default.
        wrapper_kwargs: Arguments for every wrapper; `module.wrapper_config` goes before them, a call's own before both.
    """
    token = _context.set(_Context(auto_wrap_policy, wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap one module as the surrounding `enable_wrap` says; outside of one, return it as it is.

    Raises:
        TypeError: `module.wrapper_config` is no mapping.
        ValueError: The module is wrapped already.
    """
    context = _context.get()
    if context is None:
        return module
    wrapper = context.wrapper
    if isinstance(module, wrapper):
        raise ValueError(
            f"wrap expects a module that isn't wrapped, but got a {type(module).__name__}; "
            "leave this call out, or give its arguments to the first one"
        )
    return wrapper(module, **{**context.kwargs, **_configured(module), **wrap_overrides})


def auto_wrap(
    module: nn.Module,
    auto_wrap_policy: Policy | KeywordPolicy | None = None,
    *,
    min_num_params: float | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Wrap those modules below and including `module` that a policy selects, children first.

    Outside of `enable_wrap` it returns the module as it is, like `wrap`. The root is wrapped only where the policy
    selects it, so that `FullyShardedDataParallel(auto_wrap(model))` holds the rest in an outer unit.

    Args:
        module: Changed in place below the root.
        auto_wrap_policy: By default that of `enable_wrap`, else `default_auto_wrap_policy`.
        min_num_params: Short for `size_policy(min_num_params)`.
        kwargs: Arguments for every wrapper, which override those of the context and of `wrapper_config`.

    Returns:
        The module, or the wrapper around it.

    Raises:
        ValueError: Both a policy and `min_num_params` are given, or the policy doesn't fit the model.
    """
    if min_num_params is not None:
        if auto_wrap_policy is not None:
            raise ValueError(
                f"auto_wrap takes a policy or min_num_params={min_num_params}, but got both; "
                "write functools.partial(default_auto_wrap_policy, min_num_params=...) to combine them"
            )
        auto_wrap_policy = size_policy(min_num_params)
    context = _context.get()
    if context is None:
        return module
    policy = auto_wrap_policy or context.policy or default_auto_wrap_policy
    units = [module.get_submodule(name) for name in plan_units(module, policy, context.wrapper)]
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in module.modules():
        for key, child in parent._modules.items():  # named_children() skips a second place of a shared child
            if child is not None:
                places.setdefault(child, []).append((parent, key))
    root = module
    for unit in units:
        wrapped = wrap(unit, **kwargs)
        for parent, key in places.get(unit, ()):
            parent.register_module(key, wrapped)
        root = wrapped if unit is module else root
    return root


def fully_shard_modules(module: nn.Module, policy: Policy | KeywordPolicy, **kwargs: Any) -> nn.Module:
    """Shard in place those modules that a policy selects, children first, and at last `module` around the rest.

    Args:
        module: The model; its classes' names, its qualified names and its methods stay.
        policy: Which modules become units of their own.
        kwargs: Arguments of `fully_shard` for every unit; a module's `wrapper_config` overrides them.

    Returns:
        `module` itself.

    Raises:
        ValueError: The policy doesn't fit the model.
    """
    from scale_fsdp.sharding import fully_shard  # it stands above this module

    units = [module.get_submodule(name) for name in plan_units(module, policy) if name]
    for unit in [*units, module]:
        fully_shard(unit, **{**kwargs, **_configured(unit)})
    return module


def _configured(module: nn.Module) -> Mapping[str, Any]:
    """The arguments that a module asks for itself."""
    config = getattr(module, "wrapper_config", {})
    if not isinstance(config, Mapping):
        raise TypeError(
            f"wrapper_config holds arguments by name, but that of a {type(module).__name__} is {config!r}; "
            "write module.wrapper_config = {}"
        )
    return config
