"""`MOELayer`: can be imported, and is not offered."""

from torch import nn

from fairscale._warnings import Refused

_WHY = "it takes a gate and experts as separate modules, and sums the gradients of experts over the ranks"
_INSTEAD = (
    "scale_moe.MoE(dim, hidden_dim, num_experts, "
    "TokenChoice(2, capacity_factor=1.0, drop_order='choice', normalize_kept=True)), which routes by the same rule; or "
    "scale_moe.parallelize_experts(model) for a model that is there"
)


class MOELayer(Refused, nn.Module):
    """FairScale's layer of experts over ranks."""

    why, instead = _WHY, _INSTEAD


__all__ = ["MOELayer"]
