"""The state of a sharded optimizer in the form of the plain one, and back.

    {"state": {0: {"step": tensor(3.), "exp_avg": tensor([[...]])}, ...},
     "param_groups": [{"lr": 0.001, ..., "params": [0, 1, ...]}]}

Parameters have the numbers that the plain optimizer gives them, and tensors are whole: so a state loads at any number
of ranks, and into the plain optimizer and out of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from scale_core.nested import map_tensors
from scale_core.optimizer_groups import REGROUP
from scale_core.state_match import StateMismatch
from scale_oss.gathering import State, large_tensors_in
from scale_oss.places import Place

_NAMES = frozenset({"params", "param_names"})


def plain_state_dict(groups: Sequence[Mapping[str, Any]], states: Mapping[int, State]) -> dict[str, Any]:
    """Returns a state dict as the plain optimizer of these groups gives it.

    Args:
        groups: Of all parameters.
        states: The state of each parameter by its number.
    """
    packed, number = [], 0
    for group in groups:
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        packed.append({**options, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    return {"state": dict(states), "param_groups": packed}


def local_state_dict(
    state_dict: Any, groups: Sequence[Mapping[str, Any]], places: Sequence[Place], live: Mapping[Tensor, State]
) -> dict[str, Any]:
    """Cuts what this rank keeps out of a plain state dict, as a state dict of this rank's optimizer.

    Args:
        state_dict: In the form of the plain optimizer; it is not changed, nor does the result share memory with it.
        groups: Of all parameters.
        places: Of all parameters, in the same order.
        live: The state that this rank's optimizer has, to be compared with.

    Raises:
        TypeError: It is no state dict.
        StateMismatch: It is that of other parameters, or of another optimizer.
    """
    numbers = _check_groups(state_dict, groups)
    unknown = [number for number in state_dict["state"] if number not in numbers]
    if unknown:
        raise StateMismatch(f"the state dict has a state of parameter {unknown[0]!r}, which is in none of its groups")
    states: dict[int, State] = {}
    stepped: dict[int, int] = {}
    for number, place in zip(numbers, places, strict=True):
        state = state_dict["state"].get(number)
        if state is not None:
            _check_shapes(state, place, {} if place.stepped is None else live.get(place.stepped, {}))
        if place.stepped is not None:
            stepped[number] = len(stepped)
            if state is not None:
                states[stepped[number]] = map_tensors(partial(_part_of, place), state)
    packed = [
        {
            **{key: value for key, value in saved.items() if key not in ("params", "param_names")},
            "params": [stepped[number] for number in saved["params"] if number in stepped],
        }
        for saved in state_dict["param_groups"]
    ]
    return {"state": states, "param_groups": packed}


def lines_of(state_dict: Mapping[str, Any]) -> Iterator[str]:
    """What ranks compare of a plain state dict that each of them has read."""
    for number, group in enumerate(state_dict["param_groups"]):
        options = {key: value for key, value in sorted(group.items()) if key != "params"}
        yield f"group {number}: {len(group['params'])} parameters, {options}"
    for number, state in state_dict["state"].items():
        described = map_tensors(lambda t: t.detach().to("cpu" if t.ndim == 0 else "meta"), state)
        yield f"parameter {number}: {described}"


def _check_groups(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Compares the groups; returns the numbers of the saved parameters."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise TypeError(
            f"expected a state dict of an optimizer, {{'state': ..., 'param_groups': ...}}, got "
            f"{type(state_dict).__name__}: load the saved file on every rank, or call "
            "consolidate_state_dict(recipient_rank=-1) before state_dict()"
        )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise StateMismatch(
            f"the state dict has {len(saved_groups)} parameter groups, the optimizer {len(groups)}: {REGROUP}"
        )
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise StateMismatch(
                f"group {number} has {len(saved['params'])} parameters in the state dict, and "
                f"{len(group['params'])} in the optimizer: {REGROUP}"
            )
        # One side alone may have more: a scheduler adds to a group, and so do newer versions of torch.
        lost, new = (sorted(a.keys() - b.keys() - _NAMES) for a, b in ((saved, group), (group, saved)))
        if lost and new:
            raise StateMismatch(
                f"the state dict is that of another optimizer: this one doesn't know its option '{lost[0]}', and it "
                f"has no '{new[0]}'"
            )
    return [number for saved in saved_groups for number in saved["params"]]


def _check_shapes(state: State, place: Place, live: State) -> None:
    for key, value in state.items():
        for tensor in large_tensors_in(value):
            if place.owner is None and tuple(tensor.shape) != place.shape:
                raise StateMismatch(
                    f"the state '{key}' of '{place.name}' has shape {tuple(tensor.shape)}, expected "
                    f"{place.shape} or a number"
                )
        known = live.get(key)
        if place.owner is None or not isinstance(value, Tensor) or not isinstance(known, Tensor):
            continue
        if value.shape != known.shape:
            raise StateMismatch(
                f"the state '{key}' of '{place.name}' has shape {tuple(value.shape)}, expected {tuple(known.shape)}"
            )


def _part_of(place: Place, tensor: Tensor) -> Tensor:
    """What this rank keeps of a whole tensor, with memory of its own."""
    if tensor.ndim == 0 or place.owner is not None:
        return tensor.detach().clone()
    assert place.stepped is not None
    start, stop = place.mine
    return tensor.detach().reshape(-1)[start:stop].clone().view(place.stepped.shape)
