"""AdaScale beside fixed rules on handwritten digits: accuracy when the batch is 4, 16 and 32 times as large.

    python benchmarks/adascale_digits.py                      # SGD and AdamW; about ten minutes of one core
    python benchmarks/adascale_digits.py --smoke              # one seed, scales 1 and 16
    python benchmarks/adascale_digits.py --not-shifted        # images as they are
    python benchmarks/adascale_digits.py --date 2026-11-22    # also writes results/2026-11-22-adascale_digits.*

A small convolutional network on the 1,797 digits that scikit-learn ships (1,200 to train on, 597 to judge by), learning
rate and schedule chosen for batches of 16 and 1,500 steps: SGD with momentum 0.9, or AdamW, half a cosine. Each image
is shifted at random by up to a pixel, by which the small batch gains half a percent. As they are, 1,200 images are
learnt by heart, and a batch of 512 is nearly half of them.
Larger batches are 16 times the scale, and use the same learning rate and schedule, changed by each rule:

- AdaScale accumulates gradients of 16 samples, or eight of more where the scale is above 8, and trains until its gains
  sum up to 1,500;
- linear and square root multiply the learning rate by the scale or its root, and train for 1,500 / scale steps;
- LEGW is square root after a warm-up, of one epoch for batches of 16, and of as many as the scale for larger ones;
- AdaScale's budget: linear and square root for as many steps as AdaScale took, with the same schedule stretched.

Mean and standard deviation of the accuracy over five seeds, in percent; a run whose loss is no number counts as 10 %.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from report import RESULTS, Table, save
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from scale_adascale import AdaScale, GainScheduler, legw, linear, square_root, until_steps

BATCH, STEPS, TRAIN = 16, 1500, 1200
PASSES = 8  # of a step at most: more of them say more, and take longer
EPOCH = TRAIN // BATCH
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.002, weight_decay=0.01),
}


class Digits(NamedTuple):
    """Images [n, 1, 8, 8] and labels [n]."""

    images: Tensor
    labels: Tensor


class Task(NamedTuple):
    """What to train on, by how many pixels that is shifted at most, and what to judge by."""

    train: Digits
    test: Digits
    shift: int


class Run(NamedTuple):
    """How one training went."""

    optimizer: str
    rule: str
    scale: int
    seed: int
    steps: int
    accuracy: float
    gains: list[tuple[float, float]]  # progress, gain


def load(shift: int) -> Task:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, rest = order[:TRAIN], order[TRAIN:]
    return Task(Digits(images[first], labels[first]), Digits(images[rest], labels[rest]), shift)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Batches:
    """Batches of an epoch in a new order each time, each image shifted by up to so many pixels, without end."""

    def __init__(self, digits: Digits, size: int, seed: int, shift: int) -> None:
        self._labels, self._size = digits.labels, size
        self._generator = torch.Generator().manual_seed(seed)
        padded, places = F.pad(digits.images, [shift] * 4, value=-0.5), range(2 * shift + 1)
        self._shifted = torch.stack([padded[..., y : y + 8, x : x + 8] for y in places for x in places])

    def __iter__(self) -> Iterator[Digits]:
        waiting = torch.zeros(0, dtype=torch.int64)
        while True:
            while len(waiting) < self._size:
                waiting = torch.cat([waiting, torch.randperm(TRAIN, generator=self._generator)])
            now, waiting = waiting[: self._size], waiting[self._size :]
            # Without shifts none is drawn, so that the order is the one that it was before there were any.
            several = len(self._shifted) > 1
            shifts = torch.randint(len(self._shifted), (self._size,), generator=self._generator) if several else 0
            yield Digits(self._shifted[shifts, now], self._labels[now])


def cosine(step: float, steps: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def with_adascale(optimizer: str, scale: int, seed: int, task: Task) -> Run:
    model = build(seed)
    num = min(scale, PASSES)
    ada = AdaScale(OPTIMIZERS[optimizer](model.parameters()), scale=scale, num_gradients_to_accumulate=num)
    schedule = GainScheduler(LambdaLR(ada, lambda step: cosine(step, STEPS)), ada)
    gains, taken = [], 0
    batches = Batches(task.train, BATCH * scale // num, seed, task.shift)
    for passes, batch in enumerate(until_steps(batches, ada, STEPS), start=1):
        (F.cross_entropy(model(batch.images), batch.labels) / num).backward()
        if passes % num == 0:
            ada.step()
            ada.zero_grad()
            schedule.step()
            taken += 1
            gains.append((ada.progress, ada.gain()))
    return Run(optimizer, "AdaScale", scale, seed, taken, judge(model, task.test), gains)


def with_rule(
    optimizer: str,
    rule: str,
    factor: Callable[[float], float],
    scale: int,
    steps: int,
    seed: int,
    task: Task,
) -> Run:
    """Trains with a fixed rule.

    Args:
        optimizer: Which.
        rule: Its name.
        factor: What the learning rate is multiplied by, by epoch.
        scale: Of the batch.
        steps: Of the large batch.
        seed: Of weights and order.
        task: What to learn.
    """
    model = build(seed)
    inner = OPTIMIZERS[optimizer](model.parameters())
    schedule = LambdaLR(inner, lambda step: factor(step * scale / EPOCH) * cosine(step, steps))
    for _, batch in zip(range(steps), Batches(task.train, BATCH * scale, seed, task.shift), strict=False):
        F.cross_entropy(model(batch.images), batch.labels).backward()
        inner.step()
        inner.zero_grad()
        schedule.step()
    return Run(optimizer, rule, scale, seed, steps, judge(model, task.test), [])


@torch.no_grad()
def judge(model: nn.Module, test: Digits) -> float:
    """The accuracy in percent."""
    outputs = model(test.images)
    if not bool(torch.isfinite(outputs).all()):
        return 10.0
    return 100 * float((outputs.argmax(1) == test.labels).float().mean())


def all_runs(optimizer: str, scales: list[int], seeds: list[int], shift: int) -> list[Run]:
    task = load(shift)
    found = []
    for seed in seeds:
        for scale in scales:
            started = time.monotonic()
            if scale == 1:
                found.append(with_rule(optimizer, "base", lambda epoch: 1.0, 1, STEPS, seed, task))
                continue
            ada = with_adascale(optimizer, scale, seed, task)
            short = STEPS // scale
            rules: list[tuple[str, Callable[[float], float], int]] = [
                ("linear", lambda epoch, s=scale: linear(s), short),  # type: ignore[misc]
                ("square root", lambda epoch, s=scale: square_root(s), short),  # type: ignore[misc]
                ("LEGW", lambda epoch, s=scale: legw(s, epoch + s / EPOCH, 1.0), short),  # type: ignore[misc]
                ("linear, AdaScale's steps", lambda epoch, s=scale: linear(s), ada.steps),  # type: ignore[misc]
                ("square root, AdaScale's steps", lambda epoch, s=scale: square_root(s), ada.steps),  # type: ignore[misc]
            ]
            found += [ada, *(with_rule(optimizer, n, f, scale, k, seed, task) for n, f, k in rules)]
            print(f"{optimizer} seed {seed} scale {scale}: {time.monotonic() - started:.0f} s", flush=True)
    return found


def table_of(optimizer: str, runs: list[Run]) -> Table:
    mine = [run for run in runs if run.optimizer == optimizer]
    scales = sorted({run.scale for run in mine})
    rows = []
    for rule in dict.fromkeys(run.rule for run in mine):
        row = [rule]
        for scale in scales:
            these = [run for run in mine if run.rule == rule and run.scale == scale]
            if not these:
                row.append("")
                continue
            accuracy = [run.accuracy for run in these]
            spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
            steps = statistics.mean(run.steps for run in these)
            row.append(f"{statistics.mean(accuracy):.1f} ± {spread:.1f} ({steps:.0f})")
        rows.append(row)
    return Table(
        f"{optimizer}: accuracy in percent, and steps", ["rule", *(f"scale {scale}" for scale in scales)], rows
    )


def plot(runs: list[Run], path: Path) -> None:
    """Accuracy by scale, and the gain over the training, for each optimizer."""
    from matplotlib.figure import Figure

    optimizers = list(dict.fromkeys(run.optimizer for run in runs))
    figure = Figure(figsize=(10, 3.6 * len(optimizers)), layout="constrained")
    axes = figure.subplots(len(optimizers), 2, squeeze=False)
    for row, optimizer in zip(axes, optimizers, strict=True):
        mine = [run for run in runs if run.optimizer == optimizer]
        for rule in dict.fromkeys(run.rule for run in mine if run.rule != "base"):
            points = [(r.scale, r.accuracy) for r in mine if r.rule in (rule, "base")]
            scales = sorted({scale for scale, _ in points})
            means = [statistics.mean(a for s, a in points if s == scale) for scale in scales]
            row[0].plot(scales, means, marker="o", label=rule, linestyle="--" if "steps" in rule else "-")
        row[0].set(
            xscale="log", xticks=scales, xlabel="scale of the batch", ylabel="accuracy, percent", title=optimizer
        )
        row[0].set_xticklabels([str(scale) for scale in scales])
        row[0].set_ylim(bottom=max(5, min(95, *(r.accuracy for r in mine)) - 1))
        for scale in scales[1:]:
            gains = next(r.gains for r in mine if r.rule == "AdaScale" and r.scale == scale)
            row[1].plot(*zip(*gains, strict=True), label=f"scale {scale}")
        row[1].set(yscale="log", xlabel="steps of the small batch", ylabel="gain", title=f"{optimizer}: gain, one seed")
        for each in row:
            each.grid(alpha=0.3)
            each.legend(fontsize=8)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--not-shifted", action="store_true")
    parser.add_argument("--date")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scales, seeds = ([1, 16], [0]) if options.smoke else ([1, 4, 16, 32], [0, 1, 2, 3, 4])
    runs = [run for optimizer in OPTIMIZERS for run in all_runs(optimizer, scales, seeds, int(not options.not_shifted))]
    tables = [table_of(optimizer, runs) for optimizer in OPTIMIZERS]
    for table in tables:
        print(table.markdown())
    if options.date:
        figures = [{**run._asdict(), "gains": [(round(p, 1), round(g, 3)) for p, g in run.gains[::10]]} for run in runs]
        name = "adascale_digits_not_shifted" if options.not_shifted else "adascale_digits"
        save(name, options.date, __doc__ or "", tables, figures)
        picture = RESULTS / f"{options.date}-{name}.svg"
        partial = Path(tempfile.mkdtemp()) / picture.name
        plot(runs, partial)
        os.replace(partial, picture)


if __name__ == "__main__":
    main()
