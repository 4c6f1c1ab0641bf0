"""Selective checkpointing policy: the operators whose results are kept, by name, by a function, or the expensive ones.

A kept result is not computed again, and its inputs are not needed. An operator that draws random numbers
is always computed again, whatever the policy says: were its result kept, the numbers that it would have drawn would go
to the operators after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from scale_core.arguments import did_you_mean

OperatorPolicy: TypeAlias = Callable[..., CheckpointPolicy | bool]
"""Called with a `torch.utils.checkpoint.SelectiveCheckpointContext`, the operator (an `OpOverload`) and its arguments;
returns whether the result is kept, as torch's `CheckpointPolicy` or as a bool."""


SELECTIVE = "selective"
"""The name of `ExpensiveOperators`."""

_EXPENSIVE = ("addmm", "mm", "convolution", "_scaled_dot_product.*")
_BATCHED_PRODUCTS = ("bmm", "baddbmm")


def resolve_policy(keep: OperatorPolicy | Iterable[str | OpOverload | OpOverloadPacket]) -> OperatorPolicy:
    """Returns a policy that keeps the results of the operators that are named."""
    if callable(keep):
        return keep
    if keep == SELECTIVE:
        return ExpensiveOperators()
    if isinstance(keep, str):
        raise TypeError(f"keep holds several operators, but got one string, {keep!r}: write [{keep!r}]")
    return NamedOperators(*(_pattern(name) for name in keep))


def saves(decision: Any, policy: OperatorPolicy, operator: Any) -> bool:
    """Whether a policy's return value keeps a result, as those do that offload it; a TypeError where it is none."""
    if isinstance(decision, CheckpointPolicy):
        return not decision.name.endswith("RECOMPUTE")
    if isinstance(decision, bool):
        return decision
    raise TypeError(
        f"the policy {getattr(policy, '__qualname__', type(policy).__name__)} returned a {type(decision).__name__}, "
        f"{decision!r}, for the result of {operator}: return True or False, or torch.utils.checkpoint.CheckpointPolicy."
        "MUST_SAVE, PREFER_SAVE, MUST_RECOMPUTE or PREFER_RECOMPUTE"
    )


class NamedOperators:
    """Keeps the results of operators by name; compared, copied and pickled by its patterns."""

    def __init__(self, *patterns: str) -> None:
        self.patterns = frozenset(patterns)
        self._found: dict[int, tuple[bool, Any]] = {}

    def __call__(self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> bool:
        return self.matches(operator) and self.saves_result(operator, args, context.op_output)

    def matches(self, operator: Any) -> bool:
        """Whether an operator is one of them, and can be kept."""
        # By identity, since torch's hash of an operator is slow; the operator is held, so that none takes its place.
        is_match = self._found.get(id(operator))
        if is_match is None:
            names = _full_name(operator), operator_name(operator)
            named = any(re.fullmatch(pattern, name) for pattern in self.patterns for name in names)
            is_match = self._found[id(operator)] = named and can_be_saved(operator), operator
        return is_match[0]

    def saves_result(self, operator: Any, args: tuple[Any, ...], result: Any) -> bool:
        """Whether it keeps this result of an operator that is one of them."""
        return True

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.patterns == self.patterns

    def __hash__(self) -> int:
        return hash(self.patterns)

    def __repr__(self) -> str:
        return repr(sorted(self.patterns))

    def __getstate__(self) -> frozenset[str]:
        return self.patterns

    def __setstate__(self, patterns: frozenset[str]) -> None:
        self.__init__(*patterns)  # type: ignore[misc]


class ExpensiveOperators(NamedOperators):
    """Keeps results that take long for their size: linear layers, convolutions, attention, some batched products.

    A batched product is kept if it is smaller than its inputs. Where attention is written out, the
    scores [T, T] of queries and keys [T, d] are larger, and are the memory to save; the mixed values are smaller.
    """

    def __init__(self) -> None:
        super().__init__(*_EXPENSIVE, *_BATCHED_PRODUCTS)

    def saves_result(self, operator: Any, args: tuple[Any, ...], result: Any) -> bool:
        if operator_name(operator) not in _BATCHED_PRODUCTS:
            return True
        return bool(result.numel() < max(factor.numel() for factor in args[-2:]))

    def __repr__(self) -> str:
        return repr(SELECTIVE)

    def __reduce__(self) -> tuple[type[ExpensiveOperators], tuple[()]]:
        return ExpensiveOperators, ()


def _full_name(operator: Any) -> str:
    """An overload's name without its namespace: "mm.default"."""
    return str(operator).partition(".")[2]


def operator_name(operator: Any) -> str:
    """Returns an overload's name without namespace and overload: "mm"."""
    return _full_name(operator).partition(".")[0]


def results_of(result: Any) -> Sequence[Any]:
    """Returns the results of an operator, one or several, as a sequence."""
    return result if isinstance(result, (tuple, list)) else (result,)


def _pattern(name: str | OpOverload | OpOverloadPacket) -> str:
    if isinstance(name, OpOverload | OpOverloadPacket):
        return re.escape(_full_name(name))
    try:
        pattern = re.compile(name)
    except re.error as error:
        raise ValueError(f"keep: {name!r} is not a regular expression: {error}") from error
    if not any(map(pattern.fullmatch, _all_names())):
        hint = did_you_mean(name, sorted(_all_names()), "write one as it stands there, such as 'addmm'")
        raise ValueError(f"keep: {name!r} is the name of no operator in torch.ops.aten; {hint}")
    return name


@cache
def _all_names() -> frozenset[str]:
    """Of all operators that are registered by now, with and without their overload."""
    full = [name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()]
    default = frozenset(f"{name}.default" for name in full if "." not in name)
    return default.union(full, (name.partition(".")[0] for name in full))


# Casts are made by autocast as well, which caches casts of parameters: they may run in the forward and not in the
# recomputation, or the other way round, and so cannot be identified by how many have run before.
_ALWAYS_RUN = frozenset((torch.ops.aten.detach.default, torch.ops.aten._to_copy.default))


UNINITIALIZED_RESULTS = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operators that return uninitialized memory; kernels, for example of `rrelu`, write to it unseen."""


@cache
def can_be_saved(operator: Any) -> bool:
    """Whether an operator's result can be kept: one that changes its arguments, or returns views, always runs.

    So do collectives, for which other ranks wait, and operators that return uninitialized memory. Norms change their
    statistics, whose values are kept with the result.
    """
    computes = not (operator._schema.is_mutable or operator.is_view) and operator.namespace != "c10d"
    return computes and operator not in _ALWAYS_RUN and operator_name(operator) not in UNINITIALIZED_RESULTS


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers in this call."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    probability = _argument(operator, "dropout_p", args, kwargs)
    return probability is None or float(probability) > 0.0


def updated_statistics(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The running statistics that a norm updates in this call; its schema does not name them."""
    if _argument(operator, "training", args, kwargs) is False:
        return []
    statistics = (_argument(operator, name, args, kwargs) for name in ("running_mean", "running_var"))
    return [value for value in statistics if isinstance(value, Tensor)]


def _argument(operator: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else argument.default_value
    return None
