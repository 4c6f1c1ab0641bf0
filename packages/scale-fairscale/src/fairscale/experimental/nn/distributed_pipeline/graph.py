"""`PipelineModulesGraph`: refused, with what to write."""

from __future__ import annotations

from fairscale._warnings import Refused

__all__ = ["PipelineModulesGraph"]


class PipelineModulesGraph(Refused):
    """FairScale's graph of remote modules."""

    why = "its nodes are modules in other processes, reached over torch's RPC, which is deprecated"
    instead = (
        'one model of which each rank keeps its stages: stages = scale_pipe.split(model, ["blocks.4"]), where an '
        "output may go to any later stage"
    )
