"""The blocks of a model between which each rank has a part of the sequence: from the first one to the last one.

Before the first block the sequence is divided, behind the last one it is gathered. In between, norms, dropout and
residual sums compute on a part; where a block goes into a divided layer the sequence is gathered, and where it comes
out, the sum over the ranks is scattered. (Korthikanti et al., arXiv 2205.05198.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.hooks.autograd import in_backward
from scale_tp.async_tp.lazy_input import DeferredInput, DeferredInputTensor
from scale_tp.comm import gather_sequence, scatter_to_region
from scale_tp.conversion.styles import Style
from scale_tp.layers.linear_ops import SEQUENCE_DIM, to_region
from scale_tp.random import RegionRNG, has_dropout
from scale_tp.sequence_lengths import record_lengths
from scale_tp.split import even_sizes

_REPLICATED = Style("sequence", sums_gradients=True)


@dataclass(frozen=True)
class SequenceRegion:
    """The blocks, and the role of the modules in them for the sequence."""

    path: str  # the name of the list of blocks
    blocks: nn.ModuleList
    replicated: Mapping[str, Style]  # modules with full parameters that compute on a part, by name
    gathering: Mapping[str, nn.Module]  # modules that gather their input, by name

    def contains(self, path: str) -> bool:
        """Whether a module is in one of the blocks."""
        return path.startswith(f"{self.path}.")


def find_sequence_region(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]
) -> SequenceRegion:
    """Finds the list of blocks that holds all row parallel layers."""
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
    # A module of divided layers may shape their outputs by the length of its own input, so it needs the full one. A
    # block that holds such layers itself also has norms and sums, which compute on a part.
    divided = [name.rpartition(".")[0] for name, style in styles.items() if style.divides in ("outputs", "inputs")]
    inner = {name: modules[name] for name in divided if name.startswith(f"{path}.") and modules[name] not in [*blocks]}
    style_by_name: dict[str, Style] = {}
    for name, module in modules.items():
        direct_params = list(module.named_parameters(recurse=False))
        if not name.startswith(f"{path}.") or name in styles or not direct_params:
            continue
        if any(name.startswith(f"{parent}.") for parent in inner):
            raise ValueError(
                f"sequence_parallel=True: '{name}' ({type(module).__name__}) is between divided layers, and its "
                "parameters have no style: give it 'replicated_with_grad_allreduce' if it computes on what 'colwise' "
                "layers give, or pass sequence_parallel=False"
            )
        if any(param.dim() > 1 for _, param in direct_params):
            raise ValueError(
                f"sequence_parallel=True: '{name}' ({type(module).__name__}) is not divided, and may need the full "
                "sequence: give it a style, 'sequence_parallel' if a part of the sequence is enough for it"
            )
        style_by_name[name] = _REPLICATED
    columns = {name.rpartition(".")[0] for name, style in styles.items() if style.divides == "outputs"}
    return SequenceRegion(
        path, blocks, style_by_name, {name: module for name, module in inner.items() if name in columns}
    )


def install_sequence_region(
    model: nn.Module, region: SequenceRegion, group: Group, overlap_pieces: int | None = None
) -> None:
    """Registers the hooks that divide the sequence before the first block and gather it behind the last one."""
    for module in region.gathering.values():
        module.register_forward_pre_hook(_GatherInput(group, overlap_pieces), with_kwargs=True)
    state = _RegionState(region.path, RegionRNG(group))
    region.blocks[0].register_forward_pre_hook(_ScatterInput(group, state, region.blocks), with_kwargs=True)
    region.blocks[-1].register_forward_hook(_GatherOutput(group, state))
    # The blocks are called by the module that holds them most often, and else by the model.
    for module in dict.fromkeys((model, model.get_submodule(region.path.rpartition(".")[0]))):
        module.register_forward_pre_hook(state.pre_forward)
        module.register_forward_hook(state.post_forward, always_call=True)


@dataclass
class _RegionState:
    """How far a forward of the model is: a region that was entered has to be left."""

    path: str  # the name of the list of blocks
    rng: RegionRNG
    inside: bool | None = None  # whether the sequence is divided; None outside of the model's forward

    def pre_forward(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model."""
        self.inside = False
        self.rng.reset()

    def enter(self, draws: bool) -> None:
        """Before the first block."""
        if self.inside is not None:
            self.inside = True
        elif draws and not in_backward():
            raise RuntimeError(
                f"sequence_parallel=True: '{self.path}' drops something, and its first block was called outside of the "
                "model's forward, as by a stage of a pipeline: pass sequence_parallel=False, or set dropout to 0"
            )
        if draws:
            self.rng.enter()
        else:
            self.rng.reset()

    def exit(self) -> None:
        """Behind the last block."""
        if self.inside is False:
            raise RuntimeError(
                f"sequence_parallel=True: '{self.path}' was left behind its last block, but its first one was not "
                "called, which divides the sequence: always call both, or pass sequence_parallel=False"
            )
        if self.inside is not None:
            self.inside = False
        self.rng.exit()

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, after an error too: then there is no output."""
        inside, self.inside = self.inside, None
        self.rng.exit()
        if inside and output is not None:
            raise RuntimeError(
                f"sequence_parallel=True: '{self.path}' was entered at its first block, but its last one was not "
                "called, which puts the sequence together: always call both, or pass sequence_parallel=False"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inside": None}


@dataclass(frozen=True)
class _InputHook:
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
class _GatherInput(_InputHook):
    """Before a module of divided layers: the sequence is gathered, or will be when the first of them reads it."""

    overlap_pieces: int | None

    def change(self, given: Tensor) -> Tensor:
        entered = to_region(given, self.group, SEQUENCE_DIM, self.overlap_pieces)
        return DeferredInputTensor(entered) if isinstance(entered, DeferredInput) else entered


@dataclass(frozen=True)
class _ScatterInput(_InputHook):
    """Before the first block: a rank keeps its part of the sequence, and draws numbers of its own for it."""

    state: _RegionState
    blocks: nn.ModuleList

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = super().__call__(module, args, kwargs)
        self.state.enter(any(has_dropout(block) for block in self.blocks))
        return changed

    def change(self, given: Tensor) -> Tensor:
        sizes = even_sizes(given.shape[SEQUENCE_DIM], self.group.size)
        record_lengths(self.group, sizes)
        return scatter_to_region(given, self.group, SEQUENCE_DIM, sizes)


@dataclass(frozen=True)
class _GatherOutput:
    """Behind the last block: all ranks have its full result, or the first part of it in full."""

    group: Group
    state: _RegionState

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.state.exit()
        if isinstance(output, Tensor):
            return self._gather(output)
        return (self._gather(output[0]), *output[1:])

    def _gather(self, part: Tensor) -> Tensor:
        return gather_sequence(part, self.group, SEQUENCE_DIM, to_model_parallel=False)
