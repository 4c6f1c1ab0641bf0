"""Actions: the work of a rank on a stage and a micro-batch. A schedule is lists of these and nothing else.

The validator, the simulator, the pictures and the runtime read the same lists: a schedule runs in the order
that was checked and drawn.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import partial
from typing import NamedTuple

EVERY_MICRO_BATCH = -1


class Kind(StrEnum):
    """The kind of an action. The value is its letter in the text form.

    Attributes:
        FORWARD: Computes a stage's output; its activations are held from here on.
        INPUT_GRADIENT: Computes the gradient of a stage's input, for which the stage before waits.
        WEIGHT_GRADIENT: Computes the gradients of a stage's parameters, for which no rank waits; frees the activations.
        BACKWARD: Computes both gradients together, as one backward pass; frees the activations.
        SEND_ACTIVATION: Sends this stage's output to the next stage.
        RECEIVE_ACTIVATION: Receives this stage's input from the stage before.
        SEND_GRADIENT: Sends the gradient of this stage's input to the stage before.
        RECEIVE_GRADIENT: Receives the gradient of this stage's output from the next stage.
        STEP: The optimizer's step for the parameters of a stage, once after all of its gradients.

    Examples:
        >>> from scale_pipe.schedules.action import Kind
        >>> [kind.value for kind in Kind]
        ['F', 'I', 'W', 'B', 'SA', 'RA', 'SG', 'RG', 'S']

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    FORWARD = "F"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    BACKWARD = "B"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    STEP = "S"


COMPUTES = frozenset({Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT})
TRANSFERS = SENDS | RECEIVES
GIVES_INPUT_GRADIENT = frozenset({Kind.INPUT_GRADIENT, Kind.BACKWARD})
FREES = frozenset({Kind.WEIGHT_GRADIENT, Kind.BACKWARD})
_MATCHING = {
    Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1),
    Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1),
    Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1),
}
"""By kind of a transfer, the kind of the other rank's entry, and its stage minus this one."""


class Action(NamedTuple):
    """An action; `str` writes it as `F2.5`: forward of stage 2 on micro-batch 5. A step is `S2`.

    Attributes:
        kind: The kind of work.
        stage: On which stage, counted from 0 in the order of the model.
        micro_batch: On which micro-batch, counted from 0; `EVERY_MICRO_BATCH` of a step.

    Examples:
        >>> from scale_pipe.schedules.action import Action, Kind
        >>> str(Action(Kind.FORWARD, 2, 5))
        'F2.5'

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    kind: Kind
    stage: int
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads a result of `str`, for example `F2.5`, `SA0.1` or `S2`.

        Raises:
            ValueError: It is not an action.
        """
        match = re.fullmatch(r"(S(?=\d)|F|I|W|B|SA|RA|SG|RG)(\d+)(?:\.(\d+))?", text)
        if match is None or (match[3] is None) != (match[1] == Kind.STEP.value):
            raise ValueError(
                f"expected an action such as F2.5 (kind, stage, micro-batch; kinds F, I, W, B, SA, RA, SG, RG) or S2, "
                f"but got {text!r}"
            )
        return cls(Kind(match[1]), int(match[2]), EVERY_MICRO_BATCH if match[3] is None else int(match[3]))

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}" + f".{self.micro_batch}" * (self.kind is not Kind.STEP)


# Called with the stage and the micro-batch.
forward = partial(Action, Kind.FORWARD)
input_gradient = partial(Action, Kind.INPUT_GRADIENT)
weight_gradient = partial(Action, Kind.WEIGHT_GRADIENT)
backward = partial(Action, Kind.BACKWARD)


class TimedAction(NamedTuple):
    """An action with its time, simulated or measured.

        >>> from scale_pipe import Costs, simulate
        >>> from scale_pipe.schedules.classic import one_forward_one_backward
        >>> timed = simulate(one_forward_one_backward(2, 2), Costs.uniform(2)).spans
        >>> timed[0].rank, str(timed[0].action), timed[0].start
        (0, 'F0.0', 0.0)

    Attributes:
        rank: The rank that does it; the sender of a transfer.
        action: The action.
        start: When it starts, in the unit of the costs; seconds where it was measured.
        end: When it is over.

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    rank: int
    action: Action
    start: float
    end: float


def matching_transfer(action: Action) -> Action:
    """Returns the receive of a send, or the send of a receive."""
    kind, distance = _MATCHING[action.kind]
    return Action(kind, action.stage + distance, action.micro_batch)


def live_change(action: Action) -> int:
    """Returns by how much an action changes the number of live (stage, micro-batch) of its rank."""
    return (action.kind is Kind.FORWARD) - (action.kind in FREES)
