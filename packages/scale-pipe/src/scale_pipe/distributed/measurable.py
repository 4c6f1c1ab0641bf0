"""Whether somebody who measures gradients before they are averaged, as AdaScale does, gets right numbers in a pipeline.

Such a one takes each backward pass for one sample, and the end of the last for the moment when gradients are averaged.
That holds on a rank with one stage, whose backward is one pass and whose wrapper averages within it. Elsewhere numbers
would be wrong without a word, so such a step is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.backward import local_grads_wanted
from scale_pipe.distributed.stage import Stage


def check_measurable(stages: Mapping[int, nn.Module], runners: Mapping[int, Stage], *, splits: bool) -> None:
    """Refuses a step whose gradients are measured and would be measured wrong.

    Args:
        stages: Of this rank, wrapped as they are now.
        runners: The same stages, with what they share with others.
        splits: The schedule computes gradients of inputs and of parameters apart.

    Raises:
        ValueError: There are several stages, parameters of other stages, replicas that are averaged after the backward,
            or a backward of several passes.
    """
    if not local_grads_wanted():
        return
    wrong = ""
    if len(stages) > 1:
        wrong = f"this rank has the {len(stages)} stages {list(stages)}: take a schedule of one stage for each rank"
    elif any(runner.shared for runner in runners.values()):
        wrong = "a parameter is in several stages, and its gradient is the sum of theirs: use no tied parameters"
    elif any(isinstance(part, DistributedDataParallel) for stage in stages.values() for part in stage.modules()):
        wrong = (
            "the stage is averaged by DistributedDataParallel after all micro-batches: wrap it in fully_shard or in "
            "ShardedDataParallel"
        )
    elif any(runner.would_split(splits=splits) for runner in runners.values()):
        wrong = 'the schedule computes the gradients of parameters by passes of their own: take schedule="1f1b"'
    if wrong:
        raise ValueError(
            f"local gradients are measured (by AdaScale) and would be measured wrong in this pipeline: {wrong}, or "
            "call unhook() of what measures them"
        )
