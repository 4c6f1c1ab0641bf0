"""`nn.Module` view of this rank's stages under the FQNs of the original model.

Parameters, buffers, children and state dicts have the original model's names, whatever the split and whatever wrappers
are around stages. So optimizers, checkpoints and torch.distributed.checkpoint see one model, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from scale_core.parameters import MemoryRange, check_memory_unshared
from scale_pipe.distributed.message import WHOLE, Payload
from scale_pipe.distributed.p2p import P2PChannel
from scale_pipe.distributed.program import state_slots
from scale_pipe.distributed.stage import pack, unpack
from scale_pipe.schedules.placement import StagePlacement

T = TypeVar("T")

_STAGE = "stage_"

# Wrappers that keep the original module in an attribute; those with `no_sync()` keep it in `module`.
_WRAPPED = {"CheckpointWrapper": "_checkpoint_wrapped_module", "OptimizedModule": "_orig_mod"}


def module_fqns(stage: nn.Module) -> dict[str, str]:
    """Returns by the name of each module in a stage its FQN in the original model, without wrappers."""
    fqns: dict[str, str] = {}
    hidden: set[str] = set()
    for path, module in stage.named_modules(remove_duplicate=False):
        inner = "module" if callable(getattr(module, "no_sync", None)) else _WRAPPED.get(type(module).__name__)
        if inner is not None and inner in module._modules:
            hidden.add(f"{path}.{inner}".lstrip("."))
        parent, _, last = path.rpartition(".")
        prefix = fqns.get(parent, "")
        fqns[path] = prefix if path in hidden else f"{prefix}.{last}".lstrip(".") if path else ""
    return fqns


def original_fqn(fqns: Mapping[str, str], name: str) -> str:
    """Returns the FQN of a tensor by its name in a stage; `fqns` is the result of `module_fqns`."""
    path, _, last = name.rpartition(".")
    return f"{fqns.get(path, path)}.{last}".lstrip(".")


class ModelFQNs:
    """The names in the state dict of the full model, known on every rank."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        positions: dict[str, int] = {}  # of modules, in the order of the model, which each split stage has
        first_names: dict[str, str] = {}
        self.first_stages: dict[str, int] = {}  # by first name, the first stage that holds the tensor
        name_by_id: dict[int, str] = {}
        self.top_level: set[str] = set()  # first parts of all names, those of non-persistent buffers included
        for index, stage in enumerate(stages):
            fqns = module_fqns(stage)
            for listed, _ in chain(stage.named_parameters(), stage.named_buffers()):
                self.top_level.add(original_fqn(fqns, listed).partition(".")[0])
            for fqn in fqns.values():
                positions.setdefault(fqn, len(positions))
            for listed, value in stage.state_dict(keep_vars=True).items():
                name = original_fqn(fqns, listed)
                first = name_by_id.setdefault(id(value), name) if isinstance(value, Tensor) else name
                first_names.setdefault(name, first)
                self.first_stages.setdefault(first, index)
        in_order = sorted(first_names, key=lambda name: positions.get(name.rpartition(".")[0], 0))
        self.first_names = {name: first_names[name] for name in in_order}  # each with the first name of the same tensor
        self.top_level |= {name.partition(".")[0] for name in first_names}


def check_stage_memory(stages: Sequence[nn.Module], placement: StagePlacement) -> None:
    """Refuses parameters that share memory and are on stages of different ranks, where each would train by itself."""
    moved: list[MemoryRange] = []
    seen: set[int] = set()  # One parameter on several stages is kept equal.
    for indices in placement.stages_of:
        named = [
            (original_fqn(module_fqns(stages[index]), name), param)
            for index in indices
            for name, param in stages[index].named_parameters()
            if id(param) not in seen
        ]
        check_memory_unshared("DistributedPipe", (), named, moved)
        moved += [memory for name, param in named for memory in MemoryRange.of(name, param)]
        seen.update(id(param) for _, param in named)


class LocalStages(MutableMapping[int, nn.Module]):
    """This rank's stages by number; they are the modules of its pipeline."""

    def __init__(self, pipe: nn.Module) -> None:
        self._pipe = pipe

    def __getitem__(self, index: int) -> nn.Module:
        module = self._pipe._modules.get(f"{_STAGE}{index}")
        if module is None:
            raise KeyError(f"stage {index} is not on this rank, which holds {list(self)}")
        return module

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self[index]  # Another one would never run.
        self._pipe._modules[f"{_STAGE}{index}"] = module

    def __delitem__(self, index: int) -> None:
        raise TypeError("a stage can be replaced, but not removed")

    def __iter__(self) -> Iterator[int]:
        return (int(key.removeprefix(_STAGE)) for key in self._pipe._modules)

    def __len__(self) -> int:
        return len(self._pipe._modules)


class StageModuleView(nn.Module):
    """A module whose children are stages, seen from outside as the part of the original model that they are."""

    _fqns: ModelFQNs

    @property
    def stages(self) -> MutableMapping[int, nn.Module]:
        """This rank's stages, by number; you may replace one by a wrapper around it, as `fully_shard(stage)`."""
        return LocalStages(self)

    def _add_stage(self, index: int, stage: nn.Module) -> None:
        self._modules[f"{_STAGE}{index}"] = stage

    # A module outside the stages would never run, and has no name in the original model.

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name not in self._modules:
            _refuse(name)
        super().__setattr__(name, value)

    def add_module(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Raises TypeError: see `stages`."""
        _refuse(name)

    register_parameter = register_buffer = add_module

    # Parameters, buffers and modules.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters by the names of the original model; none without `recurse`."""
        if recurse:
            yield from self._named(lambda module: module.named_parameters(), prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's buffers by the names of the original model; none without `recurse`."""
        if recurse:
            yield from self._named(lambda module: module.named_buffers(), prefix, remove_duplicate)

    def _named(
        self, tensors: Callable[[nn.Module], Iterable[tuple[str, T]]], prefix: str, remove_duplicate: bool
    ) -> Iterator[tuple[str, T]]:
        seen: set[int] = set()
        for stage in self.stages.values():
            fqns = module_fqns(stage)
            for listed, tensor in tensors(stage):
                if not (remove_duplicate and id(tensor) in seen):
                    seen.add(id(tensor))
                    yield f"{prefix}.{original_fqn(fqns, listed)}".lstrip("."), tensor

    def children(self) -> Iterator[nn.Module]:
        """Yields this rank's stages."""
        yield from self.stages.values()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the children of the original model by name, with the part of each that is on this rank.

        They hold the very tensors, and cannot be called. To change a module, take it from `stages`.
        """
        yield from _module_tree(self.stages).named_children()

    def get_submodule(self, target: str) -> nn.Module:
        """Returns a module by its name in the original model; "" is the pipeline itself.

        Raises:
            AttributeError: It is in no stage of this rank.
        """
        if not target:
            return self
        modules: list[nn.Module] = []
        for stage in self.stages.values():
            paths = [path for path, fqn in module_fqns(stage).items() if fqn == target]
            modules += [stage.get_submodule(path) for path in paths[-1:]]  # The innermost, without its wrappers.
        for module in modules:  # Before a placeholder for a module of another stage, which holds nothing.
            if any(True for _ in chain(module.parameters(), module.buffers())):
                return module
        return self._lookup(target, {target: modules[0]} if modules else {})

    def get_parameter(self, target: str) -> nn.Parameter:
        """Returns a parameter by its name in the original model.

        Raises:
            AttributeError: It is in no stage of this rank.
        """
        return self._lookup(target, dict(self.named_parameters(remove_duplicate=False)))

    def get_buffer(self, target: str) -> Tensor:
        """Returns a buffer by its name in the original model.

        Raises:
            AttributeError: It is in no stage of this rank.
        """
        return self._lookup(target, dict(self.named_buffers(remove_duplicate=False)))

    def _lookup(self, target: str, local: Mapping[str, T]) -> T:
        if target not in local:
            raise AttributeError(f"{target!r} is in no stage of this rank, which holds the stages {list(self.stages)}")
        return local[target]

    # torch.distributed.checkpoint walks along each name by getattr; the pipeline may have attributes of these names.

    def _fqn_modifiers(self) -> dict[str, str]:
        return dict.fromkeys(self._fqns.top_level, "_any_attribute")

    @property
    def _any_attribute(self) -> _AnyAttribute:
        return _AnyAttribute()

    # State.

    def names_of_model(self) -> Mapping[str, str]:
        """Returns all names in the state of the full model, each with the first name of the same tensor."""
        return self._fqns.first_names

    def is_first_holder(self, name: str) -> bool:
        """Whether the first stage that holds the tensor of this first name is on this rank."""
        return self._fqns.first_stages.get(name) in self.stages

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        """Returns this rank's part of the state dict of the original model.

        Args:
            args: `destination`, `prefix`, `keep_vars`, as torch has them.
            kwargs: The same by keyword.
        """
        arguments = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        prefix, destination = arguments.get("prefix", ""), arguments.get("destination")
        destination = {} if destination is None else destination
        for stage in self.stages.values():
            fqns = module_fqns(stage)
            for listed, value in stage.state_dict(keep_vars=arguments.get("keep_vars", False)).items():
                destination[prefix + original_fqn(fqns, listed)] = value
        return destination

    def _gather_full(self, local: Mapping[str, Any], rank: int, channel: P2PChannel, placement: StagePlacement) -> Any:
        """The state dicts of all ranks on the first one's host, in the model's order; {} on others. Raises P2PError."""
        # A copy of this rank's part as well: a write to the result must not reach one stage of the model alone.
        on_host = {
            name: value.detach().to("cpu", copy=rank == 0) if isinstance(value, Tensor) else value
            for name, value in local.items()
        }
        full_state: dict[str, Any] = {}
        for other, slot in enumerate(state_slots(placement), start=1):
            if rank == 0:
                channel.post_receive(slot, other)
                message = channel.receive(slot, other)
                assert isinstance(message, Payload)
                full_state.update(unpack(message.structure, message.tensors))
            elif rank == other:
                channel.send(slot, 0, Payload(*pack(on_host), WHOLE))
        channel.wait_sends()
        full_state.update(on_host)
        renamed = {name: full_state.pop(name) for name in self._fqns.first_names if name in full_state}
        return {**renamed, **full_state} if rank == 0 else {}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's part of a state dict of the original model, in full or of this rank only.

        Args:
            state_dict: By the names of the original model.
            strict: A name that is missing on this rank, or that is in no stage at all, is an error.
            assign: As torch has it.

        Raises:
            RuntimeError: Names or shapes do not fit.
        """
        parts: dict[int, dict[str, Any]] = {}
        missing = []
        for index, stage in self.stages.items():
            fqns = module_fqns(stage)
            requested = {listed: original_fqn(fqns, listed) for listed in stage.state_dict(keep_vars=True)}
            parts[index] = {listed: state_dict[name] for listed, name in requested.items() if name in state_dict}
            missing += [name for name in requested.values() if name not in state_dict]
        unexpected = [name for name in state_dict if name not in self._fqns.first_names]
        if strict and (missing or unexpected):
            differences = [f"missing: {', '.join(missing)}"] * bool(missing)
            differences += [f"in no stage: {', '.join(unexpected)}"] * bool(unexpected)
            raise RuntimeError(
                f"the state dict does not belong to this model ({'; '.join(differences)}). It has the names of the "
                "original model, as model.state_dict() or pipe.state_dict(full=True) give it"
            )
        for index, part in parts.items():
            self.stages[index].load_state_dict(part, strict=False, assign=assign)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Where the pipeline is a part of another module that loads: gives its children the names that they have."""
        names = self._fqns.first_names
        stage_state = {name: state_dict.pop(prefix + name) for name in names if prefix + name in state_dict}
        for index, stage in self.stages.items():
            fqns = module_fqns(stage)
            for listed in stage.state_dict(keep_vars=True):
                if (name := original_fqn(fqns, listed)) in stage_state:
                    state_dict[f"{prefix}{_STAGE}{index}.{listed}"] = stage_state[name]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _refuse(name: str) -> NoReturn:
    raise TypeError(
        f"no step of a pipeline would run {name!r}, because it runs its stages only: add it to the model before you "
        "split it. To wrap a stage write pipe.stages[index] = wrapper(pipe.stages[index]). Give a loss function to "
        "pipe.step(..., loss_fn=loss_fn)"
    )


class _ModuleTree(nn.Module):
    """A module of the original model with its tensors and children, and without a forward."""


def _module_tree(stages: Mapping[int, nn.Module]) -> _ModuleTree:
    root = _ModuleTree()
    for stage in stages.values():
        fqns = module_fqns(stage)
        for path, module in stage.named_modules(remove_duplicate=False):
            node: nn.Module = root
            for name in filter(None, fqns[path].split(".")):
                node = node._modules.setdefault(name, _ModuleTree())  # type: ignore[assignment]  # None is nowhere here
            node._parameters.update(module._parameters)
            node._buffers.update(module._buffers)
            node._non_persistent_buffers_set |= module._non_persistent_buffers_set
    return root


class _AnyAttribute:
    """An object with every attribute: torch walks to the end of a name, and does not use the attribute there."""

    def __getattr__(self, name: str) -> _AnyAttribute:
        if name.startswith("__") or name == "_fqn_modifiers":
            raise AttributeError(name)
        return self
