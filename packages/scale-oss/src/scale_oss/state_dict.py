"""State dicts of OSS: the full state in the form of the plain optimizer, and the part of each rank.

    {"state": {0: {"step": tensor(3.), "exp_avg": tensor([[...]])}, ...},
     "param_groups": [{"lr": 0.001, ..., "params": [0, 1, ...]}]}

Parameters have the numbers that the plain optimizer gives them, and tensors are full: so a state loads at any number of
ranks, and into the plain optimizer and out of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group
from scale_core.consistency.all_ranks import raise_on_all_ranks
from scale_core.consistency.contract import Contract
from scale_core.flat.packing import group_in_buckets
from scale_core.shard import on_local_tensors, unit_shard_of
from scale_core.sharded_tensor.full_tensor import Part
from scale_core.state.full_optim_state import ParamState, gather_optim_states
from scale_core.state.param_groups import NAMES, REGROUP, check_options
from scale_core.state.param_ownership import ParamSlice
from scale_core.state.validation import StateMismatch
from scale_core.tree import map_tensors, tensors_in
from scale_oss.buckets.bucketing import param_name
from scale_oss.buckets.state_placement import StatePlacement, check_gatherable

State = dict[Any, Any]  # An optimizer's state of one parameter: tensors, numbers, and containers of them.


def plain_state_dict(groups: Sequence[Mapping[str, Any]], states: Mapping[int, State]) -> dict[str, Any]:
    """Returns a state dict as the plain optimizer of these groups gives it."""
    packed, number = [], 0
    for group in groups:
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        packed.append({**options, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    return {"state": dict(states), "param_groups": packed}


@on_local_tensors
def local_state_dict(
    state_dict: Any,
    groups: Sequence[Mapping[str, Any]],
    placements: Sequence[StatePlacement],
    live: Mapping[Tensor, State],
) -> dict[str, Any]:
    """Cuts this rank's shard out of a plain state dict, as a state dict of this rank's optimizer."""
    numbers = _check_groups(state_dict, groups)
    unknown = [number for number in state_dict["state"] if number not in numbers]
    if unknown:
        raise StateMismatch(f"the state dict has a state of parameter {unknown[0]!r}, which is in none of its groups")
    states: dict[int, State] = {}
    stepped: dict[int, int] = {}
    for number, placement in zip(numbers, placements, strict=True):
        state = state_dict["state"].get(number)
        if state is not None:
            _check_shapes(
                state, placement, {} if placement.optimizer_param is None else live.get(placement.optimizer_param, {})
            )
        if placement.optimizer_param is not None:
            stepped[number] = len(stepped)
            if state is not None:
                states[stepped[number]] = map_tensors(partial(_local_part, placement), state)
    packed = [
        {
            **{key: value for key, value in saved.items() if key not in NAMES},
            "params": [stepped[number] for number in saved["params"] if number in stepped],
        }
        for saved in state_dict["param_groups"]
    ]
    return {"state": states, "param_groups": packed}


def describe_state_dict(state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Yields the values that must be equal on all ranks in a plain state dict that each has read."""
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
            f"{type(state_dict).__name__}. Load the saved file on every rank, or call "
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
        check_options(saved, group)
    return [number for saved in saved_groups for number in saved["params"]]


def _check_shapes(state: State, placement: StatePlacement, live: State) -> None:
    for key, value in state.items():
        for tensor in tensors_in(value):
            if placement.owner is None and tensor.ndim and tuple(tensor.shape) != placement.shape:
                raise StateMismatch(
                    f"the state '{key}' of '{placement.name}' has shape {tuple(tensor.shape)}, expected "
                    f"{placement.shape} or a number"
                )
        current = live.get(key)
        if placement.owner is None or not isinstance(value, Tensor) or not isinstance(current, Tensor):
            continue
        if value.shape != current.shape:
            raise StateMismatch(
                f"the state '{key}' of '{placement.name}' has shape {tuple(value.shape)}, expected "
                f"{tuple(current.shape)}"
            )


def _local_part(placement: StatePlacement, tensor: Tensor) -> Tensor:
    """This rank's shard of a full tensor, with memory of its own."""
    if tensor.ndim == 0 or placement.owner is not None:
        return tensor.detach().clone()
    assert placement.optimizer_param is not None
    start, stop = placement.local_range
    return tensor.detach().reshape(-1)[start:stop].clone().view(placement.optimizer_param.shape)


@on_local_tensors
def _gather_states(
    placements: Sequence[StatePlacement],
    states: Mapping[Tensor, State],
    keeps: bool,
    contract: Contract,
    bucket_numel: int,
) -> dict[int, State]:
    """Gathers the state of each parameter on the host of the ranks that keep it, by the number of its placement.

    All ranks call it together; they raise as `gather_optim_states` does.
    """
    states_by_number: dict[int, State] = {}
    by_group: dict[Group, list[int]] = {}
    for number, placement in enumerate(placements):
        by_group.setdefault(placement.group, []).append(number)
    for group, numbers in by_group.items():
        sizes = [max(1, sum(span.numel for span in placements[number].ranges)) for number in numbers]
        for run in group_in_buckets(sizes, bucket_numel):
            bucket = []
            for placement in (placements[numbers[index]] for index in run):
                stepped, parts = placement.optimizer_param, [Part(*span) for span in placement.ranges]
                owner, local_state = (placement.param, {}) if stepped is None else (stepped, states.get(stepped, {}))
                local_slice = ParamSlice(placement.name, owner, placement.shape, *placement.local_range)
                bucket.append(
                    ParamState(local_slice, group, parts, placement.param.device, local_state, placement.owner)
                )
            full_states = gather_optim_states(bucket, contract, keeps=keeps)
            states_by_number.update(
                (numbers[index], state) for index, state in zip(run, full_states, strict=False) if state
            )
    return dict(sorted(states_by_number.items()))


class StateByParam(MutableMapping[Tensor, Any]):
    """`OSS.state`: looked up by a parameter, or by the piece of it in this rank's optimizer; of one OSS or several."""

    def __init__(self, *parts: tuple[Optimizer, Mapping[int, StatePlacement]]) -> None:
        self._parts = parts

    def __getitem__(self, key: Tensor) -> Any:
        state, stepped = self._locate(key)
        return {} if stepped is None else state[stepped]

    def __setitem__(self, key: Tensor, value: Any) -> None:
        state, stepped = self._locate(key)
        if stepped is not None:
            state[stepped] = value

    def __delitem__(self, key: Tensor) -> None:
        state, stepped = self._locate(key)
        if stepped is None:
            raise KeyError(key)
        del state[stepped]

    def __contains__(self, key: object) -> bool:
        state, stepped = self._locate(key)
        return stepped in state

    def __iter__(self) -> Iterator[Tensor]:
        for optim, placements in self._parts:
            params = {id(placement.optimizer_param): placement.param for placement in placements.values()}
            yield from [params.get(id(key), key) for key in optim.state]

    def __len__(self) -> int:
        return sum(len(optim.state) for optim, _ in self._parts)

    def get(self, key: Tensor, default: Any = None) -> Any:
        """As of any mapping; creates no entry."""
        state, stepped = self._locate(key)
        return default if stepped is None else state.get(stepped, default)

    def clear(self) -> None:
        for optim, _ in self._parts:
            optim.state.clear()

    def _locate(self, key: Any) -> tuple[MutableMapping[Any, Any], Any]:
        """The state that has a parameter, and its key there; None if other ranks have all of it."""
        for optim, placements in self._parts:
            if (placement := placements.get(id(key))) is not None:
                return optim.state, placement.optimizer_param
        for optim, placements in self._parts[1:]:
            if key in optim.state or any(key is placement.optimizer_param for placement in placements.values()):
                return optim.state, key
        return self._parts[0][0].state, key


class OSSStateDictMixin(Optimizer):
    """State-dict methods of an optimizer whose state is in `optim`, which steps on this rank's shard."""

    optim: Optimizer
    shard_group: Group
    contract: Contract
    placements: dict[int, StatePlacement]  # by the parameter's `id`, in the order of the optimizer
    _bucket_numel: int
    _state: StateByParam
    _consolidated: dict[str, Any] | None
    _is_empty: bool  # No rank has any state.

    @property  # type: ignore[override]  # Optimizer has an attribute, which users assign to.
    def state(self) -> StateByParam:
        """This rank's state of each parameter, by the parameter; if it is cut, the state of this rank's part."""
        return self._state

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        if isinstance(state, StateByParam):
            self._state = state
        elif hasattr(self, "_state"):  # Not the empty one that torch begins with.
            values = dict(state)
            self._state.clear()
            self._state.update(values)

    @on_local_tensors
    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gathers the state of all ranks on the host of one of them, for its `state_dict()`; all ranks together.

        It goes bucket by bucket: the recipient holds the full state on its host, and one bucket of it on its device.
        The next step forgets it.

        Args:
            recipient_rank: Which rank of the group gets it; -1 is all of them.

        Raises:
            ValueError: The rank does not exist, the ranks have made different steps, or a state can't be put together.
            ContractError: The ranks name different recipients.
        """
        if not -1 <= recipient_rank < self.shard_group.size:
            raise ValueError(
                f"recipient_rank: expected a rank of the group, 0 to {self.shard_group.size - 1}, or -1 for all of "
                f"them, got {recipient_rank}"
            )
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                check_gatherable(param, param_name(group, 0, index))
        self._consolidated = None
        self.contract.check_equal("the arguments of consolidate_state_dict", [f"recipient_rank={recipient_rank}"])
        keeps = recipient_rank in (-1, self.shard_group.rank)
        states = _gather_states(self._placements(), self.optim.state, keeps, self.contract, self._bucket_numel)
        if keeps:
            self._consolidated = plain_state_dict(self.param_groups, states)

    @on_local_tensors
    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Returns the full state in the form of the plain optimizer, which loads it, as OSS does at any world size.

        Before the first step there is nothing to gather, and every rank may ask, as accelerate does.

        Args:
            all_ranks: Gather it on all ranks now; all ranks together.

        Raises:
            RuntimeError: It was not gathered on this rank since the last step.
        """
        if all_ranks:
            self.consolidate_state_dict(recipient_rank=-1)
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._consolidated is None and not self._is_empty:
            raise RuntimeError(
                "the optimizer's state is shared between the ranks, and was not gathered on this one since the last "
                "step. Call optimizer.consolidate_state_dict() on all ranks, then optimizer.state_dict() on the "
                "recipient, rank 0 if no other was named; or consolidate_state_dict(-1) where all ranks call it, as in "
                "accelerate's save_state"
            )
        content = dict(self._consolidated or plain_state_dict(self.param_groups, {}))
        for after in self._optimizer_state_dict_post_hooks.values():
            content = after(self, content) or content
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's shard of a full state; all ranks together, each with the same state dict.

        Values are cast by torch's rules, as in the plain optimizer. All is compared before anything is written.

        Args:
            state_dict: Of the plain optimizer, or of an OSS at any number of ranks; it is not changed, nor kept.

        Raises:
            TypeError: It is not a state dict, as on ranks that did not receive it.
            ValueError: It belongs to other parameters, or to another optimizer.
            ContractError: The ranks have different ones.
        """
        self.load_checked(self.check_state_dict(state_dict))
        self._is_empty = not state_dict["state"]

    def check_state_dict(self, state_dict: Any) -> dict[str, Any]:
        """Compares a full state with this optimizer, and with the other ranks' states; raises as `load_state_dict`.

        Changes nothing; returns this rank's shard of it, for `load_checked`.
        """
        refusal: TypeError | ValueError | None = None
        local: dict[str, Any] = {}
        try:
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before(self, state_dict) or state_dict
            local = local_state_dict(state_dict, self.param_groups, self._placements(), self.optim.state)
        except (TypeError, ValueError) as error:
            refusal = error
        raise_on_all_ranks(refusal, "the check of a state dict", self.contract, StateMismatch)
        self.contract.check_equal("the state dict given to OSS", list(describe_state_dict(state_dict)))
        return local

    @on_local_tensors
    def load_checked(self, local: dict[str, Any]) -> None:
        """Loads a result of `check_state_dict`."""
        self._invalidate()
        self.optim.load_state_dict(local)
        for group, inner_group in zip(self.param_groups, self.optim.param_groups, strict=True):
            for key in sorted(group.keys() - inner_group.keys() - NAMES):
                del group[key]
            group.update({key: value for key, value in inner_group.items() if key not in NAMES})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @on_local_tensors
    def sharded_state(self, holding: ParamSlice) -> ParamSlice:
        """For `scale_core.state.sharded_state_dict`: this rank's shard of the state of a parameter."""
        self.wait()
        self._invalidate()  # The caller may load another state.
        placement = self.placements[id(holding.owner)]
        if holding.shares_owner:  # A flat parameter is stepped on as it is.
            return holding
        if placement.optimizer_param is None:
            return replace(holding, start=0, stop=0, is_shard=True, state="nothing")
        # The range of a parameter that its layer has sharded counts from the layer's own start.
        first = holding.start if unit_shard_of(holding.owner) is None else 0
        return replace(
            holding,
            owner=placement.optimizer_param,
            start=first + placement.local_range.start,
            stop=first + placement.local_range.stop,
            local_shape=tuple(placement.optimizer_param.shape),
            is_shard=True,
            state="elements" if placement.owner is None else "all",
        )

    def _invalidate(self) -> None:
        self._consolidated, self._is_empty = None, False

    def _check_initial_state(self) -> None:
        """Finds out whether a new optimizer has a state already, as Adagrad; all ranks together."""
        with self.contract.waiting("optimizer state"):
            rows = exchange([len(self.optim.state)], self.shard_group, limit_seconds=self.contract.limit_seconds)
        self._is_empty = not any(num_states for (num_states,) in rows)

    def _placements(self) -> list[StatePlacement]:
        return [self.placements[id(param)] for param in self._all_params()]

    def _all_params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def wait(self) -> None:
        raise NotImplementedError
