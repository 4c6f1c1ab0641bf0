"""loss.png: the training in one picture."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from scale_train.metrics import read_metrics


def plot_loss(metrics: Path, picture: Path) -> None:
    """Draws the loss of the training batches and of the held-out text over the steps, both in bits per byte.

    With --adascale the gain, too.

    Args:
        metrics: A `metrics.jsonl`.
        picture: Where the PNG goes; replaced, as a whole, if it is there.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    # Here, because only rank 0 draws, once: every other rank would carry the library for nothing.
    from matplotlib.figure import Figure

    entries = read_metrics(metrics)
    train = [(entry["step"], entry["loss"] / math.log(2)) for entry in entries if "loss" in entry]
    held_out = [
        (entry["step"], entry["held_out_bits_per_byte"]) for entry in entries if "held_out_bits_per_byte" in entry
    ]
    # A figure of its own, not pyplot: that would look for a display.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, points in (("training batches", train), ("held-out text", held_out)):
        if points:
            steps, bits = zip(*points, strict=True)
            axes.plot(steps, bits, label=label, marker="o" if len(points) < 20 else None, markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    if train or held_out:
        axes.legend()
    axes.grid(alpha=0.3)
    gains = [(entry["step"], entry["gain"]) for entry in entries if entry.get("gain") is not None]
    if gains:
        right = axes.twinx()
        right.plot(*zip(*gains, strict=True), color="tab:green", linewidth=1, alpha=0.7)
        right.set_ylabel("gain", color="tab:green")
    partial = picture.with_name(f"{picture.name}.partial")
    try:
        figure.savefig(partial, dpi=120, format="png")
        os.replace(partial, picture)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
