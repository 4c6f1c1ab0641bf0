"""`make_graph`: refused, with what to write."""

from __future__ import annotations

from typing import Any, NoReturn

from fairscale._warnings import refuse

__all__ = ["make_graph"]


def make_graph(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses: FairScale traced a model into a `PipelineModulesGraph`."""
    refuse(
        "make_graph",
        "a graph of modules in other processes has no counterpart",
        'stages = scale_pipe.split(model, ["blocks.4"]), which traces nothing and runs the model\'s own forward',
    )
