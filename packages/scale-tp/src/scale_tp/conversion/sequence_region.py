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

from scale_core.autograd_hooks import in_backward
from scale_core.comm.group import Group
from scale_tp.async_tp.lazy_input import Arrival, ArrivingTensor
from scale_tp.conversion.styles import Style
from scale_tp.layers.input_region import SEQUENCE_DIM
from scale_tp.layers.linear_ops import enter
from scale_tp.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from scale_tp.random import DividedRandomness, drops
from scale_tp.sequence_lengths import parts_held, tell_parts
from scale_tp.split import even_sizes

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


def divide_stretch(model: nn.Module, stretch: Stretch, group: Group, overlap_pieces: int | None = None) -> None:
    """Divides the sequence before the first block, and puts it together behind the last one.

    Args:
        model: The model that has the stretch.
        stretch: Its blocks.
        group: The ranks.
        overlap_pieces: Into how many pieces each part is cut where it is gathered, to overlap the communication with
            the first product; None does not.
    """
    for module in stretch.gathering.values():
        module.register_forward_pre_hook(_Gather(group, overlap_pieces), with_kwargs=True)
    randomness = DividedRandomness(group)
    passage = _Passage(stretch.path, randomness)
    stretch.blocks[0].register_forward_pre_hook(_Enter(group, passage, stretch.blocks), with_kwargs=True)
    stretch.blocks[-1].register_forward_hook(_Leave(group, passage))
    # Whoever runs the blocks is most often the module that holds them, and else the model.
    for module in dict.fromkeys((model, model.get_submodule(stretch.path.rpartition(".")[0]))):
        module.register_forward_pre_hook(passage.before)
        module.register_forward_hook(passage.after, always_call=True)


@dataclass
class _Passage:
    """How far a forward of the model is: what happens at one end of the stretch has to happen at the other one.

    Attributes:
        path: The name of the list of blocks.
        randomness: What is drawn within.
        inside: Whether the sequence is divided; None outside of the model's forward, as in a recomputation.
    """

    path: str
    randomness: DividedRandomness
    inside: bool | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of the model."""
        self.inside = False
        self.randomness.forget()

    def enter(self, draws: bool) -> None:
        """Before the first block."""
        if self.inside is not None:
            self.inside = True
        elif draws and not in_backward():
            raise RuntimeError(
                f"sequence_parallel=True: '{self.path}' drops something, and its first block was called outside of the "
                "model's forward, as by a stage of a pipeline: from there nobody would lead the ranks back to the same "
                "random numbers: pass sequence_parallel=False, or set dropout to 0"
            )
        if draws:
            self.randomness.enter()
        else:
            self.randomness.forget()

    def leave(self) -> None:
        """Behind the last block."""
        if self.inside is False:
            raise RuntimeError(
                f"sequence_parallel=True: '{self.path}' was left behind its last block, but its first one was not "
                "called, which divides the sequence: always call both, or pass sequence_parallel=False"
            )
        if self.inside is not None:
            self.inside = False
        self.randomness.leave()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the model, after an error, too: then there is no output."""
        inside, self.inside = self.inside, None
        self.randomness.leave()
        if inside and output is not None:
            raise RuntimeError(
                f"sequence_parallel=True: '{self.path}' was entered at its first block, but its last one was not "
                "called, which puts the sequence together: always call both, or pass sequence_parallel=False"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inside": None}


@dataclass(frozen=True)
class _BeforeForward:
    """Changes the first argument of a module, or the one that transformers give by name."""

    group: Group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.change(args[0]), *args[1:]), kwargs
        if "hidden_states" not in kwargs:
            raise TypeError(
                f"sequence_parallel=True: expected {type(module).__name__} to be given the sequence as its first "
                f"argument, or as hidden_states, got {', '.join(kwargs) or 'nothing'}: pass it by position"
            )
        return args, {**kwargs, "hidden_states": self.change(kwargs["hidden_states"])}

    def change(self, given: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class _Gather(_BeforeForward):
    """Before a module of divided layers: the sequence is put together, or it is when the first of them reads it."""

    overlap_pieces: int | None

    def change(self, given: Tensor) -> Tensor:
        entered = enter(given, self.group, SEQUENCE_DIM, self.overlap_pieces)
        return ArrivingTensor(entered) if isinstance(entered, Arrival) else entered


@dataclass(frozen=True)
class _Enter(_BeforeForward):
    """Before the first block: a rank keeps its part of the sequence, and draws numbers of its own for it."""

    passage: _Passage
    blocks: nn.ModuleList

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = super().__call__(module, args, kwargs)
        self.passage.enter(any(drops(block) for block in self.blocks))
        return changed

    def change(self, given: Tensor) -> Tensor:
        sizes = even_sizes(given.shape[SEQUENCE_DIM], self.group.size)
        tell_parts(self.group, sizes)
        return scatter_to_sequence_parallel_region(given, self.group, dim=SEQUENCE_DIM, sizes=sizes)


@dataclass(frozen=True)
class _Leave:
    """Behind the last block: all ranks have all of what it returned, or of the first part of that."""

    group: Group
    passage: _Passage

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.passage.leave()
        if isinstance(output, Tensor):
            return self._whole(output)
        return (self._whole(output[0]), *output[1:])

    def _whole(self, part: Tensor) -> Tensor:
        sizes = parts_held(self.group, part, SEQUENCE_DIM)
        return gather_from_sequence_parallel_region(
            part, self.group, dim=SEQUENCE_DIM, sizes=sizes, to_model_parallel=False
        )
