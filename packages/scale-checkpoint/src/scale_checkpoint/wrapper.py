"""Checkpointing and offload of modules: `checkpoint_wrapper`, `apply_checkpointing`, `checkpoint_modules`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from scale_checkpoint.offload.offload import MIN_BYTES, check_target
from scale_checkpoint.offload.storage import Target
from scale_checkpoint.recompute.policy import SELECTIVE, OperatorPolicy, resolve_policy
from scale_checkpoint.recompute.recompute import (
    CheckpointConfig,
    CheckpointedForward,
    ContextFunction,
    get_forward,
    unwrap_forward,
    wrap_forward,
)
from scale_core.arguments import checked_arguments, did_you_mean

M = TypeVar("M", bound=nn.Module)

Operators: TypeAlias = Iterable[str | OpOverload | OpOverloadPacket]
"""Operators by name, as regular expressions, or `torch.ops` themselves."""

How: TypeAlias = Literal["keep", "recompute", "offload", "selective"] | OperatorPolicy | Operators
"""What is done with a module's activations: kept, recomputed or offloaded; or recomputed but for the results of
expensive operators ("selective"), of these operators, or of those that a policy names."""


@checked_arguments(own="module")
def checkpoint_wrapper(
    module: M,
    offload_to_cpu: bool = False,
    *,
    keep: Literal["selective"] | OperatorPolicy | Operators | None = None,
    offload_to: Target | None = None,
    min_bytes: int = MIN_BYTES,
    preserve_random_state: bool = True,
    context_fn: ContextFunction | None = None,
    determinism_check: Literal["default", "none"] = "default",
) -> M:
    """Makes a module keep only its inputs, and recompute its activations in the backward pass.

    The module stays the same object, with its class, its parameters' names and its hooks. Loss, gradients, buffers and
    random numbers are the same as with the plain module, to the bit.

        >>> import torch
        >>> from scale_checkpoint import checkpoint_wrapper
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> for block in model:
        ...     block = checkpoint_wrapper(block)
        >>> list(model.state_dict())[:2]
        ['0.weight', '0.bias']

    Wrapping twice with the same settings wraps once.

    Args:
        module: Changed in place.
        offload_to_cpu: Keep the inputs in the memory of the host; the same as `offload_to="host"`.
        keep: Operators whose results are kept, not computed again. Names, for example "addmm" or
            "_scaled_dot_product.*"; or a policy function, as for torch's selective checkpointing; or "selective". The
            last keeps results that take long for their size: of linear layers, convolutions, attention, and batched
            products that are smaller than their inputs.
        offload_to: "host" or the path of a folder: where the inputs are kept.
        min_bytes: Storages smaller than this are not offloaded.
        preserve_random_state: False for a module that draws no random numbers, or need not draw them again.
        context_fn: A function as torch's checkpoint takes it. We call it once per call of the module. It returns two
            contexts, for the forward and for each recomputation, for example by
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
        determinism_check: "none" leaves out torch's comparison of the tensors that the recomputation saves, by shape,
            dtype and device, with those that the forward has saved.

    Returns:
        `module` itself.

    Raises:
        TypeError: `module` is not a module, or is a list of modules, which is never called.
        ValueError: The module is checkpointed with different settings already, an operator name is unknown,
            `offload_to` or `determinism_check` is not one of its values, or `min_bytes` is negative.
        NotADirectoryError: The folder does not exist.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    target: Target | None = "host" if offload_to_cpu and offload_to is None else offload_to
    check_target("host" if target is None else target, min_bytes)
    if determinism_check not in ("default", "none"):
        raise ValueError(f'determinism_check: expected "default" or "none", got {determinism_check!r}')
    policy = None if keep is None else resolve_policy(keep)
    _wrap(
        module,
        CheckpointConfig(
            keep=policy,
            offload_to=target,
            min_bytes=min_bytes,
            preserve_random_state=preserve_random_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
        ),
    )
    return module


@checked_arguments(own="module")
def apply_checkpointing(
    module: M,
    how: How,
    *,
    offload_to: Target = "host",
    offload_inputs: bool = False,
    min_bytes: int = MIN_BYTES,
) -> M:
    """Sets the treatment of a module's activations, whatever it was before.

    Args:
        module: Changed in place.
        how: "keep" makes it plain again; "recompute" keeps only its inputs; "offload" keeps all, elsewhere;
            "selective", operators, or a policy of operators, recompute all other results: see `keep` of
            `checkpoint_wrapper`.
        offload_to: "host" or the path of a folder, for "offload" and `offload_inputs`.
        offload_inputs: If the module is recomputed, keep its inputs there, too.
        min_bytes: Storages smaller than this are not offloaded.

    Returns:
        `module` itself.

    Raises:
        TypeError, ValueError, NotADirectoryError: As `checkpoint_wrapper` does, or `how` is an unknown word.

    Examples:
        >>> import torch
        >>> from scale_checkpoint import apply_checkpointing
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> block = apply_checkpointing(block, "recompute")  # the same object
        >>> block(torch.randn(4, 8)).sum().backward()
        >>> block = apply_checkpointing(block, "keep")  # as before

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    set_config(module, config_for(how, offload_to=offload_to, offload_inputs=offload_inputs, min_bytes=min_bytes))
    return module


def set_config(module: nn.Module, config: CheckpointConfig | None) -> None:
    """Sets a module's config in the place of its present one; None makes it plain."""
    _check_is_called(module)
    unwrap_forward(module)
    if config is not None:
        _wrap(module, config)


def config_for(
    how: How, *, offload_to: Target = "host", offload_inputs: bool = False, min_bytes: int = MIN_BYTES
) -> CheckpointConfig | None:
    """Returns the config that `apply_checkpointing` sets, with the same arguments and errors; None for "keep"."""
    check_target(offload_to, min_bytes)
    inputs_to = offload_to if offload_inputs else None
    if isinstance(how, str) and how != SELECTIVE:
        if how == "keep":
            return None
        if how == "recompute":
            return CheckpointConfig(offload_to=inputs_to, min_bytes=min_bytes)
        if how == "offload":
            return CheckpointConfig(recompute=False, offload_to=offload_to, min_bytes=min_bytes)
        raise ValueError(f'how: expected "keep", "recompute", "offload", "selective" or operators, got {how!r}')
    return CheckpointConfig(keep=resolve_policy(how), offload_to=inputs_to, min_bytes=min_bytes)


@checked_arguments
def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module's own activations are recomputed or offloaded; its children and parents do not count.

    >>> from torch import nn
    >>> from scale_checkpoint import checkpoint_wrapper
    >>> from scale_checkpoint.wrapper import is_checkpointed
    >>> is_checkpointed(nn.Tanh()), is_checkpointed(checkpoint_wrapper(nn.Tanh()))
    (False, True)

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    return get_forward(module) is not None


def _wrap(module: nn.Module, config: CheckpointConfig) -> None:
    _check_is_called(module)
    present = get_forward(module)
    if present is None:
        unwrap_forward(module)
        wrap_forward(module, CheckpointedForward(module, config))
    elif present.config != config:
        raise ValueError(
            f"a {type(module).__name__} is checkpointed already, with {present.config}, not with {config}: "
            'wrap it once, or call apply_checkpointing(module, "keep") first'
        )


def _check_is_called(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got a {type(module).__name__}: wrap the module, not its output")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "a torch.jit.ScriptModule can't be checkpointed, because it takes no hooks: checkpoint the plain module "
            "before torch.jit.script(...), or a module around it"
        )
    if not _is_called(module):
        raise TypeError(
            f"a {type(module).__name__} is never called, so nothing of it can be checkpointed: wrap what it holds, "
            "for part in modules: checkpoint_wrapper(part)"
        )


ModulePolicy: TypeAlias = Callable[[str, nn.Module], How | None]
"""Called with a module's qualified name and the module; returns what is done with it, or None for nothing."""


@checked_arguments(own="select")
def checkpoint_modules(
    model: nn.Module,
    select: str | Collection[str] | type[nn.Module] | ModulePolicy,
    how: How = "recompute",
    *,
    offload_to: Target = "host",
    offload_inputs: bool = False,
) -> list[str]:
    r"""Checkpoints those modules of a model that are chosen by their qualified names, by their class or by a function.

        >>> from torch import nn
        >>> from scale_checkpoint import checkpoint_modules
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        >>> checkpoint_modules(model, r"[01]")
        ['0', '1']
        >>> checkpoint_modules(model, lambda name, module: "offload" if name == "2" else None)
        ['2']

    Args:
        model: Changed in place. It has no name itself, and is not chosen.
        select: One or several regular expressions for full names of `named_modules`, for example `r"layers\.\d+"`; or a
            class, for all its modules; or a function of name and module. The function returns a word or policy that
            `how` takes, or None.
        how: The treatment of those whose names or class match, as `apply_checkpointing` takes it.
        offload_to: "host" or the path of a folder.
        offload_inputs: If modules are recomputed, keep their inputs there, too.

    Returns:
        The names of the modules that were chosen, in the order of the model.

    Raises:
        ValueError: A pattern is not a regular expression, matches nothing (the error lists near names), or matches only
            a list of modules, which is never called. No module is of the class. Or `how` is wrong, see
            `apply_checkpointing`. Nothing was changed.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    names = _names_of(model)
    if isinstance(select, type):
        chosen = _by_class(names, select, how)
    elif callable(select):
        decided = {module: select(called[0], module) for module, called in names.items() if _is_called(module)}
        chosen = {module: policy for module, policy in decided.items() if policy is not None}
    else:
        patterns = [select] if isinstance(select, str) else select
        chosen = dict.fromkeys(modules_by_name(model, patterns, "select"), how)
    # Nothing is changed before all is checked; operators given as an iterator for several modules are read once.
    configs: dict[int, CheckpointConfig | None] = {}
    for kind in chosen.values():
        if id(kind) not in configs:
            configs[id(kind)] = config_for(kind, offload_to=offload_to, offload_inputs=offload_inputs)
    for module, kind in chosen.items():
        set_config(module, configs[id(kind)])
    return [names[module][0] for module in chosen]


def _by_class(names: dict[nn.Module, list[str]], of: type[nn.Module], how: How) -> dict[nn.Module, How]:
    chosen = {module: how for module in names if isinstance(module, of) and _is_called(module)}
    if not chosen:
        present_names = sorted({type(module).__name__ for module in names if _is_called(module)})
        raise ValueError(f"select: the model has no {of.__name__} that is called; it has {', '.join(present_names)}")
    return chosen


def modules_by_name(model: nn.Module, patterns: Collection[str], argument: str) -> list[nn.Module]:
    """Returns the modules whose full names patterns match, in the model's order; a ValueError names `argument`."""
    names, chosen = _names_of(model), set[nn.Module]()
    for pattern in patterns:
        try:
            matcher = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from error
        matched = [module for module, called in names.items() if any(map(matcher.fullmatch, called))]
        runs = {module for module in matched if _is_called(module)}
        if not runs:
            raise ValueError(f"{argument}: {pattern!r} {_describe_no_match(pattern, matched, names)}")
        chosen |= runs
    return [module for module in names if module in chosen]


def _names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    # A module with two names is chosen by either of them, once.
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names.setdefault(module, []).append(name)
    return names


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _describe_no_match(pattern: str, matched: list[nn.Module], names: dict[nn.Module, list[str]]) -> str:
    if matched:
        name, title = names[matched[0]][0], type(matched[0]).__name__
        inside = re.escape(name) + r"\.[^.]+"
        return f"matches only '{name}', a {title}, which is never called: match what it holds, r'{inside}'"
    every = [name for called in names.values() for name in called]
    plain = re.sub(r"\\d[+*]?|\[[^]]*\][+*]?", "0", pattern).replace("\\", "")
    return f"matches the name of no module; {did_you_mean(plain, every)}"
