"""The states of a rank's random number generators, as an object of a snapshot."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scale_core.arguments import checked_arguments


class RandomState:
    """The generators that a rank draws from: Python's, numpy's where it is imported, torch's of the host and devices.

        save(directory, step, {"model": model, "optimizer": optimizer, "random": RandomState()})

    Each rank has its own, so they load at the number of ranks that saved them. With a different number of ranks, the
    random numbers can't continue. With `reseed=True`, all generators are then seeded again, differently on each rank,
    from rank 0's values. Of several devices in a process, the current one is the first.

    Args:
        reseed: Seed again at another number of ranks; without it, that is an error.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import RandomState, load, save
        >>> folder = tempfile.mkdtemp()
        >>> path = save(folder, 1, {"random": RandomState()})
        >>> expected = torch.rand(3)
        >>> step = load(folder, {"random": RandomState()}).step
        >>> torch.equal(torch.rand(3), expected)
        True

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    is_per_rank = True

    @checked_arguments
    def __init__(self, *, reseed: bool = False) -> None:
        self.reseed = reseed

    def state_dict(self) -> dict[str, Any]:
        """Returns the states; copies, so that drawing does not change them."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "torch": torch.get_rng_state(),
            "devices": [generator.get_state() for generator in _device_generators()],
        }
        if numpy := sys.modules.get("numpy"):
            state["numpy"] = numpy.random.get_state(legacy=False)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators; where numpy is not imported here, its state is left out."""
        if "seed" in state:
            _seed(state["seed"])
            return
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"])
        for generator, saved in zip(_device_generators(), state["devices"], strict=False):
            generator.set_state(saved.cpu())
        if "numpy" in state and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(state["numpy"])

    def resized(self, states: Sequence[Any], rank: int, size: int) -> dict[str, Any]:
        """The state of a rank where another number of ranks saved theirs: a seed for it."""
        first: Tensor = states[0]["torch"]
        text = bytes(first.tolist()) + f"rank {rank} of {size}".encode()
        return {"seed": int.from_bytes(hashlib.sha256(text).digest()[:4])}


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _device_generators() -> list[torch.Generator]:
    """The generators of the initialized accelerators, with the generator of the current device first."""
    device_generators: list[torch.Generator] = []
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            generators = list(getattr(accelerator, "default_generators", ()))
            current = accelerator.current_device()
            device_generators += generators[current:] + generators[:current]
    return device_generators
