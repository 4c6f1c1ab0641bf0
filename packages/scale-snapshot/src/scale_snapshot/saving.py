"""Saves and loads the objects of a training in one call: modules, optimizers, schedulers, random states, and others.

`save_snapshot` and `load_snapshot` stand below: here objects become a flat state, and a flat state objects.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.consistency.all_ranks import CollectiveCall, call_on_all_ranks
from scale_core.consistency.contract import Contract
from scale_core.shard import on_local_tensors
from scale_snapshot.background import AsyncSave, background_group, finish_pending
from scale_snapshot.errors import SnapshotError
from scale_snapshot.program_state.objects import Objects, collect
from scale_snapshot.retention import remove_old
from scale_snapshot.snapshot import Snapshot, latest_snapshot, load_snapshot, write_state
from scale_snapshot.staging import copy_to_host


@checked_arguments
@on_local_tensors
def save(
    directory: str | os.PathLike[str],
    step: int,
    objects: Mapping[str, Any],
    *,
    process_group: GroupLike = None,
    keep: int | None = None,
    extra: Any = None,
) -> Path:
    """Saves the objects of a training as `directory/step-<step>`. If it fails, there is no such directory.

    To be called on every rank of the group, with a directory that all of them see.

        >>> import tempfile, torch
        >>> import scale_snapshot
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> folder = tempfile.mkdtemp()
        >>> state = {"model": model, "optimizer": optimizer, "random": scale_snapshot.RandomState()}
        >>> path = scale_snapshot.save(folder, 7, state)
        >>> path.name
        'step-00000007'
        >>> scale_snapshot.load(folder, state).step
        7

    Args:
        directory: Holds all snapshots of a run; it is created where it is missing.
        step: The training step, at least 0. A step that is saved already is not replaced.
        objects: By name, the same on all ranks: modules, sharded and wrapped in any way; optimizers of these modules,
            or lists of them; objects with `state_dict` and `load_state_dict`; `RandomState()`; tensors (the lowest
            rank's), `LocalShard`s and values. `PerRank` and `FromRank0` mark objects that differ between ranks. A
            result of `sharded_state_dict` can be given, too.
        process_group: The ranks that hold the state together; the default group if None.
        keep: How many snapshots stay in the directory, the newest ones, at least 1; None for all.
        extra: Plain Python values of rank 0, without tensors; `load(...).extra` returns them as they were.

    Returns:
        The snapshot's directory.

    Raises:
        ValueError: An optimizer that steps on parameters of no module, or of several; a name that can't be one.
        TypeError: An object, or something in its state, that can't be saved so that it is read back as it was.
        SnapshotError: On every rank: the ranks have different objects, or writing failed. The snapshots that were there
            still are. Also, that an earlier `async_save` has failed.

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    group = group_of(process_group)
    state = collect(objects, Contract(group), lambda: _begin(directory, step, keep))
    return _write(directory, step, lambda: state, group, keep, extra)


@checked_arguments
@on_local_tensors
def async_save(
    directory: str | os.PathLike[str],
    step: int,
    objects: Mapping[str, Any],
    *,
    process_group: GroupLike = None,
    keep: int | None = None,
    extra: Any = None,
) -> AsyncSave:
    """Saves as `save` does, in the background: returns when the state has been copied to host memory.

    To be called on every rank of the group. Later changes are not in the snapshot. The copy needs as much
    memory as the rank holds of the state, which is kept for the next one. A save that is under way already is waited
    for. The first call makes a gloo group for the writing.

        >>> import tempfile, torch
        >>> import scale_snapshot
        >>> model = torch.nn.Linear(2, 1)
        >>> saving = scale_snapshot.async_save(tempfile.mkdtemp(), 7, {"model": model}, keep=2)
        >>> saving.wait().name  # At the end of a training, or where the snapshot is needed.
        'step-00000007'

    A failure is raised on all ranks by `wait()` of the result, by the next save or load, or else by an
    optimizer's step, before anything has changed. A program that ends finishes the save first, and says on
    stderr that it has failed if nothing has raised it.

    Args:
        directory: As for `save`, as are the others.
        step: The training step.
        objects: By name.
        process_group: The ranks that hold the state together.
        keep: How many snapshots stay.
        extra: Plain Python values, as for `save`.

    Raises:
        ValueError: As `save`.
        TypeError: As `save`.
        SnapshotError: The ranks have different objects, or an earlier `async_save` has failed.

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    group = group_of(process_group)
    writers = background_group(group)
    state = collect(objects, Contract(group), lambda: _begin(directory, step, keep))
    failure: Exception | None = None
    staged: Any = None
    try:
        state, staged = copy_to_host(state), copy.deepcopy(extra)
    except Exception as error:  # For example no memory. The other ranks write already, and hear of it there.
        failure = error

    def copied() -> dict[str, Any]:
        if failure is not None:
            raise failure
        return state

    path = Path(directory) / f"step-{step:08d}"
    return AsyncSave(path, lambda: _write(directory, step, copied, writers, keep, staged), writers)


def _write(
    directory: str | os.PathLike[str],
    step: int,
    state: Callable[[], dict[str, Any]],
    group: Group,
    keep: int | None,
    extra: Any,
) -> Path:
    path = write_state(directory, step, state, group, extra)
    if keep is not None and group.rank == 0:
        remove_old(path, keep)
    return path


@checked_arguments
@on_local_tensors
def load(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    step: int | None = None,
    process_group: GroupLike = None,
    strict: bool = True,
    only_given: bool = False,
    cast: bool = False,
) -> Snapshot:
    """Loads the newest complete snapshot of a directory into objects that are built already; optimizers may be fresh.

    To be called on every rank of the group, at any number of them, whatever the wrapping was when it was saved. Names,
    shapes and dtypes are compared before anything is changed. Modules and their optimizers come first, then other
    objects in the order in which they are given.

    Args:
        directory: As given to `save`.
        objects: As given to `save`. Tensors are written to in place.
        step: This snapshot and no other.
        process_group: The ranks that hold the state together; the default group if None.
        strict: With False, load saved values that fit the objects, and warn of the rest, which stays unchanged. An
            optimizer's state of a parameter is loaded if all of it and the parameter fit. The state of a different
            class of optimizer is left out.
        only_given: Whether you may leave out saved objects, for example the optimizer if you only evaluate. The given
            objects must fit, as `strict` says.
        cast: Whether floating-point numbers and integers are converted to the dtypes of the parameters and buffers.

    Returns:
        The snapshot; `state` has the objects by name, and the saved values of those that are values.

    Raises:
        SnapshotError: On every rank: there is no complete snapshot, its objects or its model differ, or an object with
            a state per rank was saved by a different number of ranks. `DamagedSnapshotError` and `NewerSnapshotError`
            are as of `load_snapshot`.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import load, save
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> objects = {"model": model, "optimizer": optimizer}
        >>> path = save(folder, 12, objects, extra={"epoch": 2})
        >>> snapshot = load(folder, objects)  # on any number of ranks
        >>> snapshot.step, snapshot.extra
        (12, {'epoch': 2})

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    group = group_of(process_group)
    call_on_all_ranks(lambda: _begin(directory, 0 if step is None else step, None), "loading objects", Contract(group))
    parts: list[Objects] = []

    def target(saved: Mapping[str, Any]) -> dict[str, Any]:
        parts[:] = [Objects(objects)]  # Again for each snapshot, if one is passed over.
        return parts[0].target(saved, group, strict=strict, only_given=only_given)

    snapshot = load_snapshot(directory, target, group, step=step, strict=strict, cast=cast)
    together = CollectiveCall(group, f"loading {snapshot.path}", SnapshotError)
    loaded = together.each_rank(lambda: parts[0].load(snapshot.state, group, snapshot.left_out))
    return replace(snapshot, state=loaded)


@checked_arguments
def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Returns the newest complete snapshot of a directory, as this rank alone sees it; None if there is none.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import latest, save
        >>> folder = tempfile.mkdtemp()
        >>> latest(folder) is None
        True
        >>> path = save(folder, 7, {"model": torch.nn.Linear(4, 3)})
        >>> latest(folder).name
        'step-00000007'

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    return latest_snapshot(directory)


def _begin(directory: str | os.PathLike[str], step: int, keep: int | None) -> None:
    """Refuses wrong arguments, as far as one rank can see it, and waits for the save that is under way."""
    os.fspath(directory)
    if type(step) is not int or step < 0:
        raise ValueError(f"expected a training step of at least 0, got {step!r}: pass the number of steps done")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"expected keep of at least 1, got {keep!r}: pass how many snapshots stay, or None for all")
    finish_pending()
