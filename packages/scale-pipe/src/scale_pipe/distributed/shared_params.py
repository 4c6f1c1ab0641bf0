"""Parameters that several stages hold, as tied embeddings: one tensor in the model, a copy on each rank here.

Copies begin equal and get equal gradients, so optimizers that are set up alike keep them equal. The gradient of each is
the sum of what all holders have computed, added up in the order of their stages: the same to the bit on all of them.

Where stages have replicas, a copy may be in parts, each on one of them (`data_parallel`). What arrives from another
stage is the part that this replica of it has: mostly the very part that is needed here, since stages are cut alike.
Where it is not, the replicas of this stage make the whole of what each has got, and take their own parts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import all_reduce
from scale_core.comm.control_plane import exchange
from scale_core.shard import Ranges
from scale_pipe.distributed.comm.messages import Content, Share, pack, unpack
from scale_pipe.distributed.comm.p2p import Links
from scale_pipe.distributed.data_parallel import Reduced, Standing, plain_name, plain_names, standing_of
from scale_pipe.distributed.program.plan import SharedParameter, Slot, first_holders, shared_slots
from scale_pipe.schedules.placement import Placement

_WHOLE = Share(1, 1, 1)


class _Copy(NamedTuple):
    """This rank's copy.

    Attributes:
        param: It, or the part of it that this replica has.
        standing: How its gradient stands after the last backward.
        stage: By which stage this rank stands among the holders.
        stages: Those of all holders, in order.
    """

    param: nn.Parameter
    standing: Standing
    stage: int
    stages: tuple[int, ...]


class _Part(NamedTuple):
    """What another holder has sent.

    Attributes:
        start: The first element of the parameter that it is of.
        stop: One past the last.
        ranges: Of a piece that is no range of elements, the indices of each dimension.
        reduced: When that holder averages over its replicas.
        grad: The gradient, [stop - start] elements in any shape.
    """

    start: int
    stop: int
    ranges: Ranges
    reduced: str
    grad: Tensor


Own = Mapping[str, tuple[nn.Parameter, Standing]]
"""By name, this rank's copies of shared parameters, and how their gradients stand."""


class Shared:
    """The shared parameters of one rank.

    Args:
        parameters: Of the model.
        placement: Which rank holds which stage.
        rank: This one.
        own: By name, this rank's copies.
    """

    def __init__(
        self,
        parameters: tuple[SharedParameter, ...],
        placement: Placement,
        rank: int,
        own: Own,
    ) -> None:
        self._copies: dict[str, _Copy] = {}
        self._aside: dict[str, Tensor | None] = {}
        self._unequal = parameters
        self._received: dict[str, Tensor] = {}
        for parameter in parameters:
            holders = first_holders(parameter, placement)
            if rank in holders:
                self._copies[parameter.name] = _Copy(*own[parameter.name], holders[rank], tuple(holders.values()))

    def look_again(self, own: Own) -> None:
        """Takes the copies as they are now: `load_state_dict(assign=True)` and wrappers put others in their places.

        Args:
            own: By name, this rank's copies.
        """
        self._copies = {
            name: copy._replace(param=own[name][0], standing=own[name][1]) for name, copy in self._copies.items()
        }

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """The copies that another rank counts: those of all holders but the first."""
        return {copy.param for copy in self._copies.values() if copy.stage != copy.stages[0]}

    def begin(self) -> None:
        """Keeps what was accumulated so far aside: it has been added up already."""
        self._aside = {name: copy.param.grad for name, copy in self._copies.items()}
        for copy in self._copies.values():
            copy.param.grad = None

    def message(self, name: str) -> Content | Share:
        """Returns what is sent: this rank's gradient, or word that there is none, or None in a content if it is frozen.

        Args:
            name: Of a parameter.
        """
        param, standing, _, _ = self._copies[name]
        if not param.requires_grad:
            return Content(*pack(None), _WHOLE)
        if param.grad is None:
            return _WHOLE
        return Content(
            *pack((standing.start, standing.stop, standing.ranges, standing.reduced.name, param.grad)), _WHOLE
        )

    def add(self, arrived: Mapping[Slot, Content], *, failed: bool = False, limit_seconds: float | None = None) -> None:
        """Adds up the gradients of all holders; where none has one, as of frozen parameters, there is none.

        Args:
            arrived: Those of the others that have one.
            failed: The step was given up here; the replicas of this rank's stages are told so.
            limit_seconds: How long to wait for a replica.

        Raises:
            RuntimeError: The step was given up in a replica; or stages are wrapped in ways that do not go together, or
                the parameter is frozen in some of them.
            TransferError: A replica did not come.
        """
        told = {(s.name, s.source): unpack(c.structure, list(c.tensors)) for s, c in arrived.items()}
        frozen = {place for place, part in told.items() if part is None}
        parts = {place: _Part(*part) for place, part in told.items() if part is not None}
        for name, copy in self._copies.items():
            others = {source: parts.get((name, source)) for source in copy.stages if source != copy.stage}
            if not failed:
                _check_frozen(name, copy, {source for source in others if (name, source) in frozen})
            grads = _parts_needed(name, copy, others, failed=failed, limit_seconds=limit_seconds)
            if failed and copy.standing.groups:
                break  # The replicas know it, and leave here, too.
            if failed:
                continue
            total: Tensor | None = None
            for source in copy.stages:
                part = copy.param.grad if source == copy.stage else grads[source]
                if part is not None:
                    total = part.clone() if total is None else total.add_(part)
            before = self._aside.pop(name)
            copy.param.grad = total if before is None else before if total is None else before.add_(total)

    @property
    def is_unequal(self) -> bool:
        """Whether there are copies here that have not got the values of the first one: they had no memory yet."""
        return bool(self._unequal or self._received)

    @torch.no_grad()
    def make_equal(self, links: Links, placement: Placement, rank: int) -> None:
        """Gives all holders the values of the first one, if they have not got them yet; all ranks call it together.

        Copies on the meta device have no values: where the first holder's is there, all try it again the next time;
        where another one's is there, it gets them then.

        Args:
            links: To the others.
            placement: Which rank holds which stage.
            rank: This one.

        Raises:
            LinkError: A rank did not come.
            ValueError: A copy has another shape.
        """
        if self._unequal:
            self._exchange_values(links, placement, rank)
        for name, value in list(self._received.items()):
            param = self._copies[name].param
            if param.is_meta:
                continue
            if param.shape != value.shape:
                raise ValueError(
                    f"{name} is one parameter with that of another stage and has the shape {list(value.shape)}, but is "
                    f"{list(param.shape)} here: give stages their values before you wrap them, and wrap them after the "
                    "pipeline was made"
                )
            param.copy_(self._received.pop(name))

    def _exchange_values(self, links: Links, placement: Placement, rank: int) -> None:
        first = {parameter.name: min(parameter.stages) for parameter in self._unequal}
        rank_of = placement.rank_of
        slots = [slot for slot in shared_slots(placement, self._unequal) if slot.source == first[slot.name]]
        coming = [slot for slot in slots if rank_of[slot.target] == rank]
        for slot in coming:
            links.post(slot, rank_of[slot.source])
        there: set[str] = set()
        for slot in slots:
            if rank_of[slot.source] == rank:
                value = self._copies[slot.name].param.detach()
                there |= {slot.name} if not value.is_meta else set()
                links.send(slot, rank_of[slot.target], _WHOLE if value.is_meta else Content(*pack(value), _WHOLE))
        for slot in coming:
            message = links.take(slot, rank_of[slot.source])
            if isinstance(message, Content):
                there.add(slot.name)
                self._received[slot.name] = message.tensors[0]
        links.finish()
        own = tuple(parameter for parameter in self._unequal if parameter.name in self._copies)
        self._unequal = tuple(parameter for parameter in own if parameter.name not in there)


def _parts_needed(
    name: str, copy: _Copy, others: Mapping[int, _Part | None], *, failed: bool, limit_seconds: float | None
) -> dict[int, Tensor | None]:
    """Returns what belongs to this rank's part of a parameter, of the gradients that other stages have sent.

    Args:
        name: Of the parameter.
        copy: This rank's.
        others: By stage, what its rank beside this one has sent.
        failed: The step was given up here.
        limit_seconds: How long to wait for a replica.

    Raises:
        RuntimeError: The step was given up in a replica; or stages are wrapped in ways that do not go together.
        TransferError: A replica did not come.
    """
    param, standing = copy.param, copy.standing
    if not failed:
        _check_together(name, copy, others)
    # Whether any replica needs what it has not got, and whether any has got something, of each stage.
    flags = [int(failed)]
    for part in others.values():
        flags += [int(part is not None and not _covers(part, standing)), int(part is not None)]
    for group in standing.groups:
        rows = exchange(flags, group, limit_seconds=limit_seconds)
        flags = [max(column) for column in zip(*rows, strict=True)]
    if flags[0]:
        if not failed:
            raise RuntimeError(f"replicas of stage {copy.stage} failed, which shares {name}")
        return {}
    found: dict[int, Tensor | None] = {}
    for (source, part), lacks, has in zip(others.items(), flags[1::2], flags[2::2], strict=True):
        if not has:
            found[source] = None
            continue
        start = 0 if part is None else part.start
        flat = None if part is None else part.grad.reshape(-1)
        if lacks or flat is None:
            whole = torch.zeros(standing.numel, dtype=param.dtype, device=param.device)
            if part is not None and flat is not None:
                whole[part.start : part.stop] = flat
            for group in standing.groups:
                all_reduce(whole, group).wait(limit_seconds)
            start, flat = 0, whole
        found[source] = flat[standing.start - start : standing.stop - start].view_as(param)
    return found


def _covers(part: _Part, standing: Standing) -> bool:
    within = part.start <= standing.start and standing.stop <= part.stop
    return standing.start == standing.stop or (within and part.ranges == standing.ranges)


def _check_frozen(name: str, copy: _Copy, others: set[int]) -> None:
    """A copy that is frozen alone computes no gradient, which would be missing in the sum."""
    frozen = sorted(others if copy.param.requires_grad else others | {copy.stage})
    if frozen and len(frozen) < len(copy.stages):
        raise RuntimeError(
            f"{name} is one parameter in the stages {list(copy.stages)}, but is frozen in {frozen} alone, whose part "
            f"of its gradient would be lost: write model.get_parameter('{name}').requires_grad_(False) before "
            "DistributedPipe(model, ...), or set requires_grad alike on the copies of all these stages"
        )


def _check_together(name: str, copy: _Copy, others: Mapping[int, _Part | None]) -> None:
    """Sums before and after the reduction can't be added: one of them is not averaged yet."""
    mine = copy.standing
    for stage, part in others.items():
        if part is None:
            continue
        ways = {mine.reduced, Reduced[part.reduced]}
        if Reduced.ON_CALL in ways and len(ways) > 1:
            raise RuntimeError(
                f"{name} is one parameter in stages {copy.stage} and {stage}, and their wrappers do not reduce its "
                "gradient at the same time: wrap both stages alike, in ShardedDataParallel or in another one"
            )
        can_be_gathered = mine.groups and not (mine.ranges or part.ranges)
        if not (can_be_gathered or _covers(part, mine)):
            raise RuntimeError(
                f"{name} is one parameter in stages {copy.stage} and {stage}; {stage} has other elements of it on "
                f"this rank's side of the pipeline ({part.start} to {part.stop} of {part.ranges or 'all'}) than "
                f"{copy.stage} needs ({mine.start} to {mine.stop} of {mine.ranges or 'all'}): wrap or divide both "
                "stages alike, as in fully_shard(stage, replicas)"
            )


# Which parameters of a rank are one with those of others: found by identity before the split, by name ever after.
#
# `load_state_dict(assign=True)`, `fully_shard` and values for stages on the meta device put other tensors in their
# places, so they are looked up anew before each step.


class Tied:
    """The shared parameters of one rank, by name.

    Args:
        places: By the name of a shared parameter and by stage, its name there.
        stages: Of this rank, as they were split.
    """

    def __init__(self, places: Mapping[str, Mapping[int, str]], stages: Mapping[int, nn.Module]) -> None:
        self._names = {
            name: plain_name(plain_names(stages[stage]), listed)
            for name, by_stage in places.items()
            for stage, listed in by_stage.items()
            if stage in stages
        }

    def now(self, pipe: nn.Module, stages: Mapping[int, nn.Module]) -> Own:
        """Returns this rank's copies, and how their gradients stand after the last backward.

        Args:
            pipe: Yields its parameters by plain names.
            stages: Of this rank, with whatever is around them.

        Raises:
            ValueError: A wrapper reduces the gradient of one so that it can't be added to those of other stages.
        """
        if not self._names:
            return {}
        listed = dict(pipe.named_parameters(remove_duplicate=False))
        found = {}
        for name, plain in self._names.items():
            param = listed.get(plain)
            holder = next((one for one in stages.values() if any(param is other for other in one.parameters())), None)
            standing = None if param is None or holder is None else standing_of(holder, param)
            if param is None or standing is None:
                raise ValueError(
                    f"{plain} is one parameter with that of another stage, whose gradients are added up after the last "
                    "backward, but a wrapper around it hides it, or reduces its gradient in a way of its own: use "
                    "fully_shard or FullyShardedDataParallel without flatten_parameters, ShardedDataParallel, or "
                    "torch's DistributedDataParallel; or wrap the modules beside it alone"
                )
            found[name] = param, standing
        return found
