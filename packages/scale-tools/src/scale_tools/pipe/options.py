"""The command line of `scale-train pipe`, as frozen dataclasses; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import subcommand


@dataclass(frozen=True)
class ShowOptions:
    """Draw a schedule: a row for each rank, time from left to right, and the share of it in which ranks wait."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved_1f1b, looped_breadth_first, zb_h1, zb_v, v_half, v_min, dual_pipe_v; or a file that
    Schedule.save has written; or, with --measure, solve."""
    ranks: int = 2
    """Ranks of the pipeline."""
    stages: int | None = None
    """Parts that the model is cut into; by default what the schedule is made for."""
    chunks: int = 8
    """Micro-batches that a batch is cut into."""
    measure: bool = False
    """Run it on so many ranks of this machine, with a small model of equal stages, and draw that below the plan."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What --measure runs on."""
    width: int | None = None
    """Columns of the drawing; by default the columns of the terminal."""
    svg: Path | None = None
    """Draw into this file, too."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ListOptions:
    """List the schedules for a number of ranks and micro-batches: how long ranks wait, and how much each keeps."""

    ranks: int = 4
    """Ranks of the pipeline."""
    chunks: int = 8
    """Micro-batches that a batch is cut into."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class PipeOptions:
    """Draw the schedule of a pipeline, planned and measured, or list the schedules."""

    command: Annotated[ShowOptions, subcommand("show")] | Annotated[ListOptions, subcommand("ls")]
