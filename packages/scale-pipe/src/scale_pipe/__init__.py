"""Pipeline parallelism for PyTorch: schedules that are computed, checked and seen.

On top stands what programs train with. `schedules/` has the schedules as functions (`classic`, `zero_bubble`), their
checks (`validate`), simulation and drawings (`visualize`); a pipeline takes most of them by name.
"""

import importlib
import logging
import typing

from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.schedule import Schedule

if typing.TYPE_CHECKING:
    from scale_pipe.batch_norm import DeferredBatchNorm
    from scale_pipe.distributed.errors import StageError
    from scale_pipe.distributed.options import PipelineOptions
    from scale_pipe.distributed.pipe import DistributedPipe
    from scale_pipe.microbatch import NoChunk
    from scale_pipe.module_split.replay import SplitError
    from scale_pipe.module_split.split import shared_parameters, split
    from scale_pipe.one_process.pipe import Pipe
    from scale_pipe.partition.balance import balance_by_size, balance_by_time
    from scale_pipe.partition.profile import profile_stages
    from scale_pipe.schedules.simulation import simulate
    from scale_pipe.schedules.solver.solver import solve
    from scale_pipe.skip.layout import verify_skippables
    from scale_pipe.skip.namespace import Namespace, pop, stash
    from scale_pipe.skip.skippable import skippable

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "Costs",
    "DeferredBatchNorm",
    "DistributedPipe",
    "Namespace",
    "NoChunk",
    "Pipe",
    "PipelineOptions",
    "Schedule",
    "SplitError",
    "StageError",
    "balance_by_size",
    "balance_by_time",
    "pop",
    "profile_stages",
    "shared_parameters",
    "simulate",
    "skippable",
    "solve",
    "split",
    "stash",
    "verify_skippables",
]

# Modules that run models need torch, which takes a while to load; schedules are computed without it. Steps load no
# solver.
_LOADED_WHEN_ASKED_FOR = {
    "scale_pipe.batch_norm": ("DeferredBatchNorm",),
    "scale_pipe.distributed.errors": ("StageError",),
    "scale_pipe.distributed.options": ("PipelineOptions",),
    "scale_pipe.distributed.pipe": ("DistributedPipe",),
    "scale_pipe.microbatch": ("NoChunk",),
    "scale_pipe.module_split.replay": ("SplitError",),
    "scale_pipe.module_split.split": ("shared_parameters", "split"),
    "scale_pipe.one_process.pipe": ("Pipe",),
    "scale_pipe.partition.balance": ("balance_by_size", "balance_by_time"),
    "scale_pipe.partition.profile": ("profile_stages",),
    "scale_pipe.schedules.simulation": ("simulate",),
    "scale_pipe.schedules.solver.solver": ("solve",),
    "scale_pipe.skip.layout": ("verify_skippables",),
    "scale_pipe.skip.namespace": ("Namespace", "pop", "stash"),
    "scale_pipe.skip.skippable": ("skippable",),
}
_MODULES = {name: module for module, names in _LOADED_WHEN_ASKED_FOR.items() for name in names}


def __getattr__(name: str) -> typing.Any:
    """Loads the modules that run models at first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    value.__module__ = __name__  # Tracebacks and documentation show the path that people write.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _name in set(__all__) - set(_MODULES):
    globals()[_name].__module__ = __name__
del _name
