"""Draws docs/images/first-run.svg: the loss of the quickstart's model on one process, and sharded over two ranks.

    python benchmarks/first_run.py --out runs/first --date 2026-11-27

Both are `scale-train lm` on the sources of Python's standard library, with the same batches. A run that is there in
`--out` already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import report
from matplotlib.figure import Figure

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "first-run.svg"
RUNS = {
    "plain PyTorch, one process": ["--ranks", "1", "--parallel", "none"],
    "scale-fsdp, two ranks": ["--ranks", "2", "--parallel", "fsdp"],
}


def losses_of(folder: Path) -> dict[int, float]:
    """Returns the bits per byte by the step, of what a run has logged."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {entry["step"]: entry["loss"] / math.log(2) for entry in entries if "loss" in entry}


def draw(curves: dict[str, dict[int, float]]) -> Figure:
    """Returns the picture of the curves: a line for the first, marks for the other."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for (label, losses), style in zip(curves.items(), ("-", "o"), strict=True):
        axes.plot(*zip(*losses.items(), strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs; a temporary one without it")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--date", help="save the results under this date, and draw the picture")
    parser.add_argument("--smoke", action="store_true", help="two steps, nothing is written")
    arguments = parser.parse_args()
    steps = 2 if arguments.smoke else arguments.steps
    with tempfile.TemporaryDirectory() as temporary:
        home, curves = arguments.out or Path(temporary), {}
        for number, (label, options) in enumerate(RUNS.items()):
            folder = home / str(number)
            if not (folder / "metrics.jsonl").exists():
                common = ["--device", "cpu", "--steps", str(steps), "--batch", "8", "--log-every", str(min(10, steps))]
                command = [sys.executable, "-m", "scale_train", "lm", *options, *common, "--out", str(folder)]
                subprocess.run(command, check=True)
            curves[label] = losses_of(folder)
    rows = [[str(step), *(f"{losses[step]:.6f}" for losses in curves.values())] for step in next(iter(curves.values()))]
    table = report.Table("Bits per byte of the training batches", ["step", *curves], rows)
    print(table.markdown())
    if arguments.date and not arguments.smoke:
        report.save("first_run", arguments.date, __doc__ or "", [table], [{"curves": curves}])
        draw(curves).savefig(PICTURE, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
