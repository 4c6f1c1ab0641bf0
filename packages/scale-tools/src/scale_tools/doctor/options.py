"""The command line of `scale-train doctor`; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DoctorOptions:
    """Say whether training on several ranks works here: versions, devices, a step on two ranks, memory and links.

    Under torchrun it tests the ranks that were started, on all machines; else it starts two.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the ranks compute on; auto is cuda where there are two GPUs or more."""
    limit_seconds: float = 10.0
    """The longest wait for a rank; the whole test of ranks that it starts may take half as long again."""
    json: bool = False
    """Print one JSON object."""
