"""Which parameters of a rank are one with those of others: found by identity before the split, by name ever after.

`load_state_dict(assign=True)`, `fully_shard` and values for stages on the meta device put other tensors in their
places, so they are looked up anew before each step.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from scale_pipe.distributed.names import plain_name, plain_names
from scale_pipe.distributed.replicas import standing_of
from scale_pipe.distributed.shared import Own


class Tied:
    """The shared parameters of one rank, by name.

    Args:
        places: By the name of a shared parameter and by stage, its name there.
        stages: Of this rank, as they were split.
    """

    def __init__(self, places: Mapping[str, Mapping[int, str]], stages: Mapping[int, nn.Module]) -> None:
        self._names = {
            name: plain_name(plain_names(stages[stage]), listed)
            for name, by_stage in places.items()
            for stage, listed in by_stage.items()
            if stage in stages
        }

    def now(self, pipe: nn.Module, stages: Mapping[int, nn.Module]) -> Own:
        """Returns this rank's copies, and how their gradients stand after the last backward.

        Args:
            pipe: Yields its parameters by plain names.
            stages: Of this rank, with whatever is around them.

        Raises:
            ValueError: A wrapper reduces the gradient of one so that it can't be added to those of other stages.
        """
        if not self._names:
            return {}
        listed = dict(pipe.named_parameters(remove_duplicate=False))
        found = {}
        for name, plain in self._names.items():
            param = listed.get(plain)
            holder = next((one for one in stages.values() if any(param is other for other in one.parameters())), None)
            standing = None if param is None or holder is None else standing_of(holder, param)
            if param is None or standing is None:
                raise ValueError(
                    f"{plain} is one parameter with that of another stage, whose gradients are added up after the last "
                    "backward, but a wrapper around it hides it, or reduces its gradient in a way of its own: use "
                    "fully_shard or FullyShardedDataParallel without flatten_parameters, ShardedDataParallel, or "
                    "torch's DistributedDataParallel; or wrap the modules beside it alone"
                )
            found[name] = param, standing
        return found
