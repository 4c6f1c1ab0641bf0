"""The stages of one rank as a module of the plain model's names, for all who ask a module what it holds.

Parameters, buffers, children and state are shown as the plain model has them, whatever the split and whatever wrappers
are around stages. So optimizers, checkpoints and torch.distributed.checkpoint know one model, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from scale_pipe.distributed.data_parallel import plain_names
from scale_pipe.distributed.state_dict import OwnStages, StagesState, key_of

T = TypeVar("T")


class PlainFace(nn.Module):
    """A module whose parts are stages; `_state` knows the names of the whole model."""

    _state: StagesState

    @property
    def stages(self) -> MutableMapping[int, nn.Module]:
        """This rank's stages, by number; one may be replaced by a wrapper around it, such as `fully_shard(stage)`."""
        return OwnStages(self)

    def _hold(self, index: int, stage: nn.Module) -> None:
        self._modules[key_of(index)] = stage

    # What would stand beside the stages is never run, and has no name in the plain model.

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name not in self._modules:
            _refuse(name)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuses it: see `stages`."""
        _refuse(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuses it: see `stages`."""
        _refuse(name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Refuses it: see `stages`."""
        _refuse(name)

    # Seen from outside.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters by the names of the plain model; without `recurse` there are none."""
        stages = self.stages if recurse else {}
        yield from self._state.named(stages, lambda module: module.named_parameters(), prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's buffers by the names of the plain model; without `recurse` there are none."""
        stages = self.stages if recurse else {}
        yield from self._state.named(stages, lambda module: module.named_buffers(), prefix, remove_duplicate)

    def children(self) -> Iterator[nn.Module]:
        """Yields this rank's stages."""
        yield from self.stages.values()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields what the plain model has as children, by their names, with what of each stands on this rank.

        These are pictures of the model: they hold the very tensors, and cannot be called. To change a module, take it
        from `stages`.
        """
        yield from _picture(self.stages).named_children()

    def get_submodule(self, target: str) -> nn.Module:
        """Returns a module by its name in the plain model.

        Args:
            target: Its name; "" is the pipeline itself.

        Raises:
            AttributeError: It is in no stage of this rank.
        """
        if not target:
            return self
        found: list[nn.Module] = []
        for stage in self.stages.values():
            paths = [path for path, plain in plain_names(stage).items() if plain == target]
            found += [
                stage.get_submodule(path) for path in paths[-1:]
            ]  # Of wrappers and what they hold, the innermost.
        for module in found:  # Before what stands in a stage for a module of another one, and holds nothing.
            if any(True for _ in chain(module.parameters(), module.buffers())):
                return module
        if found:
            return found[0]
        raise AttributeError(f"{target!r} is in no stage of this rank, which holds the stages {list(self.stages)}")

    def get_parameter(self, target: str) -> nn.Parameter:
        """Returns a parameter by its name in the plain model.

        Args:
            target: Its name.

        Raises:
            AttributeError: It is in no stage of this rank.
        """
        return self._found(target, dict(self.named_parameters(remove_duplicate=False)))

    def get_buffer(self, target: str) -> Tensor:
        """Returns a buffer by its name in the plain model.

        Args:
            target: Its name.

        Raises:
            AttributeError: It is in no stage of this rank.
        """
        return self._found(target, dict(self.named_buffers(remove_duplicate=False)))

    def _found(self, target: str, all_here: Mapping[str, T]) -> T:
        if target not in all_here:
            raise AttributeError(f"{target!r} is in no stage of this rank, which holds the stages {list(self.stages)}")
        return all_here[target]

    def _fqn_modifiers(self) -> Mapping[str, str]:
        """What torch.distributed.checkpoint asks, to walk along a name that `state_dict` has: go by the picture."""
        return _ByPicture()

    @property
    def _plain_model(self) -> _AnyName:
        return _AnyName()

    # State.

    def names_of_model(self) -> Mapping[str, str]:
        """Returns all names in the state of the whole model, each with the first name of the same tensor."""
        return self._state.first_names

    def is_first_holder(self, name: str) -> bool:
        """Whether, of the stages that hold the tensor of this first name, the first one is on this rank.

        Args:
            name: In the plain model.
        """
        return self._state.first_stage(name) in self.stages

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch overloads it
        """Returns what this rank holds, by the names of the plain model.

        Args:
            args: `destination`, `prefix`, `keep_vars`, as torch has them.
            kwargs: Likewise.
        """
        return self._state.of(self.stages, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's part of a state of the plain model, whole or of this rank alone.

        Args:
            state_dict: By the names of the plain model.
            strict: What is missing on this rank, or stands in no stage at all, is an error.
            assign: As torch has it.

        Raises:
            RuntimeError: Names or shapes do not fit.
        """
        return self._state.load(self.stages, state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Where this is a part of another module, which loads: its children look for their own names."""
        self._state.rename(self.stages, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _refuse(name: str) -> NoReturn:
    raise TypeError(
        f"a pipeline has stages, and no step would run what is beside them: {name!r} belongs into the model before "
        "it is split; to wrap a stage write pipe.stages[index] = wrapper(pipe.stages[index]); a loss function is given "
        "to pipe.step(..., loss_fn=loss_fn)"
    )


class _Picture(nn.Module):
    """A module of the plain model: its tensors and what stands in it, and nothing to run."""


def _picture(stages: Mapping[int, nn.Module]) -> _Picture:
    root = _Picture()
    for stage in stages.values():
        names = plain_names(stage)
        for path, module in stage.named_modules(remove_duplicate=False):
            drawn: nn.Module = root
            for name in filter(None, names[path].split(".")):
                drawn = drawn._modules.setdefault(name, _Picture())  # type: ignore[assignment]  # None is nowhere here
            drawn._parameters.update(module._parameters)
            drawn._buffers.update(module._buffers)
            drawn._non_persistent_buffers_set |= module._non_persistent_buffers_set
    return root


class _ByPicture(Mapping[str, str]):
    """Sends whoever asks for a child, whatever its name, to the plain model."""

    def __getitem__(self, name: str) -> str:
        return "_plain_model"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _AnyName:
    """What is at the end of a name that was read from the state: it is there, and nobody looks at it."""

    def __getattr__(self, name: str) -> _AnyName:
        if name.startswith("__") or name == "_fqn_modifiers":
            raise AttributeError(name)
        return self
