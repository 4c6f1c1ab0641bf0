"""`MOELayer`: can be imported, and is not offered yet."""

from torch import nn

from fairscale._warnings import Refused

_WHY = "scale has no expert-parallel layer yet, and one that only looked like it would train other experts"
_INSTEAD = (
    "a model whose experts are plain modules, sharded by scale_fsdp.fully_shard, which gives the same numbers on every "
    "rank; or FairScale itself"
)


class MOELayer(Refused, nn.Module):
    """FairScale's layer of experts over ranks."""

    why, instead = _WHY, _INSTEAD


__all__ = ["MOELayer"]
