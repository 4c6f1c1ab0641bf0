"""FairScale's pipeline in one process over several devices, by `scale_pipe.Pipe`. Begin with `pipe`.

`AsyncPipe` and `PipeRPCWrapper`, which ran on several processes, raise errors that say what to write instead.
"""

from fairscale.nn.pipe.async_pipe import AsyncPipe
from fairscale.nn.pipe.checkpoint import is_checkpointing, is_recomputing
from fairscale.nn.pipe.pipe import Pipe
from fairscale.nn.pipe.rpc import PipeRPCWrapper
from fairscale.nn.pipe.types import LazyModule

__all__ = ["AsyncPipe", "LazyModule", "Pipe", "PipeRPCWrapper", "is_checkpointing", "is_recomputing"]
