"""The state of a pipeline by the names of the plain model: the part of one rank, and the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_pipe.distributed.comm.messages import Content, Share, pack, unpack
from scale_pipe.distributed.comm.p2p import Links
from scale_pipe.distributed.data_parallel import plain_name, plain_names
from scale_pipe.distributed.program.plan import Flow, Slot
from scale_pipe.schedules.action import EVERY_MICRO_BATCH
from scale_pipe.schedules.placement import Placement

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


T = TypeVar("T")


class StagesState:
    """What a pipeline knows of the names in its model.

    Args:
        stages: All of the model, on this rank too where they will not stay.
        group: The ranks.
    """

    def __init__(self, stages: Sequence[nn.Module], group: Group) -> None:
        self._group = group
        places: dict[str, int] = {}  # Of modules, in the order of the model, of which each frame has a picture.
        found: dict[str, str] = {}
        self._first_stages: dict[str, int] = {}
        known: dict[int, str] = {}
        for index, stage in enumerate(stages):
            names = plain_names(stage)
            for name in names.values():
                places.setdefault(name, len(places))
            for listed, value in stage.state_dict(keep_vars=True).items():
                name = plain_name(names, listed)
                first = known.setdefault(id(value), name) if isinstance(value, Tensor) else name
                found.setdefault(name, first)
                self._first_stages.setdefault(first, index)
        in_order = sorted(found, key=lambda name: places.get(name.rpartition(".")[0], 0))
        # All names of the whole model, in its order, each with the first of the same tensor.
        self.first_names = {name: found[name] for name in in_order}

    def first_stage(self, name: str) -> int | None:
        """Returns the first stage that holds the tensor of this first name; None if there is none.

        Args:
            name: One of `first_names`.
        """
        return self._first_stages.get(name)

    def named(
        self,
        stages: Mapping[int, nn.Module],
        tensors: Callable[[nn.Module], Iterable[tuple[str, T]]],
        prefix: str,
        remove_duplicate: bool,
    ) -> Iterator[tuple[str, T]]:
        """Yields tensors of this rank's stages by plain names.

        Args:
            stages: By number.
            tensors: Of one stage, by its own names.
            prefix: Before each name.
            remove_duplicate: A tensor that stands in two stages comes once.
        """
        seen: set[int] = set()
        for stage in stages.values():
            names = plain_names(stage)
            for listed, tensor in tensors(stage):
                if not (remove_duplicate and id(tensor) in seen):
                    seen.add(id(tensor))
                    yield f"{prefix}.{plain_name(names, listed)}".lstrip("."), tensor

    def of(self, stages: Mapping[int, nn.Module], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the state of this rank's stages.

        Args:
            stages: By number.
            args: `destination`, `prefix`, `keep_vars`.
            kwargs: Likewise.
        """
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        prefix, found = given.get("prefix", ""), given.get("destination")
        found = {} if found is None else found
        for stage in stages.values():
            names = plain_names(stage)
            for listed, value in stage.state_dict(keep_vars=given.get("keep_vars", False)).items():
                found[prefix + plain_name(names, listed)] = value
        return found

    def whole(self, own: Mapping[str, Any], links: Links, placement: Placement) -> dict[str, Any]:
        """Returns the state of all ranks on the host of the first one, in the model's order; nothing on the others.

        Args:
            own: Of this rank.
            links: To the others.
            placement: Which rank holds which stage.

        Raises:
            LinkError: A rank did not come.
        """
        on_host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in own.items()}
        found: dict[str, Any] = {}
        for rank, slot in enumerate(state_slots(placement), start=1):
            if self._group.rank == 0:
                links.post(slot, rank)
                message = links.take(slot, rank)
                assert isinstance(message, Content)
                found.update(unpack(message.structure, message.tensors))
            elif self._group.rank == rank:
                links.send(slot, 0, Content(*pack(on_host), Share(1, 1, 1)))
        links.finish()
        found.update(on_host)
        known = {name: found.pop(name) for name in self.first_names if name in found}
        return {**known, **found} if self._group.rank == 0 else {}

    def rename(self, stages: Mapping[int, nn.Module], state: dict[str, Any], prefix: str) -> None:
        """Gives what stands in this rank's stages the names that it has there; what stands in others is dropped.

        Args:
            stages: By number.
            state: By plain names behind the prefix; changed in place.
            prefix: Of the pipeline, in a larger module.
        """
        whole = {name: state.pop(prefix + name) for name in self.first_names if prefix + name in state}
        for index, stage in stages.items():
            names = plain_names(stage)
            for listed in stage.state_dict(keep_vars=True):
                if (name := plain_name(names, listed)) in whole:
                    state[f"{prefix}{key_of(index)}.{listed}"] = whole[name]

    def load(self, stages: Mapping[int, nn.Module], state: Mapping[str, Any], *, strict: bool, assign: bool) -> Any:
        """Loads what stands in this rank's stages; nothing is changed where something is missing.

        Args:
            stages: By number.
            state: By plain names.
            strict: What is missing here, or stands in no stage, is an error.
            assign: As torch has it.

        Raises:
            RuntimeError: Names or shapes do not fit.
        """
        parts: dict[int, dict[str, Any]] = {}
        missing = []
        for index, stage in stages.items():
            names = plain_names(stage)
            wanted = {listed: plain_name(names, listed) for listed in stage.state_dict(keep_vars=True)}
            parts[index] = {listed: state[name] for listed, name in wanted.items() if name in state}
            missing += [name for name in wanted.values() if name not in state]
        unexpected = [name for name in state if name not in self.first_names]
        if strict and (missing or unexpected):
            told = [f"missing: {', '.join(missing)}"] * bool(missing)
            told += [f"in no stage: {', '.join(unexpected)}"] * bool(unexpected)
            raise RuntimeError(
                f"the state is not that of this model ({'; '.join(told)}): it has the names of the plain model, as "
                "model.state_dict() or pipe.state_dict(full=True) give it"
            )
        for index, part in parts.items():
            stages[index].load_state_dict(part, strict=False, assign=assign)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)


def state_slots(placement: Placement) -> list[Slot]:
    """Returns what travels for a whole state: the part of each rank but the first, to that one.

    Args:
        placement: Which rank holds which stage.
    """
    first = [stages[0] for stages in placement.stages_of]
    return [Slot(Flow.STATE, "", stage, first[0], EVERY_MICRO_BATCH) for stage in first[1:]]
