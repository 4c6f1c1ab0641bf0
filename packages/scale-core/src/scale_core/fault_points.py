"""Named points in the code of all packages, at which `scale_core.testing.faults` makes a rank fail on purpose.

A point is one line, which costs a comparison with None while no fault is switched on:

    if fault_points.active is not None:
        fault_points.active("all_gather", "")

The second argument says more of it where a fault may want to choose, such as the micro-batch of a message.
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
    "all_reduce": "before an all-reduce: sums of divided layers, norms of gradients",
    "broadcast": "before a broadcast",
    "all_to_all": "before an all-to-all: attention of context parallel ranks",
    "exchange": "before ranks compare what they do",
    "pipe.send": "before a stage of a pipeline sends; the detail is the slot and its micro-batch",
    "pipe.receive": "before a stage of a pipeline waits for a message; the detail is the slot and its micro-batch",
    "optimizer.step": "after gradients were reduced, before the outermost optimizer steps",
    "optimizer.stepped": "after the outermost optimizer has stepped",
    "snapshot.room": "rank 0 has made the temporary directory of a snapshot",
    "snapshot.tensor": "before each tensor that a rank writes into a snapshot",
    "snapshot.written": "a rank's file of a snapshot is on the disk",
    "snapshot.manifest": "the manifest is written, the directory not yet renamed",
    "snapshot.renamed": "the snapshot is there",
    "snapshot.removed": "an older snapshot that is not kept has been renamed, and is about to be removed",
    "data": "before scale-train reads a batch",
    "teardown": "training is over, before the process group is destroyed",
}
"""What each point is. Those of a program's own begin with "user.", see `scale_core.testing.faults.reach`."""

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
