"""Pipeline parallelism for PyTorch: schedules that are computed, checked and seen."""

from scale_pipe.action import Action, Kind
from scale_pipe.bounds import Bound, RankBound, lower_bound
from scale_pipe.classic import gpipe, interleaved_1f1b, looped_breadth_first, one_forward_one_backward
from scale_pipe.costs import Costs
from scale_pipe.drawing import draw, save_drawing
from scale_pipe.dual_pipe import dual_pipe_v
from scale_pipe.errors import DeadlockError, MemoryCapError, ScheduleError
from scale_pipe.placement import Placement
from scale_pipe.schedule import Schedule
from scale_pipe.simulation import Simulation, Span, simulate
from scale_pipe.solver import Solution, solve
from scale_pipe.trace import chrome_trace, save_chrome_trace
from scale_pipe.validation import validate
from scale_pipe.weave import weave
from scale_pipe.zero_bubble import v_half, v_min, zb_h1, zb_v

__version__ = "2026.11.0"
__all__ = [
    "Action",
    "Bound",
    "Costs",
    "DeadlockError",
    "Kind",
    "MemoryCapError",
    "Placement",
    "RankBound",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Solution",
    "Span",
    "chrome_trace",
    "draw",
    "dual_pipe_v",
    "gpipe",
    "interleaved_1f1b",
    "looped_breadth_first",
    "lower_bound",
    "one_forward_one_backward",
    "save_chrome_trace",
    "save_drawing",
    "simulate",
    "solve",
    "v_half",
    "v_min",
    "validate",
    "weave",
    "zb_h1",
    "zb_v",
]

for _name in __all__:  # tracebacks and documentation show the path that people write
    globals()[_name].__module__ = __name__
del _name
