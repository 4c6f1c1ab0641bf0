"""One thing that a rank does: an action on a stage and a micro-batch.

A schedule is lists of these and nothing else. The validator, the simulator, the pictures and the runtime read the same
lists, so what is proved and what is drawn is what runs.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

EVERY_MICRO_BATCH = -1


class Kind(StrEnum):
    """What is done. The value is its letter in the text form."""

    FORWARD = "F"
    """Computes a stage's output; its activations are held from here on."""

    INPUT_GRADIENT = "I"
    """Computes the gradient of a stage's input, which the stage before waits for."""

    WEIGHT_GRADIENT = "W"
    """Computes the gradients of a stage's parameters, which nobody waits for; frees the activations."""

    BACKWARD = "B"
    """Both gradients together, as one backward pass; frees the activations."""

    SEND_ACTIVATION = "SA"
    """Sends this stage's output to the next stage."""

    RECEIVE_ACTIVATION = "RA"
    """Receives this stage's input from the stage before."""

    SEND_GRADIENT = "SG"
    """Sends the gradient of this stage's input to the stage before."""

    RECEIVE_GRADIENT = "RG"
    """Receives the gradient of this stage's output from the next stage."""

    STEP = "S"
    """The optimizer's step for the parameters of a stage, once after all of its gradients."""


COMPUTES = frozenset({Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT})
GIVES_INPUT_GRADIENT = frozenset({Kind.INPUT_GRADIENT, Kind.BACKWARD})
FREES = frozenset({Kind.WEIGHT_GRADIENT, Kind.BACKWARD})


class Action(NamedTuple):
    """An action; `str` writes it as `F2.5`: forward of stage 2 on micro-batch 5. A step is `S2`.

    Attributes:
        kind: What is done.
        stage: On which stage, counted from 0 in the order of the model.
        micro_batch: On which micro-batch, counted from 0; `EVERY_MICRO_BATCH` of a step.
    """

    kind: Kind
    stage: int
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads what `str` has written.

        Args:
            text: Such as `F2.5`, `SA0.1` or `S2`.

        Raises:
            ValueError: It is no action.
        """
        found = re.fullmatch(r"(S(?=\d)|F|I|W|B|SA|RA|SG|RG)(\d+)(?:\.(\d+))?", text)
        if found is None or (found[3] is None) != (found[1] == Kind.STEP.value):
            raise ValueError(
                f"expected an action such as F2.5 (kind, stage, micro-batch; kinds F, I, W, B, SA, RA, SG, RG) or S2, "
                f"but got {text!r}"
            )
        return cls(Kind(found[1]), int(found[2]), EVERY_MICRO_BATCH if found[3] is None else int(found[3]))

    def __str__(self) -> str:
        if self.kind is Kind.STEP:
            return f"{self.kind.value}{self.stage}"
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


def forward(stage: int, micro_batch: int) -> Action:
    """Returns the forward of a stage on a micro-batch."""
    return Action(Kind.FORWARD, stage, micro_batch)


def input_gradient(stage: int, micro_batch: int) -> Action:
    """Returns the gradient of a stage's input on a micro-batch."""
    return Action(Kind.INPUT_GRADIENT, stage, micro_batch)


def weight_gradient(stage: int, micro_batch: int) -> Action:
    """Returns the gradients of a stage's parameters on a micro-batch."""
    return Action(Kind.WEIGHT_GRADIENT, stage, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    """Returns both gradients of a stage on a micro-batch together."""
    return Action(Kind.BACKWARD, stage, micro_batch)
