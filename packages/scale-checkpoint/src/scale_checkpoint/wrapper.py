"""A module's activations computed again, or kept elsewhere: `checkpoint_wrapper` and `apply_checkpointing`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from scale_checkpoint.forward import TreatedForward, treat, treat_no_more, treated
from scale_checkpoint.offload import MIN_BYTES, check_target
from scale_checkpoint.operators import SELECTIVE, OperatorPolicy, policy_of
from scale_checkpoint.places import Target
from scale_checkpoint.treatment import Treatment

M = TypeVar("M", bound=nn.Module)

Operators: TypeAlias = Iterable[str | OpOverload | OpOverloadPacket]
"""Operators by name, as regular expressions, or `torch.ops` themselves."""

How: TypeAlias = Literal["keep", "recompute", "offload", "selective"] | OperatorPolicy | Operators
"""What is done with a module's activations: kept, computed again, or moved away; or computed again but for what is dear
("selective"), or for what these operators, or those that a policy names, have computed."""


def checkpoint_wrapper(
    module: M,
    offload_to_cpu: bool = False,
    *,
    keep: Literal["selective"] | OperatorPolicy | Operators | None = None,
    offload_to: Target | None = None,
    min_bytes: int = MIN_BYTES,
    preserve_random_state: bool = True,
) -> M:
    """Makes a module keep its inputs alone, and compute the rest again in the backward pass.

    The module stays the same object, with its class, its parameters' names and its hooks. Loss, gradients, buffers and
    random numbers are those of the plain module, to the bit.

        >>> import torch
        >>> from scale_checkpoint import checkpoint_wrapper
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> for block in model:
        ...     block = checkpoint_wrapper(block)
        >>> list(model.state_dict())[:2]
        ['0.weight', '0.bias']

    Wrapped twice in the same way it is as if wrapped once.

    Args:
        module: Changed in place.
        offload_to_cpu: Keep the inputs in the memory of the host; the same as `offload_to="host"`.
        keep: Operators whose results are kept, so that they are not computed again: names, as "addmm" or
            "_scaled_dot_product.*"; a policy function as torch's selective checkpointing has it; or "selective", which
            keeps what takes long for its size: linear layers, convolutions, attention, and those batched products that
            are smaller than what they were computed from.
        offload_to: "host" or the path of a folder: where the inputs are kept.
        min_bytes: Of what is offloaded, smaller storages stay.
        preserve_random_state: False for a module that draws no random numbers, or need not draw them again.

    Returns:
        `module` itself.

    Raises:
        TypeError: `module` is no module, or is a list of modules, which is never called.
        ValueError: It is checkpointed in another way already; an operator has no such name; `offload_to` is no target;
            `min_bytes` is negative.
        NotADirectoryError: There is no such folder.
    """
    target: Target | None = "host" if offload_to_cpu and offload_to is None else offload_to
    check_target("host" if target is None else target, min_bytes)
    policy = None if keep is None else policy_of(keep)
    _treat(module, Treatment(True, policy, target, min_bytes, preserve_random_state))
    return module


def apply_checkpointing(
    module: M,
    how: How,
    *,
    offload_to: Target = "host",
    offload_inputs: bool = False,
    min_bytes: int = MIN_BYTES,
) -> M:
    """Says what a module does with its activations, whatever it did before.

    Args:
        module: Changed in place.
        how: "keep" makes it plain again; "recompute" keeps its inputs alone; "offload" keeps all, elsewhere;
            "selective", operators, or a policy of operators, recompute all but what they name: see `keep` of
            `checkpoint_wrapper`.
        offload_to: "host" or the path of a folder, for "offload" and `offload_inputs`.
        offload_inputs: Of a module that is recomputed: keep its inputs there, too.
        min_bytes: Of what is offloaded, smaller storages stay.

    Returns:
        `module` itself.

    Raises:
        TypeError: `module` is no module, or is a list of modules, which is never called.
        ValueError: `how` is another word; an operator has no such name; `offload_to` is no target; `min_bytes` is
            negative.
        NotADirectoryError: There is no such folder.
    """
    give(module, treatment_for(how, offload_to=offload_to, offload_inputs=offload_inputs, min_bytes=min_bytes))
    return module


def give(module: nn.Module, treatment: Treatment | None) -> None:
    """Gives a module a treatment in the place of the one that it has; None makes it plain.

    Args:
        module: Changed in place.
        treatment: Of `treatment_for`.

    Raises:
        TypeError: `module` is no module, or is a list of modules.
    """
    _check_is_called(module)
    treat_no_more(module)
    if treatment is not None:
        _treat(module, treatment)


def treatment_for(
    how: How, *, offload_to: Target = "host", offload_inputs: bool = False, min_bytes: int = MIN_BYTES
) -> Treatment | None:
    """Returns what `apply_checkpointing` does with a module; None leaves it plain. Changes nothing.

    Args:
        how: See `apply_checkpointing`; so the others.
        offload_to: Where to.
        offload_inputs: Of a module that is recomputed.
        min_bytes: Smaller storages stay.

    Raises:
        ValueError: `how` is another word; an operator has no such name; `offload_to` is no target; `min_bytes` is
            negative.
        TypeError: `how` holds what is no operator.
        NotADirectoryError: There is no such folder.
    """
    check_target(offload_to, min_bytes)
    inputs_to = offload_to if offload_inputs else None
    if isinstance(how, str) and how != SELECTIVE:
        if how == "keep":
            return None
        if how == "recompute":
            return Treatment(offload_to=inputs_to, min_bytes=min_bytes)
        if how == "offload":
            return Treatment(recompute=False, offload_to=offload_to, min_bytes=min_bytes)
        raise ValueError(f'how: expected "keep", "recompute", "offload", "selective" or operators, got {how!r}')
    return Treatment(keep=policy_of(how), offload_to=inputs_to, min_bytes=min_bytes)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module's own activations are recomputed or offloaded; what it holds, or what holds it, does not count.

    >>> from torch import nn
    >>> from scale_checkpoint import checkpoint_wrapper, is_checkpointed
    >>> is_checkpointed(nn.Tanh()), is_checkpointed(checkpoint_wrapper(nn.Tanh()))
    (False, True)

    Args:
        module: Any module.
    """
    return treated(module) is not None


def _treat(module: nn.Module, treatment: Treatment) -> None:
    _check_is_called(module)
    present = treated(module)
    if present is None:
        treat_no_more(module)
        treat(module, TreatedForward(module, treatment))
    elif present.treatment != treatment:
        raise ValueError(
            f"a {type(module).__name__} is checkpointed already, as {present.treatment}, and was to be as {treatment}: "
            'wrap it once, or call apply_checkpointing(module, "keep") first'
        )


def _check_is_called(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got a {type(module).__name__}: wrap the module, not its output")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise TypeError(
            f"a {type(module).__name__} is never called, so nothing of it can be checkpointed: wrap what it holds, "
            "for part in modules: checkpoint_wrapper(part)"
        )
