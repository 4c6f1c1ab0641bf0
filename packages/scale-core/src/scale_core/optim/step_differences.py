"""What differs where the optimizers of two ranks have stepped differently, in words.

Each rank steps on its own part of the model. Nothing fails where their optimizers have different learning rates, for
example because each rank's scheduler sees the validation loss of the rank. The result is a model that no single process
would train. So the steps since the last comparison are a part of the comparison at the end of the next pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scale_core.consistency.flight_recorder import by_rank

_SAME_STEPS = (
    "Each rank has updated its part of the model in its own way, and no single process would train this model. Let an "
    "optimizer's step depend on values that are equal on all ranks: for example, average the validation loss over the "
    "ranks before scheduler.step(loss). Then go back to the last checkpoint"
)

StepsByName = Mapping[str, Sequence[tuple[str, Mapping[str, str]]]]
"""By the name of a parameter, the kinds of the optimizers that have stepped on it, with their hyperparameters."""


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
        return f"the ranks have stepped differently on {name} since they last compared: {by_rank(texts)}. {_SAME_STEPS}"
    return ""


def _described(steps: Sequence[tuple[str, Mapping[str, str]]], same: set[str]) -> str:
    texts = []
    for kind, options in steps:
        differing = ", ".join(f"{name}={value}" for name, value in options.items() if name not in same)
        texts.append(f"{kind} with {differing}" if differing else kind)
    return f"{len(texts)} steps, {', '.join(texts)}" if len(texts) > 1 else (texts or ["no step"])[0]
