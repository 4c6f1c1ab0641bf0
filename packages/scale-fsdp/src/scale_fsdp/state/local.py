"""What one rank alone holds of a model: to be saved by each rank for itself, without a word to the others.

The tensors are the shards as they are. What they are shards of stands in the metadata: whose they are, and which
elements of which parameter. With it a state finds its way back to the right rank only, and the files of all ranks
become the plain model's weights again, without any process group: see `consolidate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from scale_core.group import Group
from scale_fsdp.slots import flat_name_of, paths_in
from scale_fsdp.state.full import local_state_dict_of
from scale_fsdp.state.loading import LOCAL, loading_local, refuse_in_use
from scale_fsdp.state.naming import Place, all_names, places_in, plain_order, tied_in
from scale_fsdp.unit import units_in

FORMAT = 1


def local_state_dict(module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns this rank's shards and the module's buffers, and says in torch's `_metadata` whose they are."""
    state = local_state_dict_of(module, plain, *args, **kwargs)
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    if hasattr(state, "_metadata"):
        state._metadata.setdefault(prefix[:-1], {})[LOCAL] = local_metadata_dict(module)
    return state


def local_metadata_dict(module: nn.Module) -> dict[str, Any]:
    """Returns what the shards of this rank are shards of, in values that torch.save and JSON know.

    Raises:
        ValueError: A parameter of the module belongs to a unit outside of it.
    """
    entries, (shard, replicas), buffers = _entries(module), _groups(module), _buffer_names(module)
    known = all_names(module).keys() | set(buffers)
    return {
        "format": FORMAT,
        "rank": shard.rank,
        "world_size": shard.size,
        "replica": replicas.rank,
        "parameters": {name: _describe(place, entries) for name, place in places_in(module).items()},
        "tied": tied_in(module),
        "buffer_names": buffers,
        "names": [name for name in plain_order(module) if name in known],
    }


def load_local_state_dict(
    module: nn.Module,
    plain_state: Callable[..., Any],
    plain_load: Callable[..., Any],
    state_dict: Mapping[str, Any],
    strict: bool,
) -> Any:
    """Loads what `local_state_dict` gave on this rank.

    Args:
        module: The sharded module.
        plain_state: Its `state_dict` of `nn.Module`.
        plain_load: Its `load_state_dict` of `nn.Module`.
        state_dict: What is to be loaded.
        strict: Names must be the same on both sides.

    Raises:
        ValueError: It is that of another rank, another number of ranks or another wrapping, or a tensor in it has
            another shape; nothing has been written then.
        RuntimeError: The parameters are in use.
    """
    refuse_in_use(module, "load_local_state_dict")
    given = getattr(state_dict, "_metadata", {}).get("", {}).get(LOCAL)
    if given is not None:
        _check_metadata(given, local_metadata_dict(module))
    _check_tensors(local_state_dict_of(module, plain_state), state_dict, strict)
    with loading_local():
        return plain_load(state_dict, strict)


def _describe(place: Place, entries: Mapping[int, str]) -> dict[str, Any]:
    if id(place.buffer) not in entries:
        raise ValueError(
            f"'{place.name}' belongs to a unit outside of this module: call this on the outermost sharded module"
        )
    flat, apart = place.buffer.flatten, place.unit.of_ranks
    return {
        "shape": list(place.entry.shape),
        "dtype": str(place.buffer.dtype),
        "start": place.span.start,
        "stop": place.span.stop,
        "entry": entries[id(place.buffer)] if flat else place.name,
        "offset": place.span.shard_offset if flat else 0,
        **({"ranks": list(place.unit.options.ranks.whole.ranks)} if apart else {}),
    }


def _entries(module: nn.Module) -> dict[int, str]:
    """Under which name a state dict holds the flat parameter of each buffer, by the buffer's id."""
    paths = paths_in(module)
    entries = {}
    for unit in units_in(module):
        path = paths[id(unit.module)]
        for number, buffer in enumerate(unit.buffers):
            entries[id(buffer)] = f"{path}.{flat_name_of(number)}".lstrip(".")
    return entries


def _groups(module: nn.Module) -> tuple[Group, Group]:
    """The ranks between which the module is cut, and those that hold copies of the same cut."""
    ranks = [unit.options.ranks for unit in units_in(module)]
    found = max(ranks, key=lambda each: each.whole.size)
    return found.shard, found.replicas


def _buffer_names(module: nn.Module) -> list[str]:
    names = []
    for path, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                names.append(f"{path}.{name}" if path else name)
    return names


def _check_metadata(given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    mend = (
        "Make whole weights of the states of all ranks, FullyShardedDataParallel.consolidate_shard_weights(weights, "
        "metadata), and load those: model.load_state_dict(...)"
    )
    if given["world_size"] != own["world_size"]:
        raise ValueError(
            f"load_local_state_dict: expected the state of one of {own['world_size']} ranks, got that of rank "
            f"{given['rank']} of {given['world_size']}. {mend}"
        )
    if given["rank"] != own["rank"]:
        raise ValueError(
            f"load_local_state_dict: expected the state of rank {own['rank']}, got that of rank {given['rank']}, of "
            f"{own['world_size']}: read the file that this rank has written"
        )
    for name in dict.fromkeys((*own["parameters"], *given["parameters"])):
        mine, its = own["parameters"].get(name), given["parameters"].get(name)
        if mine != its:
            raise ValueError(
                f"load_local_state_dict: the state is that of another model or another wrapping; first, '{name}': "
                f"expected {_in_words(mine)}, got {_in_words(its)}. {mend}"
            )


def _in_words(parameter: Mapping[str, Any] | None) -> str:
    if parameter is None:
        return "no such parameter"
    shape = tuple(parameter["shape"])
    return (
        f"elements {parameter['start']:,} to {parameter['stop']:,} of {shape} {parameter['dtype']} in "
        f"'{parameter['entry']}' from {parameter['offset']:,} on"
    )


def _check_tensors(own: Mapping[str, Any], state_dict: Mapping[str, Any], strict: bool) -> None:
    problems = []
    for name, value in own.items():
        if not isinstance(value, Tensor):
            continue
        if name not in state_dict:
            problems += [f"'{name}' is missing"] if strict else []
        elif not isinstance(state_dict[name], Tensor):
            problems.append(f"'{name}': expected a tensor, got {type(state_dict[name]).__name__}")
        elif state_dict[name].shape != value.shape:
            problems.append(
                f"'{name}': expected this rank's shape {tuple(value.shape)}, got {tuple(state_dict[name].shape)}"
            )
    if strict:
        problems += [f"'{name}' is unexpected" for name in state_dict if name not in own]
    if problems:
        raise ValueError(
            "load_local_state_dict: the state is that of another rank, another number of ranks or another wrapping, "
            f"and nothing was loaded: {'; '.join(problems)}. Full weights are loaded by load_state_dict(...)"
        )
