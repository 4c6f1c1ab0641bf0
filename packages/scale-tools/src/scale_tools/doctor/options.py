"""The command line of `scale-train doctor`; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DoctorOptions:
    """Test if training on several ranks works here: versions, devices, a step on two ranks, memory and links.

    Under torchrun it tests the ranks that torchrun started, on all machines. Otherwise it starts two ranks.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto is cuda if there are two GPUs or more, otherwise cpu."""
    limit_seconds: float = 10.0
    """The longest wait for a rank. The test of all ranks may take 1.5 times this."""
    json: bool = False
    """Print one JSON object."""
