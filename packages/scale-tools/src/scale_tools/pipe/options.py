"""The command line of `scale-train pipe`, as frozen dataclasses; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import subcommand


@dataclass(frozen=True)
class ShowOptions:
    """Draw a schedule: one row per rank, time from left to right, and the share of time in which ranks wait."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved_1f1b, looped_breadth_first, zb_h1, zb_v, v_half, v_min, dual_pipe_v; solve
    with --measure; or a file that Schedule.save has written."""
    ranks: int = 2
    """Ranks of the pipeline."""
    stages: int | None = None
    """Number of stages; by default the schedule's number for these ranks."""
    chunks: int = 8
    """Number of micro-batches."""
    measure: bool = False
    """Also run it on this machine, with a small model of equal stages, and draw the result below the plan."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that --measure runs on."""
    width: int | None = None
    """Columns of the drawing; by default the width of the terminal."""
    svg: Path | None = None
    """Also draw into this file."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ListOptions:
    """List the schedules for a number of ranks and micro-batches: how long ranks wait, and the live micro-batches."""

    ranks: int = 4
    """Ranks of the pipeline."""
    chunks: int = 8
    """Number of micro-batches."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class PipeOptions:
    """Draw the schedule of a pipeline, planned and measured, or list the schedules."""

    command: Annotated[ShowOptions, subcommand("show")] | Annotated[ListOptions, subcommand("ls")]
