"""Snapshots: the state of a training on disk, complete or absent, verified, loaded at any number of ranks.

Begin with `saving`, the functions for users; below it `program_state/` makes a flat state of objects, and `snapshot`
writes that. `format/` has the files: their content, their writers, and their verification. `pretrained/` reads and
writes folders of Hugging Face, `convert/` checkpoints of other programs.
"""

import logging
import typing

from scale_core.lazy_names import lazy_names as _lazy_names
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
    "AsyncSave": "scale_snapshot.background",
    "ConversionReport": "scale_snapshot.convert.converter",
    "FromRank0": "scale_snapshot.program_state.stateful",
    "PerRank": "scale_snapshot.program_state.stateful",
    "RandomState": "scale_snapshot.program_state.rng_state",
    "Snapshot": "scale_snapshot.snapshot",
    "async_save": "scale_snapshot.saving",
    "convert_checkpoint": "scale_snapshot.convert.converter",
    "latest": "scale_snapshot.saving",
    "latest_snapshot": "scale_snapshot.snapshot",
    "load": "scale_snapshot.saving",
    "load_pretrained": "scale_snapshot.pretrained.loading",
    "load_snapshot": "scale_snapshot.snapshot",
    "open_checkpoint": "scale_snapshot.convert.converter",
    "save": "scale_snapshot.saving",
    "save_pretrained": "scale_snapshot.pretrained.saving",
    "save_snapshot": "scale_snapshot.snapshot",
    "verify_snapshot": "scale_snapshot.format.verification",
}

__getattr__, __dir__ = _lazy_names(__name__, _MODULES)
