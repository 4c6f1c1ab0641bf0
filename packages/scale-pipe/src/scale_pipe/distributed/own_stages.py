"""The stages of one rank, by number, as a pipeline shows them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from torch import nn

_KEY = "stage_"


def key_of(index: int) -> str:
    """Returns what a stage is called among the modules of its pipeline; a layer of a sequence has a bare number.

    Args:
        index: Of the stage.
    """
    return f"{_KEY}{index}"


class OwnStages(MutableMapping[int, nn.Module]):
    """A rank's stages, by number; they are the modules of its pipeline.

    Args:
        pipe: The pipeline, whose modules are called by `key_of` these numbers.
    """

    def __init__(self, pipe: nn.Module) -> None:
        self._pipe = pipe

    def __getitem__(self, index: int) -> nn.Module:
        module = self._pipe._modules.get(key_of(index))
        if module is None:
            raise KeyError(f"stage {index} is not on this rank, which holds {list(self)}")
        return module

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self[index]  # Another one would never run.
        self._pipe._modules[key_of(index)] = module

    def __delitem__(self, index: int) -> None:
        raise TypeError("a stage can be replaced, but not taken away")

    def __iter__(self) -> Iterator[int]:
        return (int(key.removeprefix(_KEY)) for key in self._pipe._modules)

    def __len__(self) -> int:
        return len(self._pipe._modules)
