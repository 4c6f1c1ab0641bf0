"""FairScale's pipeline over torch's RPC: its names import, and refuse with what to write. Begin with `pipeline`."""

from fairscale.experimental.nn.distributed_pipeline.graph import PipelineModulesGraph
from fairscale.experimental.nn.distributed_pipeline.loss import DistributedLoss
from fairscale.experimental.nn.distributed_pipeline.pipeline import DistributedPipeline

__all__ = ["DistributedLoss", "DistributedPipeline", "PipelineModulesGraph"]
