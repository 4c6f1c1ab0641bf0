"""Pipeline parallelism for PyTorch: schedules that are computed, checked and seen."""

import importlib
import typing

from scale_pipe.schedules.action import Action, Kind
from scale_pipe.schedules.bounds import Bound, RankBound, lower_bound
from scale_pipe.schedules.classic import gpipe, interleaved_1f1b, looped_breadth_first, one_forward_one_backward
from scale_pipe.schedules.costs import Costs
from scale_pipe.schedules.drawing import draw, save_drawing
from scale_pipe.schedules.dual_pipe import dual_pipe_v
from scale_pipe.schedules.errors import DeadlockError, MemoryCapError, ScheduleError
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import Simulation, Span, simulate
from scale_pipe.schedules.solution import Solution
from scale_pipe.schedules.solver import solve
from scale_pipe.schedules.trace import chrome_trace, save_chrome_trace
from scale_pipe.schedules.validation import validate
from scale_pipe.schedules.weave import weave
from scale_pipe.schedules.zero_bubble import v_half, v_min, zb_h1, zb_v

if typing.TYPE_CHECKING:
    from scale_pipe.distributed.failure import StageError
    from scale_pipe.distributed.pipe import DistributedPipe
    from scale_pipe.micro_batches import NoChunk
    from scale_pipe.models.absent import AbsentTensorError
    from scale_pipe.models.balance import balance_by_makespan, balance_by_size, balance_by_time
    from scale_pipe.models.deferred_batch_norm import DeferredBatchNorm
    from scale_pipe.models.profiling import profile_stages
    from scale_pipe.models.replay import SplitError
    from scale_pipe.models.skip import skippable
    from scale_pipe.models.skip_layout import verify_skippables
    from scale_pipe.models.skip_words import Namespace, pop, stash
    from scale_pipe.models.split import shared_parameters, split
    from scale_pipe.one_process.pipe import Pipe

__version__ = "2026.11.0"
__all__ = [
    "AbsentTensorError",
    "Action",
    "Bound",
    "Costs",
    "DeadlockError",
    "DeferredBatchNorm",
    "DistributedPipe",
    "Kind",
    "MemoryCapError",
    "Namespace",
    "NoChunk",
    "Pipe",
    "Placement",
    "RankBound",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Solution",
    "Span",
    "SplitError",
    "StageError",
    "balance_by_makespan",
    "balance_by_size",
    "balance_by_time",
    "chrome_trace",
    "draw",
    "dual_pipe_v",
    "gpipe",
    "interleaved_1f1b",
    "looped_breadth_first",
    "lower_bound",
    "one_forward_one_backward",
    "pop",
    "profile_stages",
    "save_chrome_trace",
    "save_drawing",
    "shared_parameters",
    "simulate",
    "skippable",
    "solve",
    "split",
    "stash",
    "v_half",
    "v_min",
    "validate",
    "verify_skippables",
    "weave",
    "zb_h1",
    "zb_v",
]

# What runs models needs torch, which takes a while to load; schedules are computed without it.
_LOADED_WHEN_ASKED_FOR = {
    "AbsentTensorError": "scale_pipe.models.absent",
    "DeferredBatchNorm": "scale_pipe.models.deferred_batch_norm",
    "DistributedPipe": "scale_pipe.distributed.pipe",
    "Namespace": "scale_pipe.models.skip_words",
    "NoChunk": "scale_pipe.micro_batches",
    "Pipe": "scale_pipe.one_process.pipe",
    "SplitError": "scale_pipe.models.replay",
    "StageError": "scale_pipe.distributed.failure",
    "balance_by_makespan": "scale_pipe.models.balance",
    "balance_by_size": "scale_pipe.models.balance",
    "balance_by_time": "scale_pipe.models.balance",
    "pop": "scale_pipe.models.skip_words",
    "profile_stages": "scale_pipe.models.profiling",
    "shared_parameters": "scale_pipe.models.split",
    "skippable": "scale_pipe.models.skip",
    "split": "scale_pipe.models.split",
    "stash": "scale_pipe.models.skip_words",
    "verify_skippables": "scale_pipe.models.skip_layout",
}


def __getattr__(name: str) -> typing.Any:
    """Loads what runs models when it is asked for."""
    if name not in _LOADED_WHEN_ASKED_FOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LOADED_WHEN_ASKED_FOR[name]), name)
    value.__module__ = __name__  # Tracebacks and documentation show the path that people write.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _name in set(__all__) - set(_LOADED_WHEN_ASKED_FOR):
    globals()[_name].__module__ = __name__
del _name
