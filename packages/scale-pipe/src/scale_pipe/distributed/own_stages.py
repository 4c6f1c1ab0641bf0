"""The stages of one rank, by number, as a pipeline shows them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from torch import nn


class OwnStages(MutableMapping[int, nn.Module]):
    """A rank's stages, by number; they are the modules of its pipeline.

    Args:
        pipe: The pipeline, whose modules are called by these numbers.
    """

    def __init__(self, pipe: nn.Module) -> None:
        self._pipe = pipe

    def __getitem__(self, index: int) -> nn.Module:
        module = self._pipe._modules.get(str(index))
        if module is None:
            raise KeyError(f"stage {index} is not on this rank, which holds {list(self)}")
        return module

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self[index]  # Another one would never run.
        self._pipe._modules[str(index)] = module

    def __delitem__(self, index: int) -> None:
        raise TypeError("a stage can be replaced, but not taken away")

    def __iter__(self) -> Iterator[int]:
        return map(int, self._pipe._modules)

    def __len__(self) -> int:
        return len(self._pipe._modules)
