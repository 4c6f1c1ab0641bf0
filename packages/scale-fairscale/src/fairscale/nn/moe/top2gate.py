"""`Top2Gate` and `top2gating`: can be imported, and are not offered."""

from typing import Any, NoReturn

from torch import nn

from fairscale._warnings import Refused, refuse
from fairscale.nn.moe.moe_layer import MOELayer


class Top2Gate(Refused, nn.Module):
    """FairScale's gate of `MOELayer`."""

    why, instead = MOELayer.why, MOELayer.instead


def top2gating(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses, as `Top2Gate` does."""
    refuse("top2gating", Top2Gate.why, Top2Gate.instead)


__all__ = ["Top2Gate", "top2gating"]
