"""One bucket: parameters that the ranks hold in pieces, each of which is whole on one rank for the step.

Muon, Adafactor, LAMB and their like compute something else with a piece than with the whole. So before the step each
rank sends its pieces of the parameters and of their gradients to the parameters' owners; each owner steps on whole
tensors, as one process would; and sends the updated pieces back: two collectives, whatever the optimizer does between
them. (An optimizer on tensors that gather themselves, such as DTensors, gathers in each operation that needs it: 15
times for each matrix in Muon.)

An owner could keep its parameters whole between the steps and save the first third of what is sent. It would hold as
many elements again as its shard, for good, and a stale copy after anybody has loaded or changed the parameters. So it
keeps the state alone, and its whole tensors have memory only while it steps: beside what a rank has anyway, there are
at most four times the elements of a bucket, its parameters and gradients as they are sent and as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from scale_core.comm.collectives import all_to_all
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.shard import shard_of
from scale_oss.state_placement import Range, ShardedParam, StatePlacement


class FullParamBucket:
    """Parameters of one dtype and device, in pieces on the ranks of one group; each has one owner.

    Args:
        shards: The parameters.
        owners: The rank of the group that steps on each.
        title: What errors call the bucket.
        contract: What the ranks have promised each other.

    Attributes:
        params: This rank's pieces, as the user's model has them.
        placements: Where the state of each is kept: by its owner.
    """

    def __init__(self, shards: Sequence[ShardedParam], owners: Sequence[int], title: str, contract: Contract) -> None:
        self.group = shards[0].group
        self.params = [shard.param for shard in shards]
        self._pieces = [shard.ranges for shard in shards]
        self._title, self._contract = title, contract
        self._built_as = [(param.dtype, param.device) for param in self.params]
        self._with_grad: list[int] = []  # which parameters have had a gradient in the last step
        self.placements = [
            StatePlacement(
                shard.param,
                shard.name,
                shard.shape,
                tuple(Range(0, shard.numel if rank == owner else 0) for rank in range(self.group.size)),
                owner,
                self.group,
                _unallocated(shard) if owner == self.group.rank else None,
            )
            for shard, owner in zip(shards, owners, strict=True)
        ]

    @property
    def optimizer_params(self) -> list[nn.Parameter]:
        """What this rank's optimizer steps on: what it owns."""
        return [placement.optimizer_param for placement in self.placements if placement.optimizer_param is not None]

    def prepare(self) -> None:
        """Looks at which parameters have a gradient; nothing is changed yet.

        Raises:
            RuntimeError: A parameter is no longer what it was.
            ContractError: The ranks have gradients of different parameters.
        """
        self._check_params()
        given = [index for index, param in enumerate(self.params) if param.grad is not None]
        if given != self._with_grad:  # All ranks must send the same: they compare when it is not the same as last time.
            has = set(given)
            lines = [f"'{p.name}' has {'a' if i in has else 'no'} gradient" for i, p in enumerate(self.placements)]
            self._contract.agree(f"the gradients that OSS steps with, in {self._title}", lines)
            self._with_grad = given

    def gather_to_owners(self) -> bool:
        """Brings the parameters that have a gradient to their owners, with their gradients, in their full shapes.

        Returns:
            Whether there are any; the answer is the same on all ranks.

        Raises:
            RuntimeError: The ranks have lost each other.
        """
        if not self._with_grad:
            return False
        sent = [tensor for index in self._by_owner() for tensor in _flat_with_grad(self.params[index])]
        input_sizes = [2 * size for size in self._sizes_by_owner()]
        output_sizes = [2 * size for size in self._sizes_by_peer()]
        received = self._exchange(
            "tensors on their way to owners", _concat(sent, self.params[0]), input_sizes, output_sizes
        )
        parts = list(received.split(output_sizes))
        for index in self._owned():
            self._fill(index, parts)
        return True

    def scatter_to_shards(self) -> None:
        """Sends the updated pieces to those who hold them; the whole tensors have no memory any more then.

        Raises:
            RuntimeError: The ranks have lost each other.
        """
        sent = [
            self._full_param(index).detach().view(-1)[slice(*self._pieces[index][peer])]
            for peer in range(self.group.size)
            for index in self._owned()
        ]
        source = _concat(sent, self.params[0])
        self.release()
        received = self._exchange("updated pieces", source, self._sizes_by_peer(), self._sizes_by_owner())
        place = 0
        for index in self._by_owner():
            param = self.params[index]
            param.data.copy_(received[place : place + param.numel()].view(param.shape))
            place += param.numel()
        # Who has gathered them must see that they have changed, on all ranks alike, whatever a rank holds of them.
        increment_version([self.params[index] for index in self._with_grad])

    def release(self) -> None:
        """Frees the whole tensors and their gradients."""
        for whole in self.optimizer_params:
            whole.grad = None
            whole.untyped_storage().resize_(0)

    # What travels. A message holds one rank's pieces, one parameter after the other, in the order of the bucket.

    def _by_owner(self) -> list[int]:
        """The parameters that travel, in the order of their owners."""
        return sorted(self._with_grad, key=lambda index: (self.placements[index].owner, index))

    def _owned(self) -> list[int]:
        """Those of them that are this rank's."""
        return [index for index in self._with_grad if self.placements[index].owner == self.group.rank]

    def _sizes_by_owner(self) -> list[int]:
        """How many elements this rank holds of what each rank owns."""
        sizes = [0] * self.group.size
        for index in self._with_grad:
            owner = self.placements[index].owner
            assert owner is not None
            sizes[owner] += self._pieces[index][self.group.rank].numel
        return sizes

    def _sizes_by_peer(self) -> list[int]:
        """How many elements each rank holds of what this rank owns."""
        return [sum(self._pieces[index][peer].numel for index in self._owned()) for peer in range(self.group.size)]

    def _exchange(self, phase: str, source: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> Tensor:
        """Sends each rank its part of `source`, [sum of `input_sizes`]; [sum of `output_sizes`] come back."""
        event = Event(
            phase, self._title if len(self._with_grad) == len(self.params) else f"{self._title}, {self._with_grad}"
        )
        target = source.new_empty(sum(output_sizes))
        sizes = {"output_sizes": output_sizes, "input_sizes": input_sizes}
        pending = all_to_all(target, source, self.group, **sizes, tag=message_tag(event))
        del source  # It belongs to the transfer, which frees it.
        with self._contract.waiting(event):
            return pending.wait(self._contract.limit_seconds)

    def _fill(self, index: int, parts: list[Tensor]) -> None:
        """Puts a parameter and its gradient together, from what stands first in each rank's part, and takes it away."""
        whole = self._full_param(index)
        whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
        whole.grad = torch.empty_like(whole)
        for peer, held in enumerate(self._pieces[index]):
            for target in (whole.data, whole.grad):
                target.view(-1)[slice(*held)] = parts[peer][: held.numel]
                parts[peer] = parts[peer][held.numel :]

    def _full_param(self, index: int) -> nn.Parameter:
        whole = self.placements[index].optimizer_param
        assert whole is not None, "only its owner has a parameter as a whole"
        return whole

    def _check_params(self) -> None:
        for param, placement, pieces, (dtype, device) in zip(
            self.params, self.placements, self._pieces, self._built_as, strict=True
        ):
            shard = shard_of(param)
            held = None if shard is None else Range(shard.start, shard.stop)
            if held != pieces[self.group.rank] or (param.dtype, param.device) != (dtype, device):
                raise RuntimeError(
                    f"'{placement.name}' was {_describe(pieces[self.group.rank], dtype, device)} when OSS was built, and "
                    f"is {_describe(held, param.dtype, param.device)} now: convert, move or shard the model first, "
                    "then build OSS(model.parameters(), ...)"
                )


def _flat_with_grad(param: nn.Parameter) -> list[Tensor]:
    """A piece and its gradient, each [numel], in the parameter's dtype."""
    assert param.grad is not None
    return [tensor.detach().reshape(-1).to(param.dtype) for tensor in (param, param.grad)]


def _concat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(tensors)) if tensors else like.detach().new_empty(0)


def _unallocated(shard: ShardedParam) -> nn.Parameter:
    """A parameter of the full shape, whose storage is empty but for the time of a step.

    Each has a storage of its own, aligned as any tensor's: libraries may compute otherwise from another alignment.
    """
    whole = torch.empty(shard.shape, dtype=shard.param.dtype, device=shard.param.device)
    whole.untyped_storage().resize_(0)
    return nn.Parameter(whole)


def _describe(held: Range | None, dtype: torch.dtype, device: torch.device) -> str:
    elements = "none of the model's" if held is None else f"elements {held.start:,} to {held.stop:,}"
    return f"{elements} in {dtype} on {device}"
