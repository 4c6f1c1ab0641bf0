"""Snapshots: the state of a training on disk, complete or absent, verified, loaded at any number of ranks.

Begin with `saving`, the functions for users; below it `program_state/` makes a flat state of objects, and `snapshot`
writes that. `format/` has the files: their content, their writers, and their verification. `pretrained/` reads and
writes folders of Hugging Face, `convert/` checkpoints of other programs.
"""

import importlib
import logging
import typing

from scale_snapshot.errors import DamagedSnapshotError, ForeignCheckpointError, NewerSnapshotError, SnapshotError

if typing.TYPE_CHECKING:
    from scale_snapshot.background import AsyncSave
    from scale_snapshot.convert.converter import ConversionReport, convert_checkpoint, open_checkpoint
    from scale_snapshot.format.verification import verify_snapshot
    from scale_snapshot.pretrained.loading import load_pretrained
    from scale_snapshot.pretrained.saving import save_pretrained
    from scale_snapshot.program_state.rng_state import RandomState
    from scale_snapshot.program_state.stateful import FromRank0, PerRank
    from scale_snapshot.saving import async_save, latest, load, save
    from scale_snapshot.snapshot import Snapshot, latest_snapshot, load_snapshot, save_snapshot

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "AsyncSave",
    "ConversionReport",
    "DamagedSnapshotError",
    "ForeignCheckpointError",
    "FromRank0",
    "NewerSnapshotError",
    "PerRank",
    "RandomState",
    "Snapshot",
    "SnapshotError",
    "async_save",
    "convert_checkpoint",
    "latest",
    "latest_snapshot",
    "load",
    "load_pretrained",
    "load_snapshot",
    "open_checkpoint",
    "save",
    "save_pretrained",
    "save_snapshot",
    "verify_snapshot",
]

# Imported on first use, because they import torch's checkpoint package, which takes a second.
_MODULES = {
    "AsyncSave": "background",
    "ConversionReport": "convert.converter",
    "FromRank0": "program_state.stateful",
    "PerRank": "program_state.stateful",
    "RandomState": "program_state.rng_state",
    "Snapshot": "snapshot",
    "async_save": "saving",
    "convert_checkpoint": "convert.converter",
    "latest": "saving",
    "latest_snapshot": "snapshot",
    "load": "saving",
    "load_pretrained": "pretrained.loading",
    "load_snapshot": "snapshot",
    "open_checkpoint": "convert.converter",
    "save": "saving",
    "save_pretrained": "pretrained.saving",
    "save_snapshot": "snapshot",
    "verify_snapshot": "format.verification",
}


def __getattr__(name: str) -> typing.Any:
    """Imports a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    value.__module__ = __name__  # Tracebacks and documentation show the path that people write.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _name in set(__all__) - set(_MODULES):
    globals()[_name].__module__ = __name__
del _name
