"""Named points in the code of all packages, at which `scale_core.testing.faults` makes a rank fail on purpose.

A point is one line, which costs a comparison with None while no fault is switched on:

    if fault_points.active is not None:
        fault_points.active("all_gather", "")

The second argument says more of it where a fault may want to choose, for example the micro-batch of a message.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

VARIABLE = "SCALE_FAULTS"
"""The environment variable that switches faults on in programs that somebody else starts."""

POINTS = {
    "all_gather": "before an all-gather: parameters of `fully_shard` in forward and backward, of OSS after its step",
    "reduce_scatter": "before a reduce-scatter: gradients of `fully_shard` and `ShardedDataParallel`, in backward",
    "all_reduce": "before an all-reduce: outputs of tensor parallel layers, gradient norms",
    "broadcast": "before a broadcast",
    "all_to_all": "before an all-to-all: attention of context parallel ranks",
    "exchange": "before ranks compare their collectives",
    "pipe.send": "before a pipeline stage sends; `detail` is the slot and micro-batch",
    "pipe.receive": "before a pipeline stage waits for a message; `detail` is the slot and micro-batch",
    "optimizer.step": "after gradients are reduced, before the outermost optimizer steps",
    "optimizer.stepped": "after the outermost optimizer has stepped",
    "snapshot.room": "after rank 0 has made the snapshot's temporary directory",
    "snapshot.tensor": "before each tensor that a rank writes",
    "snapshot.written": "after a rank's file is on disk",
    "snapshot.manifest": "after the manifest is written, before the directory is renamed",
    "snapshot.renamed": "after the rename: the snapshot is complete",
    "snapshot.removed": "before an older snapshot, already renamed, is deleted",
    "data": "before scale-train reads a batch",
    "teardown": "after training, before the process group is destroyed",
}
"""What each point is. A program's own points begin with "user.", see `scale_core.testing.faults.reach`."""

active: Callable[[str, str], None] | None = None
"""Called with each point that is reached, and its detail; None while no fault is switched on."""


def read_environment() -> None:
    """Switches on the faults of `SCALE_FAULTS`, if it is set, at the first point that is reached."""
    global active
    active = _first_point if VARIABLE in os.environ else None


def _first_point(point: str, detail: str) -> None:
    importlib.import_module(
        "scale_core.testing.faults"
    ).inject_from_environment()  # It stands above all that has points.
    if active is not None:
        active(point, detail)


read_environment()
