"""Checkpoints of which each rank writes its shard: a snapshot of scale-core in the folder that Lightning names.

Modules and optimizers are saved by names, so that they load at another number of ranks and under another strategy. The
rest of what Lightning saves, such as loops and callbacks, is one object of rank 0, as `torch.save` writes it.
"""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

import scale_snapshot
from scale_core import group_of
from scale_core.comm.collectives import exchange_text

StateDictType = Literal["full", "sharded"]


class Remainder:
    """What is neither a module nor an optimizer, as an object that a snapshot can save."""

    def __init__(self, value: Any = None, *, weights_only: bool | None = None) -> None:
        self.value, self._weights_only = value, weights_only

    def state_dict(self) -> dict[str, str]:
        file = io.BytesIO()
        torch.save(self.value, file)
        return {"torch_save": base64.b64encode(file.getvalue()).decode()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        file = io.BytesIO(base64.b64decode(state["torch_save"]))
        self.value = torch.load(file, map_location="cpu", weights_only=self._weights_only)


def check_state_dict_type(given: str) -> None:
    """Refuses another kind of checkpoint than the two."""
    if given not in ("full", "sharded"):
        raise ValueError(
            f'state_dict_type: expected "full", one file of full tensors that rank 0 writes, or "sharded", a folder '
            f"into which each rank writes its shard, got {given!r}"
        )


def save_sharded(path: Path, step: int, objects: Mapping[str, Any], remainder: Any) -> None:
    """Saves modules and optimizers by name, and rank 0's remainder, as the only snapshot in a folder.

    All ranks call it together. What was saved there before stays until the new one is whole, unless it is of the same
    step.
    """
    group = group_of(None)
    if group.rank == 0:
        if path.is_file():
            path.unlink()
        shutil.rmtree(path / f"step-{step:08d}", ignore_errors=True)
    exchange_text("", group)
    everything = {**objects, "lightning": scale_snapshot.FromRank0(Remainder(remainder))}
    scale_snapshot.save(path, step, everything, keep=1)


def load_sharded(path: Path, objects: Mapping[str, Any], *, weights_only: bool | None, strict: bool = True) -> Any:
    """Loads modules and optimizers from a folder that `save_sharded` has written; returns the remainder.

    All ranks call it together, at any number of them. What was saved and is not given stays on disk, as the optimizers
    where a model is only tested.

    Raises:
        SnapshotError: There is no complete snapshot; or, with `strict`, something that is given was not saved or does
            not fit. Nothing has been loaded then.
    """
    remainder = Remainder(weights_only=weights_only)
    content = {**objects, "lightning": scale_snapshot.FromRank0(remainder)}
    scale_snapshot.load(path, content, strict=strict, only_given=True)
    return remainder.value
