"""What a benchmark leaves behind: a table to quote, and the dated figures behind it, with the machine they are from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Table:
    """A table of words."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        lines = [self.heads, ["-" * width for width in widths], *self.rows]
        body = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
        return "\n".join([f"\n{self.title}\n", *body])


def machine() -> dict[str, Any]:
    """Returns what the figures depend on: processor, cores, load, versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def save(name: str, date: str, how: str, tables: Sequence[Table], figures: Sequence[Mapping[str, Any]]) -> None:
    """Writes `results/DATE-NAME.json` and `.md` beside the benchmarks.

    Args:
        name: The benchmark's.
        date: In ISO form.
        how: The benchmark's docstring; what follows its first two paragraphs tells how it measures.
        tables: For people.
        figures: For machines.
    """
    RESULTS.mkdir(exist_ok=True)
    where = machine()
    content = {"benchmark": name, "date": date, "machine": where, "results": list(figures)}
    (RESULTS / f"{date}-{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    title, _, *rest = how.strip().split("\n\n")
    told = ", ".join(f"{key} {value}" for key, value in where.items())
    text = "\n\n".join([f"# {title}", f"{date}: {told}.", *rest, *(table.markdown().strip() for table in tables)])
    (RESULTS / f"{date}-{name}.md").write_text(text + "\n")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
