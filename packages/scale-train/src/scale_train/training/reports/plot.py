"""`loss.png`: loss, gain and noise scale over the steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_train.training.reports.reporters import read_metrics, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_loss(metrics: Path, picture: Path) -> None:
    """Draws the loss of the training batches and of the held-out text over the steps, both in bits per byte.

    With --adascale the gain, too, and below it the noise scale with its interval and the suggested batch.
    """
    figure = draw(read_metrics(metrics))
    with replacing(picture) as partial:
        figure.savefig(partial, dpi=120, format="png")


def draw(entries: list[dict[str, Any]]) -> Figure:
    """Returns the picture of the entries of a `metrics.jsonl`."""
    # Here, because only rank 0 draws, once: every other rank would carry the library for nothing.
    from matplotlib.figure import Figure

    train = [(entry["step"], entry["loss"] / math.log(2)) for entry in entries if "loss" in entry]
    held_out = [
        (entry["step"], entry["held_out_bits_per_byte"]) for entry in entries if "held_out_bits_per_byte" in entry
    ]
    noise = [entry for entry in entries if entry.get("noise_scale") is not None]
    # A figure of its own, not pyplot: that would look for a display.
    figure = Figure(figsize=(7, 7 if noise else 4), layout="constrained")
    axes, *below = figure.subplots(2 if noise else 1, 1, sharex=True, squeeze=False)[:, 0]
    for label, points in (("training batches", train), ("held-out text", held_out)):
        if points:
            steps, bits = zip(*points, strict=True)
            axes.plot(steps, bits, label=label, marker="o" if len(points) < 20 else None, markersize=3)
    (below or [axes])[-1].set_xlabel("step")
    axes.set_ylabel("bits per byte")
    if train or held_out:
        axes.legend()
    axes.grid(alpha=0.3)
    gains = [(entry["step"], entry["gain"]) for entry in entries if entry.get("gain") is not None]
    if gains:
        right = axes.twinx()
        right.plot(*zip(*gains, strict=True), color="tab:green", linewidth=1, alpha=0.7)
        right.set_ylabel("gain", color="tab:green")
    if noise:
        _plot_noise(below[0], noise)
    return figure


def _plot_noise(axes: Axes, entries: list[dict[str, Any]]) -> None:
    """Draws the noise scale, its interval where that has an upper end, and suggested batches."""
    points = [(entry["step"], entry["noise_scale"]) for entry in entries]
    axes.plot(*zip(*points, strict=True), color="tab:purple", label="noise scale, the critical batch")
    sure = [
        (entry["step"], entry["noise_scale_low"], entry["noise_scale_high"])
        for entry in entries
        if entry.get("noise_scale_high") is not None
    ]
    if sure:
        steps, low, high = zip(*sure, strict=True)
        axes.fill_between(steps, low, high, color="tab:purple", alpha=0.2, linewidth=0, label="95 %")
    suggested = [(entry["step"], entry["suggested_batch"]) for entry in entries if entry.get("suggested_batch")]
    if suggested:
        axes.plot(*zip(*suggested, strict=True), color="tab:orange", drawstyle="steps-post", label="suggested batch")
    axes.set_yscale("log")
    axes.set_ylabel("sequences")
    axes.grid(alpha=0.3)
    axes.legend()
