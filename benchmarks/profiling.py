"""Where a rank's time goes, twice: by Python function, and by the operations below them.

The two are taken in separate runs, because each slows down what the other one measures.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def profile_steps(step: Callable[[], None], steps: int, lines: int = 30) -> str:
    """Returns what `steps` steps took of each clock, and three tables over as many steps each.

    The tables: Python functions by the CPU time of this thread, the same by wall time (what stands here and not above
    was waiting), and operations by their own wall time.
    """
    wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(steps):
        step()
    wall, thread, process = time.perf_counter() - wall, time.thread_time() - thread, time.process_time() - process
    clocks = (
        f"per step: wall {wall / steps * 1e3:.0f} ms, CPU of this thread {thread / steps * 1e3:.0f} ms, "
        f"CPU of the other threads {(process - thread) / steps * 1e3:.0f} ms"
    )
    by_cpu = _functions(step, steps, time.thread_time, lines)
    by_wall = _functions(step, steps, time.perf_counter, lines // 3)
    with profile(activities=[ProfilerActivity.CPU]) as operations:
        for _ in range(steps):
            step()
    table = operations.key_averages().table(sort_by="self_cpu_time_total", row_limit=lines, max_name_column_width=60)
    return "\n".join([clocks, "CPU time of this thread:", by_cpu, "Wall time:", by_wall, table])


def _functions(step: Callable[[], None], steps: int, clock: Callable[[], float], lines: int) -> str:
    found = cProfile.Profile(clock)
    found.enable()
    for _ in range(steps):
        step()
    found.disable()
    text = io.StringIO()
    pstats.Stats(found, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()
