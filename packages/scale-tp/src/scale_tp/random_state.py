"""Where torch's random numbers stand, on the host and on a CUDA device, read and put back together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StreamState(NamedTuple):
    """Where a stream of random numbers stands.

    Attributes:
        host: State of the generator of the host.
        device: State of that of a CUDA device; None where CUDA is not used.
    """

    host: Tensor
    device: Tensor | None

    def equals(self, other: StreamState) -> bool:
        """Whether the same numbers come next."""
        if self.device is None or other.device is None:
            return self.device is other.device and torch.equal(self.host, other.host)
        return torch.equal(self.host, other.host) and torch.equal(self.device, other.device)


def random_state(device: torch.device | None = None) -> StreamState:
    """Returns where the random numbers stand.

    Args:
        device: Whose numbers are about to be drawn; None is the current CUDA device, where there is one.
    """
    if device is None:
        return StreamState(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
    return StreamState(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)


def go_to(state: StreamState, device: torch.device | None = None) -> None:
    """Puts the random numbers back to where they stood.

    Args:
        state: As `random_state` gave it; without CUDA, what it says of a device is left out.
        device: As it was given to `random_state`.
    """
    torch.set_rng_state(state.host)
    if state.device is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.device, "cuda" if device is None else device)
