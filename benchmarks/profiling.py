"""Where a rank's time goes, twice: by Python function, and by the operations below them.

The two are taken in separate runs, because each slows down what the other one measures.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def profile_steps(step: Callable[[], None], steps: int, lines: int = 35) -> str:
    """Returns two tables over `steps` steps: Python functions by their own time, and operations by theirs."""
    functions = cProfile.Profile()
    functions.enable()
    for _ in range(steps):
        step()
    functions.disable()
    text = io.StringIO()
    pstats.Stats(functions, stream=text).sort_stats("tottime").print_stats(lines)
    with profile(activities=[ProfilerActivity.CPU]) as operations:
        for _ in range(steps):
            step()
    table = operations.key_averages().table(sort_by="self_cpu_time_total", row_limit=lines, max_name_column_width=60)
    return f"{text.getvalue()}\n{table}"
