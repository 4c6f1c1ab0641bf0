"""A bar for a model that is built on the meta device and given values unit by unit.

Thirteen billion parameters take minutes until the first step. What passes meanwhile is units: each one is given memory
and values, is sharded and freed, and the bar moves on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Told = Callable[[int, int, str], None]
"""Called after each unit with the number of units done, that of all, and the unit's name."""


@contextmanager
def initialisation_bar(*, shown: bool = True, console: Console | None = None) -> Iterator[Told]:
    """Shows how far the units of a model have come; gives what `fully_shard_modules` takes as `progress`.

        with torch.device("meta"):
            model = GPT(config)
        with initialisation_bar(shown=rank == 0) as progress:
            fully_shard_modules(model, class_policy(Block), progress=progress)

    Args:
        shown: Whether this rank shows anything; one of them is enough.
        console: Where; None is standard error, so that what a program prints stays its own. Where that is no terminal,
            one line stands there in the end.
    """
    if not shown:
        yield lambda done, total, name: None
        return
    bar = Progress(
        TextColumn("initialising"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console or Console(stderr=True, highlight=False),
    )
    task = bar.add_task("", total=None)

    def tell(done: int, total: int, name: str) -> None:
        bar.update(task, completed=done, total=total, description=name or "the rest")

    with bar:
        yield tell
