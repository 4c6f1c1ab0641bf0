"""The steps that optimizers take on one model: ranks compare them in their usual comparisons.

Each rank steps on its own part of the model. Nothing fails where their optimizers have different learning rates, for
example because each rank's scheduler sees the validation loss of the rank. The result is a model that no single process
would train. So the steps since the last comparison are a part of the comparison at the end of the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_core.consistency.execution_order import fingerprint_of
from scale_core.consistency.flight_recorder import by_rank

# Options of the implementation of a step, not of its result.
_IMPLEMENTATIONS = frozenset(("foreach", "fused", "capturable", "differentiable"))
_RATES = {"lr": None, "initial_lr": None}  # Of all groups; a scheduler keeps the first rate in the latter.
_KEPT_STEPS = 1000  # since the last comparison
_MENDING = (
    "Each rank has updated its part of the model in its own way, and no single process would train this model. Let an "
    "optimizer's step depend on values that are equal on all ranks: for example, average the validation loss over the "
    "ranks before scheduler.step(loss). Then go back to the last checkpoint"
)

_FLAGS = 2
_HAS_ANY, _KEEPS_STRUCTURE = 1, 2
_MASK = (1 << 62) - 1

StepsByName = Mapping[str, Sequence[tuple[str, Mapping[str, str]]]]
"""By the name of a parameter, the kinds of the optimizers that have stepped on it, with their hyperparameters."""


class _Step(NamedTuple):
    """A step that an optimizer has taken."""

    optimizer: int  # Its id.
    kind: str
    names: Sequence[str]  # Of the hyperparameters.
    options: Sequence[tuple[Any, ...]]  # The hyperparameters of its groups, equal ones once.
    numbers: Sequence[int]  # Of each group, the number of its options.
    params: Sequence[Sequence[Tensor]]  # Of each group.

    @property
    def groups(self) -> Iterator[tuple[Mapping[str, str], Sequence[Tensor]]]:
        """The hyperparameters of each group, as text, and its parameters."""
        texts = [dict(zip(self.names, map(repr, values), strict=True)) for values in self.options]
        return ((texts[number], params) for number, params in zip(self.numbers, self.params, strict=True))

    def values(self, name: str) -> list[Any]:
        """Returns the values of a hyperparameter, equal ones of groups perhaps once."""
        position = self.names.index(name)
        return [values[position] for values in self.options]


class OptimizerSteps:
    """The steps on one model since its ranks compared them."""

    def __init__(self) -> None:
        self._has_any = False  # An optimizer has ever stepped.
        self._equal_structure = 0  # That of steps that were equal on all ranks that made some.
        self._steps: deque[_Step] = deque(maxlen=_KEPT_STEPS)

    def add(self, optimizer: Optimizer) -> None:
        """Records a step, in place of the steps of optimizers that it consists of."""
        if any(step.optimizer != id(optimizer) for step in self._steps):
            inner = set(map(id, with_inner(optimizer)[1:]))
            self._steps = deque((step for step in self._steps if step.optimizer not in inner), maxlen=_KEPT_STEPS)
        names = [name for name in {**optimizer.defaults, **_RATES} if name not in _IMPLEMENTATIONS]
        plain_of: dict[Any, tuple[Any, ...]] = {}  # There may be a group for each parameter, of few different values.
        number_of: dict[tuple[Any, ...], int] = {}
        numbers = []
        for group in optimizer.param_groups:
            values = tuple(map(group.get, names))
            try:
                plain = plain_of.get(values) or plain_of.setdefault(values, _plain(values))
            except TypeError:  # A list can't be hashed.
                plain = _plain(values)
            numbers.append(number_of.setdefault(plain, len(number_of)))
        params = [group["params"] for group in optimizer.param_groups]
        self._steps.append(_Step(id(optimizer), type(optimizer).__name__, names, list(number_of), numbers, params))
        self._has_any = True

    def mark_failed(self, error: Exception) -> None:
        """Records that the last step has raised, perhaps on this rank alone."""
        if self._steps:
            last = self._steps.pop()
            self._steps.append(last._replace(kind=f"{last.kind} that failed with {type(error).__name__}"))

    def status(self) -> int:
        """Returns a number that is equal where kinds, hyperparameters and the number of steps are."""
        fingerprint = fingerprint_of(*(step[1:-1] for step in self._steps)) if self._steps else 0
        keeps_structure = self._equal_structure and self._structure() in (0, self._equal_structure)
        return fingerprint << _FLAGS & _MASK | bool(keeps_structure) << 1 | self._has_any

    def end(self, statuses: Sequence[int]) -> None:
        """Forgets the steps, which were compared: these are the ranks' statuses."""
        fingerprints = {status >> _FLAGS for status in statuses if status & _HAS_ANY}
        if len(fingerprints) == 1 and 0 not in fingerprints:
            self._equal_structure = self._structure()
        self._steps.clear()

    def _structure(self) -> int:
        """Returns a number that is equal where optimizers of the same kinds and groups began equal and have stepped.

        0 is for no step, and for one with a learning rate of 0, as at the start of a warmup.
        """
        if not self._steps or any(0 in step.values("lr") for step in self._steps):
            return 0
        return fingerprint_of(*((step.kind, len(step.numbers), step.values("initial_lr")) for step in self._steps))

    def params(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of the optimizers that have stepped since the last comparison, each with their kind."""
        return ((step.kind, param) for step in self._steps for params in step.params for param in params)

    def of_part(self) -> StepsByName:
        """Returns all steps, where ranks hold different parameters."""
        return {"their parts of the model": [(step.kind, texts) for step in self._steps for texts, _ in step.groups]}

    def by_name(self, named: Iterable[tuple[str, Tensor]]) -> StepsByName:
        """Returns the steps on those of these parameters that this rank has elements of; ranks have the same names."""
        with torch._C.DisableTorchFunctionSubclass():  # An empty part has no element, whatever the full shape is.
            names = {id(param): f"'{name}'" for name, param in named if param.numel()}
        steps: dict[str, list[tuple[str, Mapping[str, str]]]] = {name: [] for name in names.values()}
        for step in self._steps:
            for texts, params in step.groups:
                for name in (names[id(param)] for param in params if id(param) in names):
                    steps[name].append((step.kind, texts))
        return steps


def are_different(statuses: Sequence[int]) -> bool:
    """Whether some ranks have made other steps than others."""
    return len({status >> _FLAGS for status in statuses}) > 1


def have_diverged(statuses: Sequence[int]) -> bool:
    """Whether optimizers that have made equal steps on all ranks with some do so no more.

    Ranks with different parameters may have different optimizers, or none. So those count that began equal.
    """
    stepping = [status for status in statuses if status & _HAS_ANY]
    return are_different(stepping) and all(status & _KEEPS_STRUCTURE for status in stepping)


def describe_difference(steps_of_ranks: Sequence[StepsByName]) -> str:
    """Says for the first parameter on which ranks have stepped differently the steps of each; "" if there is none.

    Ranks may have elements of different parameters, and optimizers of those alone.
    """
    for name in dict.fromkeys(name for steps in steps_of_ranks for name in steps):
        holders = [steps[name] for steps in steps_of_ranks if name in steps]
        if all(steps == holders[0] for steps in holders):
            continue
        options = [dict(texts) for steps in holders for _, texts in steps]
        same = {key for key in options[0] if all(each.get(key) == options[0][key] for each in options)}
        texts = [_described(steps[name], same) if name in steps else "no element" for steps in steps_of_ranks]
        return f"the ranks have stepped differently on {name} since they last compared: {by_rank(texts)}. {_MENDING}"
    return ""


def _described(steps: Sequence[tuple[str, Mapping[str, str]]], same: set[str]) -> str:
    texts = []
    for kind, options in steps:
        differing = ", ".join(f"{name}={value}" for name, value in options.items() if name not in same)
        texts.append(f"{kind} with {differing}" if differing else kind)
    return f"{len(texts)} steps, {', '.join(texts)}" if len(texts) > 1 else (texts or ["no step"])[0]


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizer, and the optimizers in its attributes, which it steps."""
    optimizers = [optimizer]
    for each in optimizers:  # It grows.
        for value in vars(each).values():
            members = value if isinstance(value, list | tuple) else (value,)
            optimizers += (inner for inner in members if isinstance(inner, Optimizer) and inner not in optimizers)
    return optimizers


def _plain(value: Any) -> Any:
    """Returns a value as Python's own, so that equal ones have one text; "" for values without a text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):  # A wait for another device would be a wait in every step.
        return _plain(value.item()) if value.device.type == "cpu" and value.numel() == 1 else ""
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else ""
