"""The stretch of a model in which each rank has a part of the sequence: from its first block to its last.

Before the first block the sequence is divided, behind the last one it is put together. In between, norms, dropout and
residual sums compute on a part; where a block goes into a divided layer the sequence is gathered, and where it comes
out, the sum over the ranks is scattered. (Korthikanti et al., arXiv 2205.05198.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from scale_core.group import Group
from scale_tp.divided import SEQUENCE_DIM, gather_sequence
from scale_tp.divided_randomness import DividedRandomness
from scale_tp.plan import Style
from scale_tp.regions import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from scale_tp.sequence_parts import parts_held, tell_parts
from scale_tp.split_sizes import even_sizes

_ALIKE = Style("sequence", sums_gradients=True)


@dataclass(frozen=True)
class Stretch:
    """Which blocks it goes over, and which modules in them compute on a part of the sequence.

    Attributes:
        path: The name of the list of blocks.
        blocks: The blocks.
        alike: Modules whose parameters all ranks have, by name.
        gathering: Modules that gather what they are given, by name; their divided layers are inside the region then.
    """

    path: str
    blocks: nn.ModuleList
    alike: Mapping[str, Style]
    gathering: Mapping[str, nn.Module]

    def holds(self, path: str) -> bool:
        """Whether a module stands in one of the blocks."""
        return path.startswith(f"{self.path}.")


def stretch_of(model: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> Stretch:
    """Finds the list of blocks that hold all layers which take a part and give a sum.

    Raises:
        ValueError: There is none, or a block holds a parameter of which it is not known on what part it is used.
    """
    rows = [path for path, style in styles.items() if style.divides == "inputs" and style.input == "part"]
    lists = [path for path, module in modules.items() if isinstance(module, nn.ModuleList)]
    around = [path for path in lists if rows and all(row.startswith(f"{path}.") for row in rows)]
    if not around:
        raise ValueError(
            "sequence_parallel=True: expected one nn.ModuleList of blocks that holds all layers whose style is "
            f"'rowwise', got {len(lists)} lists and {len(rows)} such layers: pass sequence_parallel=False"
        )
    path = around[-1]
    blocks = modules[path]
    assert isinstance(blocks, nn.ModuleList)
    # A module of divided layers may shape what they give by the length of its own input, so that has to be whole. A
    # block that holds such layers itself has norms and sums beside them, which compute on a part.
    divided = [name.rpartition(".")[0] for name, style in styles.items() if style.divides in ("outputs", "inputs")]
    inner = {name: modules[name] for name in divided if name.startswith(f"{path}.") and modules[name] not in [*blocks]}
    alike: dict[str, Style] = {}
    for name, module in modules.items():
        own = list(module.named_parameters(recurse=False))
        if not name.startswith(f"{path}.") or name in styles or not own:
            continue
        if any(name.startswith(f"{parent}.") for parent in inner):
            raise ValueError(
                f"sequence_parallel=True: '{name}' ({type(module).__name__}) stands between divided layers, and its "
                "parameters have no style: give it 'replicated_with_grad_allreduce' if it computes on what 'colwise' "
                "layers give, or pass sequence_parallel=False"
            )
        if any(param.dim() > 1 for _, param in own):
            raise ValueError(
                f"sequence_parallel=True: '{name}' ({type(module).__name__}) is not divided, and may need the whole "
                "sequence: give it a style, 'sequence_parallel' if a part of the sequence is enough for it"
            )
        alike[name] = _ALIKE
    columns = {name.rpartition(".")[0] for name, style in styles.items() if style.divides == "outputs"}
    return Stretch(path, blocks, alike, {name: module for name, module in inner.items() if name in columns})


def divide_stretch(stretch: Stretch, group: Group) -> None:
    """Divides the sequence before the first block, and puts it together behind the last one."""
    for module in stretch.gathering.values():
        module.register_forward_pre_hook(_Gather(group), with_kwargs=True)
    randomness = DividedRandomness(group)
    stretch.blocks[0].register_forward_pre_hook(_Enter(group, randomness), with_kwargs=True)
    stretch.blocks[-1].register_forward_hook(_Leave(group, randomness))


@dataclass(frozen=True)
class _BeforeForward:
    """Changes the first argument of a module, or the one that transformers give by name."""

    group: Group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.change(kwargs["hidden_states"])}

    def change(self, given: Tensor) -> Tensor:
        raise NotImplementedError


class _Gather(_BeforeForward):
    """Before a module of divided layers: the sequence is put together."""

    def change(self, given: Tensor) -> Tensor:
        return gather_sequence(given, self.group)


@dataclass(frozen=True)
class _Enter(_BeforeForward):
    """Before the first block: a rank keeps its part of the sequence, and draws numbers of its own for it."""

    randomness: DividedRandomness

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module.training:
            self.randomness.enter()
        return super().__call__(module, args, kwargs)

    def change(self, given: Tensor) -> Tensor:
        sizes = even_sizes(given.shape[SEQUENCE_DIM], self.group.size)
        tell_parts(self.group, sizes)
        return scatter_to_sequence_parallel_region(given, self.group, dim=SEQUENCE_DIM, sizes=sizes)


@dataclass(frozen=True)
class _Leave:
    """Behind the last block: all ranks have all of what it returned, or of the first part of that."""

    group: Group
    randomness: DividedRandomness

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.randomness.leave()
        if isinstance(output, Tensor):
            return self._whole(output)
        return (self._whole(output[0]), *output[1:])

    def _whole(self, part: Tensor) -> Tensor:
        sizes = parts_held(self.group, part.shape[SEQUENCE_DIM])
        return gather_from_sequence_parallel_region(
            part, self.group, dim=SEQUENCE_DIM, sizes=sizes, to_model_parallel=False
        )
