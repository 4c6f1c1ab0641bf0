"""What this rank has done since the ranks last compared: passes with their events, in order, and optimizers' steps.

`Contract` compares it. Training repeats itself, so the order of the last pass also predicts the order of the next.

Each rank steps on its own part of the model. Nothing fails where their optimizers have different learning rates, for
example because each rank's scheduler sees the validation loss of the rank. The result is a model that no single process
would train. So the steps since the last comparison are a part of the comparison at the end of the next pass.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_core.comm.collectives import UNIT_TAGS

_MASK = (1 << 62) - 1
# In this many passes of a cycle that is not predicted, ranks compare whether forwards or backwards follow.
_COMPARED_DIRECTIONS = 8


class Event(NamedTuple):
    """One phase of one unit, for example its forward, with all its collectives.

    Examples:
        >>> from scale_core.consistency.execution_order import Event
        >>> Event("forward", "layers.0")
        Event(phase='forward', unit='layers.0')

    See also: [the guide to debugging](../guides/debugging.md).
    """

    phase: str
    unit: str

    def __str__(self) -> str:
        return f"{self.phase} of {unit_title(self.unit)}" if self != END else "the end of the pass"


END = Event("the end", "")


class PassKind(NamedTuple):
    """Passes of one kind are expected to run the same events in the same order."""

    phase: str
    grad: bool
    training: bool


def unit_title(name: str) -> str:
    """The name of a unit in errors."""
    return f"unit '{name}'" if name else "the root unit"


def fingerprint_of(*words: object) -> int:
    """A number of 62 bits, equal in every process (Python's own hash is salted)."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


@functools.cache
def message_tag(event: Event) -> int:
    """The tag of an event's messages: two ranks at different events never read each other's data."""
    return UNIT_TAGS[fingerprint_of(*event) % len(UNIT_TAGS)]


class LogEntry(NamedTuple):
    """One entry of a pass's log."""

    event: Event  # The work
    is_transfer: bool  # It began to move data between ranks; otherwise it was announced, as a phase of a unit


@dataclass
class Pass:
    """One pass through a model."""

    kind: PassKind
    new_step: bool  # Whether a step began with it
    log: list[LogEntry] = field(default_factory=list)  # The work of this rank in it, in order

    @property
    def events(self) -> list[Event]:
        """The recorded phases of units, without transfers."""
        return [entry.event for entry in self.log if not entry.is_transfer]


class History:
    """This rank's passes: the last complete one of each kind, and the cycle between two comparisons.

    Training repeats itself: a forward, a backward, perhaps several of both until gradients are reduced. So the order of
    the last pass of a kind predicts the next event in this one, and the last complete cycle of passes predicts the
    events that all ranks run until they compare again.

    Args:
        in_order: Transfers match by their order, and not by tags. Then one pass of a kind predicts nothing: the second
            one prefetches units that the first one has gathered late, so the order of transfers settles there.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        self.in_order = in_order
        self.order: list[Event] = []  # The events of the last complete pass of the current kind; empty before the first
        self.position = 0  # How many events the current pass has had
        self.matches_last_order = False  # Whether it has kept to that order, so that its next event is predicted
        self.num_completed = 0  # The number of complete passes of the current kind
        self.orders: dict[PassKind, list[Event]] = {}  # The events of the last complete pass of each kind
        self.log: list[LogEntry] = []  # That of the current pass; whoever starts a transfer adds it here
        self._current: Pass | None = None
        self._num_completed: dict[PassKind, int] = {}
        self.cycle: list[Pass] = []  # The complete passes since the last comparison
        self.predicts_nothing = False  # There is such a pass, and nothing says whether a forward or a backward is next
        self.unpredictable: set[PassKind] = set()  # First passes after which programs go on in several ways
        self.last_cycles: dict[PassKind, list[Pass]] = {}  # by the kind of the first pass

    @property
    def last_event(self) -> Event | None:
        """The last event of the current pass; None outside of one, or before the first."""
        events = self._current.events if self._current is not None else []
        return events[-1] if events else None

    @property
    def is_open(self) -> bool:
        """Whether a pass runs now."""
        return self._current is not None

    @property
    def transfers(self) -> list[Event]:
        """The transfers started since the last event of the current pass."""
        since = itertools.takewhile(lambda entry: entry.is_transfer, reversed(self.log))
        return [entry.event for entry in since][::-1]

    @property
    def current(self) -> Pass:
        """The current pass."""
        assert self._current is not None, "recorded an event outside of a pass"
        return self._current

    def begin(self, kind: PassKind, new_step: bool) -> None:
        """Begins a pass; one that was left in the middle is forgotten."""
        self._current = Pass(kind, new_step)
        self.log = self._current.log
        self.order = self.orders.get(kind, [])
        self.position = 0
        self.num_completed = self._num_completed.get(kind, 0)
        self.matches_last_order = self.num_completed > 0

    def add(self, event: Event) -> None:
        """Records a phase of a unit."""
        assert self._current is not None, "recorded an event outside of a pass"
        expected = self.order[self.position] if self.position < len(self.order) else None
        self.matches_last_order = self.matches_last_order and event == expected
        self.position += 1
        self.log.append(LogEntry(event, is_transfer=False))

    def end(self, *, closes: bool) -> None:
        """Ends the current pass; `closes` ends the cycle as well."""
        ended, kind = self.current, self.current.kind
        self._num_completed[kind] = self.num_completed + 1
        self.cycle.append(ended)
        if closes:
            self.last_cycles[self.cycle[0].kind], self.cycle = self.cycle, []
        self._current, self.log = None, []
        first = self.cycle[0].kind if self.cycle else None
        self.predicts_nothing = (
            first is not None
            and (first in self.unpredictable or not self.is_settled(self.last_cycles.get(first, [])))
            and len(self.cycle) <= _COMPARED_DIRECTIONS
        )
        self.orders[kind] = ended.events

    def is_settled(self, passes: Sequence[Pass]) -> bool:
        """Whether these passes predict the order of transfers in the next ones of their kinds."""
        num_needed = 2 if self.in_order else 1
        return bool(passes) and all(self._num_completed.get(each.kind, 0) >= num_needed for each in passes)

    def reset(self) -> None:
        """Drops the current cycle; the last complete one stays."""
        self.cycle, self._current, self.log = [], None, []
        self.predicts_nothing = False

    def mark_unpredictable(self, first: PassKind) -> None:
        """Records that programs go on in several ways after such a pass: the last cycle predicts nothing."""
        self.unpredictable.add(first)


# The steps of optimizers.

# Options of the implementation of a step, not of its result.
_IMPLEMENTATIONS = frozenset(("foreach", "fused", "capturable", "differentiable"))
_RATES = {"lr": None, "initial_lr": None}  # Of all groups; a scheduler keeps the first rate in the latter.
_KEPT_STEPS = 1000  # since the last comparison
_FLAGS = 2
_HAS_ANY, _KEEPS_STRUCTURE = 1, 2

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
        """Returns the steps on the parameters of which this rank has elements; ranks have the same names."""
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
