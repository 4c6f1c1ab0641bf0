"""A vector of all parameters is refused where one rank has only parts of them.

`torch.nn.utils.parameters_to_vector` lays what `parameters()` yields one behind the other, and `vector_to_parameters`
gives each as many of the vector's elements as it has. With shards, the one would be the vector of another model, of
another size on each rank, and the other would put elements where they do not belong.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from scale_core import compat
from scale_core.shard import is_divided, shard_of


@functools.cache
def watch_vectors() -> None:
    """Begins to look at the parameters that torch makes vectors of in this process; once is enough."""
    compat.look_at_vectors(_refuse_parts)


def _refuse_parts(param: Any) -> None:
    shard = shard_of(param) if isinstance(param, Tensor) and is_divided(param) else None
    if shard is not None:
        where = (
            "Call them where parameters are whole: with model.summon_full_params(): vector = "
            "parameters_to_vector(model.parameters())"
            if shard.gathered
            else "Take the whole tensors of model.state_dict(), which all ranks call together"
        )
        raise RuntimeError(
            f"parameters_to_vector, vector_to_parameters: {shard.title} is a shard, {list(param.shape)} of "
            f"{list(shard.shape)}, and other ranks have other elements of it. {where}"
        )
