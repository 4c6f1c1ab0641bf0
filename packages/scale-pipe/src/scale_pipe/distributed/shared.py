"""Parameters that several stages hold, as tied embeddings: one tensor in the model, a copy on each rank here.

Copies begin equal and get equal gradients, so optimizers that are set up alike keep them equal. The gradient of each is
the sum of what all holders have computed, added up in the order of their stages: the same to the bit on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scale_pipe.distributed.links import Links
from scale_pipe.distributed.messages import Content, Share, pack
from scale_pipe.distributed.plan import SharedParameter, Slot, first_holders, shared_slots
from scale_pipe.schedules.placement import Placement

_WHOLE = Share(1, 1, 1)


class _Copy(NamedTuple):
    """This rank's copy.

    Attributes:
        param: It.
        stage: By which stage this rank stands among the holders.
        stages: Those of all holders, in order.
    """

    param: nn.Parameter
    stage: int
    stages: tuple[int, ...]


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
        own: Mapping[str, nn.Parameter],
    ) -> None:
        self._copies: dict[str, _Copy] = {}
        self._aside: dict[str, Tensor | None] = {}
        for parameter in parameters:
            holders = first_holders(parameter, placement)
            if rank in holders:
                self._copies[parameter.name] = _Copy(own[parameter.name], holders[rank], tuple(holders.values()))

    def look_again(self, own: Mapping[str, nn.Parameter]) -> None:
        """Takes the copies as they are now: `load_state_dict(assign=True)` and wrappers put others in their places.

        Args:
            own: By name, this rank's copies.
        """
        self._copies = {name: copy._replace(param=own[name]) for name, copy in self._copies.items()}

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """The copies that another rank counts: those of all holders but the first."""
        return {copy.param for copy in self._copies.values() if copy.stage != copy.stages[0]}

    def begin(self) -> None:
        """Keeps what was accumulated so far aside: it has been added up already."""
        self._aside = {name: copy.param.grad for name, copy in self._copies.items()}
        for copy in self._copies.values():
            copy.param.grad = None

    def message(self, name: str) -> Content | Share:
        """Returns what is sent: this rank's gradient, or word that there is none.

        Args:
            name: Of a parameter.
        """
        grad = self._copies[name].param.grad
        return _WHOLE if grad is None else Content(*pack(grad), _WHOLE)

    def add(self, arrived: Mapping[Slot, Content]) -> None:
        """Adds up the gradients of all holders; where none has one, as of frozen parameters, there is none.

        Args:
            arrived: Those of the others that have one.
        """
        others = {(slot.name, slot.source): content.tensors[0] for slot, content in arrived.items()}
        for name, (param, stage, stages) in self._copies.items():
            total: Tensor | None = None
            for source in stages:
                part = param.grad if source == stage else others.get((name, source))
                if part is not None:
                    total = part.clone() if total is None else total.add_(part)
            before = self._aside.pop(name)
            param.grad = total if before is None else before if total is None else before.add_(total)

    @torch.no_grad()
    def make_equal(
        self, links: Links, placement: Placement, rank: int, parameters: tuple[SharedParameter, ...]
    ) -> None:
        """Gives all holders the values of the first one; all ranks call it together.

        Args:
            links: To the others.
            placement: Which rank holds which stage.
            rank: This one.
            parameters: Of the model.

        Raises:
            LinkError: A rank did not come.
        """
        first = {parameter.name: min(parameter.stages) for parameter in parameters}
        rank_of = placement.rank_of
        slots = [slot for slot in shared_slots(placement, parameters) if slot.source == first[slot.name]]
        coming = [slot for slot in slots if rank_of[slot.target] == rank]
        for slot in coming:
            links.post(slot, rank_of[slot.source])
        for slot in slots:
            if rank_of[slot.source] == rank:
                value = self._copies[slot.name].param.detach()
                nothing = value.is_meta
                links.send(slot, rank_of[slot.target], _WHOLE if nothing else Content(*pack(value), _WHOLE))
        for slot in coming:
            message, param = links.take(slot, rank_of[slot.source]), self._copies[slot.name].param
            if isinstance(message, Content) and not param.is_meta:
                param.copy_(message.tensors[0])
        links.finish()
