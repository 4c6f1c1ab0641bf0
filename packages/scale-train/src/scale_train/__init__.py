"""The training program of scale: every technique behind one command, and behind `train(Options(...))`."""

import importlib
import logging
import typing

if typing.TYPE_CHECKING:
    from scale_train.lm import train
    from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
    from scale_train.training.reports.reporters import initialization_bar, loading_bar
    from scale_train.training.train import RunSummary

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "DataOptions",
    "ModelOptions",
    "OptimizerOptions",
    "Options",
    "ParallelOptions",
    "RunOptions",
    "RunSummary",
    "initialization_bar",
    "loading_bar",
    "train",
]

_MODULES = {
    "RunSummary": "scale_train.training.train",
    "initialization_bar": "scale_train.training.reports.reporters",
    "loading_bar": "scale_train.training.reports.reporters",
    "train": "scale_train.lm",
}


def __getattr__(name: str) -> typing.Any:
    """Loads public names at first use: torch takes a while, and the command may be stopped meanwhile."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES.get(name, "scale_train.options")), name)
    value.__module__ = __name__  # Tracebacks and documentation show the path by which people import.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
