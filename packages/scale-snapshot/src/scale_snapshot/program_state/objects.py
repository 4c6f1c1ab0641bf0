"""The objects of a training as one flat state, and back.

Every key begins with the name of its object: `model.<parameter>`, `optimizer.<parameter>.<key>`, `scheduler.<entry>`.
An optimizer is saved by the names of that module whose parameters it steps on; so objects named `model` and `optim`
have the keys of `sharded_state_dict`. Under `scale.objects` stands which objects a snapshot holds.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from scale_core.comm.group import Group
from scale_core.consistency.all_ranks import all_gather_json
from scale_core.consistency.contract import Contract
from scale_core.shard import on_local_tensors
from scale_core.state.local_shard import LocalShard
from scale_core.state.optim_state_dict import optimizer_entries
from scale_core.state.param_groups import group_entries
from scale_core.state.param_ownership import named_param_slices
from scale_core.state.state_dict import load_what_fits, sharded_state_dict, target_state_dict, without_misfits
from scale_core.state.validation import SavedTensor, StateMismatch
from scale_snapshot.errors import SnapshotError
from scale_snapshot.format.metadata import INDEX
from scale_snapshot.format.planner import is_tensor
from scale_snapshot.format.state_codec import decode, encode, tensor_keys
from scale_snapshot.program_state.extra_state import KIND, extra_state_target, extra_states
from scale_snapshot.program_state.stateful import Captured, StatefulPart, places, unread


@dataclass
class _Model:
    """A module and the optimizers of its parameters, by their names."""

    name: str
    module: nn.Module  # Without wrappers that only put something before names
    count: Tensor | None  # of an AveragedModel
    optimizers: dict[str, list[Optimizer]] = field(default_factory=dict)

    @staticmethod
    def of(name: str, module: nn.Module) -> _Model:
        inner = unwrapped(module)
        if isinstance(inner, AveragedModel):
            return _Model(name, unwrapped(inner.module), inner.get_buffer("n_averaged"))
        return _Model(name, inner, None)

    def state(self) -> dict[str, Any]:
        state = _renamed(sharded_state_dict(self.module), "model", self.name)
        for name, optimizers in self.optimizers.items():
            state.update(_renamed(optimizer_entries(self.module, optimizers), "optim", name))
        return state | self._count()

    @on_local_tensors
    def target(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The destinations of all that was saved of them."""
        weights = self._weights(saved)
        target = _renamed(target_state_dict(self.module, None, weights, strict=False), "model", self.name)
        for name, optimizers in self.optimizers.items():
            its = weights | _renamed(saved, name, "optim")
            both = target_state_dict(self.module, optimizers, its, strict=False)
            target.update(_renamed(both, "optim", name))
        return target | self._count()

    @on_local_tensors
    def load(self, state: Mapping[str, Any], left_out: Collection[str]) -> None:
        """Gives them the values that were read: all, unless some were left out."""
        strict = not any(
            key.startswith((f"{self.name}.", *(f"{name}." for name in self.optimizers))) for key in left_out
        )
        weights = self._weights(state)
        misfits = _renamed(dict.fromkeys(left_out), self.name, "model")
        load_what_fits(without_misfits(weights, misfits), self.module, copy=False, strict=strict)
        for name, optimizers in self.optimizers.items():
            its = weights | _renamed(state, name, "optim")
            fits = without_misfits(its, misfits | _renamed(dict.fromkeys(left_out), name, "optim"))
            load_what_fits(fits, self.module, optimizers, copy=False, strict=strict)

    def _count(self) -> dict[str, Any]:
        return {} if self.count is None else {f"{self.name}.n_averaged": self.count.detach()}

    def _weights(self, state: Mapping[str, Any]) -> dict[str, Any]:
        counts = self._count().keys()
        return _renamed({key: value for key, value in state.items() if key not in counts}, self.name, "model")


class Objects:
    """The objects that are saved or loaded together, by their names.

    Raises:
        ValueError: A name that can't be one, or an optimizer whose parameters belong to no module, or to several.
        TypeError: An object that is none of those that can be saved.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        if not all(isinstance(name, str) for name in objects):
            raise TypeError(
                f"expected a dict of objects by name, got {objects!r:.100}: write "
                '{"model": model, "optimizer": optimizer}'
            )
        self.given = dict(objects)
        self.models: dict[str, _Model] = {}
        self.stateful: dict[str, StatefulPart] = {}
        self.values: dict[str, Any] = {}  # Tensors, shards, and values that encode to JSON
        self.without_params: dict[str, list[Optimizer]] = {}  # Optimizers without a parameter on this rank
        optimizers: dict[str, list[Optimizer]] = {}
        for name, obj in objects.items():
            if isinstance(obj, nn.Module):
                self.models[name] = _Model.of(name, obj)
            elif isinstance(obj, Optimizer) and not _is_one_state(obj):
                optimizers[name] = [obj]
            elif isinstance(obj, list | tuple) and obj and all(isinstance(optimizer, Optimizer) for optimizer in obj):
                optimizers[name] = list(obj)
            elif (part := StatefulPart.of(name, obj)) is not None:
                self.stateful[name] = part
            else:
                self.values[name] = obj
        _check_names([*self.models, *optimizers, *self.stateful], self.values)
        self.extra_states: dict[str, StatefulPart] = {}
        for model in self.models.values():
            self.extra_states.update(extra_states(model.name, model.module))
        for name, listed in optimizers.items():
            home = _home_of(name, listed, self.models)
            if home is None:
                self.without_params[name] = listed
            else:
                home.optimizers[name] = listed

    # Saving.

    @on_local_tensors
    def capture(self, rank: int) -> Capture:
        """This rank's state of them; the tensors are the live ones."""
        state: dict[str, Any] = {}
        for model in self.models.values():
            state.update(model.state())
        for name, optimizers in self.without_params.items():
            for optimizer in optimizers:
                nothing: list[list[str]] = [[] for _ in optimizer.param_groups]
                state.update(_renamed(group_entries(optimizer, nothing), "optim", name))
        for name, value in self.values.items():
            entries: dict[str, Any] = {name: value.detach()} if isinstance(value, LocalShard | Tensor) else {}
            if not entries:
                encoded = encode(value, name)
                entries = {name: encoded.value, **encoded.tensors}
            if doubled := sorted(entries.keys() & state.keys()):
                raise ValueError(
                    f"'{doubled[0]}' would be the name of two entries, one of them of '{name}': give one another name"
                )
            state.update(entries)
        captured = {name: part.capture(rank) for name, part in (self.stateful | self.extra_states).items()}
        about: dict[str, dict[str, Any]] = {name: {"kind": "module"} for name in self.models}
        about.update({name: {"kind": "optimizer"} for name in self.without_params})
        for model in self.models.values():
            about.update({name: {"kind": "optimizer", "of": model.name} for name in model.optimizers})
        for name, its in captured.items():
            kind, mode = (KIND, "compared") if name in self.extra_states else ("state", self.stateful[name].mode)
            about[name] = {"kind": kind, "mode": mode, "layout": its.layout, "sharded": its.is_sharded}
            about[name]["digest"] = its.digest() if mode == "compared" and not its.is_sharded else ""
        return Capture(state, captured, about)

    # Loading.

    @on_local_tensors
    def target(
        self, saved: Mapping[str, Any], group: Group, *, strict: bool, only_given: bool = False
    ) -> dict[str, Any]:
        """The destinations of all that was saved and this rank needs."""
        index = _index_of(saved)
        self._compare(index, saved, strict=strict, only_given=only_given)
        for name in [name for name in self.without_params if name in index or len(self.models) == 1]:
            home = self.models.get(str(index.get(name, {}).get("of"))) or next(iter(self.models.values()), None)
            if home is not None:
                home.optimizers[name] = self.without_params.pop(name)
        target: dict[str, Any] = {}
        for model in self.models.values():
            target.update(model.target(saved))
        for name, part in self.stateful.items():
            target.update(part.target(saved, index.get(name, _SHARDED), group.rank, group.size))
        for name, part in self._extra_states_here().items():
            target.update(extra_state_target(part, saved, index.get(name), group.rank, group.size))
        for name, value in self.values.items():
            if is_tensor(value) or name not in saved:
                target[name] = value.detach() if isinstance(value, Tensor) else value
            else:
                inner = [] if isinstance(saved[name], SavedTensor) else tensor_keys(saved[name])
                target.update(places({key: saved[key] for key in inner}))
                target[name] = saved[name]
        if INDEX in saved:
            target[INDEX] = saved[INDEX]
        if only_given or not strict:  # Missing ones; mismatches are left to the comparison of all ranks.
            prefixes = tuple(f"{name}{sign}" for name in [*self._kinds(), *self.values] for sign in ".@")
            others = (key for key in saved if key not in target and not key.startswith(prefixes))
            target.update({key: unread(saved[key]) for key in others})
        return target

    @on_local_tensors
    def load(self, state: Mapping[str, Any], group: Group, left_out: Collection[str] = ()) -> dict[str, Any]:
        """Gives the objects the values that were read; returns them, and the values that were read, by their names."""
        index = _index_of(state)
        states = {
            name: part.decoded(state, index.get(name, _SHARDED), group.rank, group.size)
            for name, part in self.stateful.items()
        }
        extra = [
            (part, part.decoded(state, index[name], group.rank, group.size))
            for name, part in self._extra_states_here().items()
            if name in index and name not in left_out
        ]
        values = {
            name: value if is_tensor(value) else decode(state[name], state.__getitem__)
            for name, value in self.values.items()
        }
        for model in self.models.values():
            model.load(state, left_out)
        for part, its in extra:
            part.load(its)
        loaded = {name: part.load(states[name]) for name, part in self.stateful.items()}
        return {**self.given, **values, **loaded}

    def _extra_states_here(self) -> dict[str, StatefulPart]:
        """The extra states of the modules that are loaded."""
        extra_keys = tuple(f"{name}@" for name in self.models)
        return {name: part for name, part in self.extra_states.items() if name.startswith(extra_keys)}

    def _compare(self, index: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool, only_given: bool) -> None:
        """Compares the saved objects with those given; unless strict, leaves out objects that were not saved."""
        kinds = self._kinds()
        index = {name: entry for name, entry in index.items() if entry.get("kind") != KIND}
        for name in kinds.keys() & index.keys():
            if kinds[name] != (kind := _kind(index[name])):
                raise StateMismatch(
                    f"'{name}' was saved as {_A[kind]}, and is {_A[kinds[name]]} here: load what was saved"
                )
        for name in self.values.keys() & index.keys():
            raise StateMismatch(
                f"'{name}' was saved as {_A[_kind(index[name])]}, and is a {type(self.values[name]).__name__} here: "
                "load what was saved"
            )
        lacking = [name for name in kinds if index and name not in index] if strict else self._not_saved(index, saved)
        unknown = [] if only_given else [name for name in index if name not in kinds]
        if not lacking and not unknown:
            return
        differing = (
            f"the snapshot has the objects {', '.join(index)}, and load was given {', '.join(self.given)} "
            f"(not saved: {', '.join(lacking) or 'none'}; not given: {', '.join(unknown) or 'none'})"
        )
        if strict:
            raise StateMismatch(
                f"{differing}: give the objects that were saved, only_given=True if the others are "
                "not needed, or strict=False for those in both"
            )
        warnings.warn(f"{differing}; only what is in both is loaded", stacklevel=2)
        for name in lacking:
            for table in (self.models, self.stateful, self.values, self.without_params):
                table.pop(name, None)
            for model in self.models.values():
                model.optimizers.pop(name, None)

    def _not_saved(self, index: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        saved_parts = index or {key.partition(".")[0]: {} for key in saved}
        return [name for name in self._kinds() if name not in saved_parts] + [
            name for name in self.values if name not in saved
        ]

    def _kinds(self) -> dict[str, str]:
        kinds = dict.fromkeys(self.models, "module") | dict.fromkeys(self.without_params, "optimizer")
        for model in self.models.values():
            kinds.update(dict.fromkeys(model.optimizers, "optimizer"))
        return kinds | dict.fromkeys(self.stateful, "state")


@dataclass(frozen=True)
class Capture:
    """One rank's state of the objects of a call; the tensors are the live ones."""

    state: dict[str, Any]  # Ready for the flat state
    stateful: dict[str, Captured]
    about: dict[str, dict[str, Any]]  # Of each object, the facts that ranks compare

    def assembled(self, everyones: Sequence[dict[str, dict[str, Any]]], rank: int) -> dict[str, Any]:
        """This rank's flat state, given `about` of all ranks.

        Raises:
            SnapshotError: On all ranks, if they have different objects.
        """
        first = everyones[0]
        for number, other in enumerate(everyones):
            for name in [*first, *other]:
                one, two = (_summary(about.get(name)) for about in (first, other))
                if one != two and KIND not in (one, two):  # Stages of a pipeline have other modules.
                    raise SnapshotError(
                        f"the ranks save different objects: '{name}' is {one} on rank 0 and {two} on rank {number}: "
                        "pass the same names and kinds of objects on all ranks"
                    )
        state, index = dict(self.state), {}
        for name in dict.fromkeys(name for about in everyones for name in about):
            having = {number: about[name] for number, about in enumerate(everyones) if name in about}
            lowest = next(iter(having.values()))
            entry: dict[str, Any] = {key: lowest[key] for key in ("kind", "layout") if key in lowest}
            owners = sorted({about["of"] for about in having.values() if "of" in about})
            if len(owners) > 1:
                raise SnapshotError(
                    f"the optimizer '{name}' is one of {owners[0]} on some ranks and of {owners[1]} on others: "
                    "pass each optimizer under one name on all ranks"
                )
            if owners:
                entry["of"] = owners[0]
            if lowest["kind"] in ("state", KIND):
                state.update(self._stateful_entries(name, entry, having, rank, len(everyones)))
            index[name] = entry
        return state | ({INDEX: index} if index else {})

    def _stateful_entries(
        self, name: str, entry: dict[str, Any], having: Mapping[int, Mapping[str, Any]], rank: int, size: int
    ) -> dict[str, Any]:
        """The entries of an object with a state, on some ranks; says in `entry` how they are to be read."""
        captured, (lowest, its) = self.stateful.get(name), next(iter(having.items()))
        if any(about["sharded"] for about in having.values()):
            entry["kind"] = "sharded"
            return {} if captured is None else captured.flat(name)
        differ = len({(about["digest"], about["layout"]) for about in having.values()}) > 1
        if its["mode"] == "per rank" or (differ and its["mode"] == "compared"):
            entry["ranks"] = size
            entry["layouts"] = [having[number]["layout"] if number in having else "nothing" for number in range(size)]
            return {} if captured is None else captured.flat(f"{name}.ranks[{rank}]")
        return captured.flat(name) if captured is not None and rank == lowest else {}


_SHARDED: Mapping[str, Any] = {"kind": "sharded", "layout": "entries"}  # For a snapshot without an index.
_A = {"module": "a module", "optimizer": "an optimizer", "state": "an object with a state_dict"}


def collect(objects: Mapping[str, Any], contract: Contract, before: Callable[[], object]) -> dict[str, Any]:
    """Returns the flat state of this rank's objects, after `before`; all ranks call it, and all raise if one does."""
    rank, capture, refusal = contract.group.rank, Capture({}, {}, {}), None
    try:
        before()
        capture = Objects(objects).capture(rank)
    except Exception as error:
        refusal = error
    # One exchange, since a training step waits for it.
    messages: list[Any] = [
        f"{type(refusal).__name__}: {refusal}" if refusal else "",
        isinstance(refusal, SnapshotError),
        capture.about,
    ]
    everyones = all_gather_json(messages, contract, "saving objects")
    if refusal is not None:
        raise refusal
    for number, (text, has_failed, _) in enumerate(everyones):
        if text:
            raise (SnapshotError if has_failed else ValueError)(f"{text} (on rank {number})")
    return capture.assembled([about for _, _, about in everyones], rank)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of wrappers that only put something before its names."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    while True:
        if isinstance(module, compiled):
            module = module.get_submodule("_orig_mod")
        elif isinstance(module, DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(module, WaitingWrapper):
            module.wait()
            module = module.module
        else:
            return module


@runtime_checkable
class WaitingWrapper(Protocol):
    """A wrapper as `ShardedDataParallel`: its parameters are up to date after `wait`."""

    module: nn.Module
    sharded_optimizers: Any

    def wait(self) -> None: ...


def _check_names(names: Sequence[str], values: Mapping[str, Any]) -> None:
    for name in names:
        if not name or name == INDEX.partition(".")[0] or any(sign in name for sign in ".[]@"):
            raise ValueError(
                f"'{name}' can't be the name of an object: write a name of letters, digits and underscores, other than "
                f"'{INDEX.partition('.')[0]}'"
            )
        for key in values:
            if key.startswith(f"{name}."):
                raise ValueError(
                    f"'{key}' is the name of an entry of the object '{name}': give one of them another name"
                )
    if INDEX in values:
        raise ValueError(f"the name '{INDEX}' is reserved for the index of a snapshot: give the value a different name")


def _is_one_state(optimizer: Optimizer) -> bool:
    """Whether its state is not kept by parameter: LBFGS's history, or the state of LocalSGD's inner optimizer."""
    return isinstance(optimizer, torch.optim.LBFGS) or getattr(optimizer, "is_per_rank", False) is True


def _home_of(name: str, optimizers: Sequence[Optimizer], models: Mapping[str, _Model]) -> _Model | None:
    """The module whose parameters the optimizers step on; None if this rank has none of them."""
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    if not params:
        return None
    owners = {
        model.name: {holding.owner for holding in named_param_slices(model.module).values()}
        for model in models.values()
    }
    num_params = {model: sum(param in owned for param in params) for model, owned in owners.items()}
    for model, count in num_params.items():
        if count == len(params):
            return models[model]
    some = [model for model, count in num_params.items() if count]
    if len(some) > 1 and all(any(param in owned for owned in owners.values()) for param in params):
        modules = ", ".join(f"'{model}': {model}" for model in some)
        raise ValueError(
            f"the optimizer '{name}' steps on parameters of the modules {' and '.join(some)}, so that no one of them "
            f"names its state: build an optimizer for each, or pass the modules as one, nn.ModuleDict({{{modules}}})"
        )
    lost = next(param for param in params if not any(param in owned for owned in owners.values()))
    raise ValueError(
        f"the optimizer '{name}' steps on a parameter of shape {tuple(lost.shape)} that is in none of the modules "
        f"({', '.join(models) or 'none was given'}): pass its module as well, as "
        f'{{"model": model, "{name}": {name}}}, and build the optimizer after the model is sharded'
    )


def _index_of(saved: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    index = saved.get(INDEX, {})
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise ValueError(f"{INDEX} is damaged: expected an object for each name")
    return index


def _kind(entry: Mapping[str, Any] | None) -> str:
    kind = "" if entry is None else str(entry.get("kind"))
    return kind if kind in ("module", "optimizer") else "state"


def _summary(about: Mapping[str, Any] | None) -> str:
    """The facts that must be equal on all ranks."""
    if about is None:
        return "not given"
    if about["kind"] == KIND:
        return KIND
    mark = {"per rank": ", one of each rank", "rank 0": ", from rank 0"}
    return _A[_kind(about)] + mark.get(about.get("mode", ""), "")


def _renamed(state: Mapping[str, Any], before: str, after: str) -> dict[str, Any]:
    """The entries whose keys begin with one name, under another."""
    prefix = f"{before}."
    return {f"{after}.{key.removeprefix(prefix)}": value for key, value in state.items() if key.startswith(prefix)}
