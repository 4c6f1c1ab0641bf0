"""Checkpoints in torch's own format, `torch.distributed.checkpoint` (DCP).

`sharded_state_dict` can be given to `dcp.save` directly. `dcp.load` reads only into tensors that exist already: a fresh
optimizer, which has none, would silently stay without its state. So the target is made from the saved entries.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from scale_core.state.state_dict import Optimizers, target_state_dict
from scale_core.state.validation import SavedTensor


def dcp_target(
    checkpoint_id: str | PathLike[str], model: nn.Module, optimizer: Optimizers = None, *, key: str = ""
) -> dict[str, Any]:
    """Returns the state to read a checkpoint of DCP into, at any number of ranks. Each rank calls it for itself.

        dcp.save({"train": sharded_state_dict(model, optimizer)}, checkpoint_id=folder)
        ...
        target = dcp_target(folder, model, optimizer, key="train")
        dcp.load({"train": target}, checkpoint_id=folder)
        load_sharded_state_dict(target, model, optimizer, copy=False)

    Args:
        checkpoint_id: The folder, as given to `dcp.save`.
        model: The built model.
        optimizer: Its optimizer, or several, which may be fresh; with None the saved optimizer state is left out.
        key: The key of the state in the saved dict, or "" if nothing else was saved.

    Raises:
        StateMismatch: The saved state belongs to a different model or optimizer. Nothing was read into them.

    Examples:
        >>> import tempfile, warnings
        >>> import torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from scale_core.state import load_sharded_state_dict, sharded_state_dict
        >>> from scale_core.state.dcp import dcp_target
        >>> warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # in a world of one
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 3)
        >>> _ = dcp.save(sharded_state_dict(model), checkpoint_id=folder)
        >>> target = dcp_target(folder, model)
        >>> dcp.load(target, checkpoint_id=folder)
        >>> load_sharded_state_dict(target, model, copy=False)

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    metadata = FileSystemReader(checkpoint_id).read_metadata()
    prefix = f"{key}." if key else ""
    saved: dict[str, Any] = {
        name.removeprefix(prefix): SavedTensor(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    saved.update(_saved_values(checkpoint_id, metadata, prefix))
    return target_state_dict(model, optimizer, saved)


def _saved_values(checkpoint_id: str | PathLike[str], metadata: Metadata, prefix: str) -> dict[str, Any]:
    """The saved values that are no tensors: DCP takes lists and dicts apart, and says how they were together."""
    names = [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and not isinstance(entry, TensorStorageMetadata)
    ]
    flat: dict[str, Any] = dict.fromkeys(names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # It was asked not to be used.
        load(flat, checkpoint_id=checkpoint_id, no_dist=True)
    paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
    values: dict[str, Any] = {}
    for name, value in flat.items():
        path = paths.get(name, (name,))
        put_at(values, path[1:] if prefix else path, value)
    return {str(name): _with_lists(value) for name, value in values.items()}


def put_at(values: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Puts a value into nested dicts, at a path of keys."""
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """A value in which dicts by number, made from lists, are lists again."""
    if not isinstance(value, dict):
        return value
    tree = {key: _with_lists(part) for key, part in value.items()}
    return [tree[key] for key in sorted(tree)] if tree and all(isinstance(key, int) for key in tree) else tree
