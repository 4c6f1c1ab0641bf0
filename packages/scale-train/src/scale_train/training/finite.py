"""Which numbers of a training are not finite: of the loss, of weights, of the optimizer's state, by name and rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scale_core.comm.collectives import exchange, exchange_text
from scale_core.consistency.flight_recorder import by_rank
from scale_core.shard import on_local_tensors
from scale_train.training.state import TrainState


def describe_nonfinite(training: TrainState) -> str:
    """Says which ranks have which numbers that are not finite; "" where there are none. Called on all ranks.

    Each rank names its loss, the norm of the gradient, and the first weight or optimizer state of which its part is not
    finite.
    """
    local_nonfinite = _local_nonfinite(training)
    if not any(row[0] for row in exchange([int(local_nonfinite != "")], training.group)):
        return ""
    if training.group.size == 1:
        return local_nonfinite
    descriptions = by_rank(exchange_text(local_nonfinite, training.group))
    return "; ".join(part for part in descriptions.split("; ") if not part.endswith(": "))


@on_local_tensors
def _local_nonfinite(training: TrainState) -> str:
    training.engine.params()  # When this returns, no gather writes to them.
    numbers = {"the loss": training.loss, "the norm of the gradient": training.norm}
    texts = [
        f"{name} is {float(number)}"
        for name, number in numbers.items()
        if number is not None and not _is_finite(number)
    ]
    first = next((name for name, tensor in _named_tensors(training) if not _is_finite(tensor)), None)
    return ", ".join(texts if first is None else [*texts, f"{first} is not finite"])


def _named_tensors(training: TrainState) -> Iterator[tuple[str, Tensor]]:
    names: dict[Tensor, str] = {param: name for name, param in training.engine.raw_model.named_parameters()}
    for param, name in names.items():
        yield f"weight {name}", param
    for param, state in training.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"{key} of {names.get(param, 'a weight')} in the optimizer", value


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
