"""The command line of `scale-train why`; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class WhyOptions:
    """Say in one sentence why a run on several ranks ended: which rank ended first, how, and where others waited."""

    logs: Positional[tuple[Path, ...]]
    """Logs of the ranks, torchrun's --log-dir, or the folder of SCALE_FLIGHT_RECORDS."""
    json: bool = False
    """Print one JSON object."""
