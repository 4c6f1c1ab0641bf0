"""Full-parameter bucket: shards that are gathered into full parameters, each on one rank, for the step.

Muon, Adafactor and LAMB compute something else with a shard than with the full parameter. So before the step each rank
sends its shards of parameters and gradients to the parameters' owners; each owner steps on full parameters, and sends
the updated shards back: two collectives, whatever the optimizer does between them. (On DTensors each operation that
needs it gathers by itself: 15 times for each matrix in Muon.)

An optimizer's constructor may read the values of parameters, for example to build a mask. While it runs, all full
parameters of this rank have their values, and no gradients.

An owner could keep its full parameters between the steps and save the first third of the messages, but would hold as
many elements again as its shard, and a stale copy after every load. So only the state is kept, and otherwise full
parameters have memory only during the step: at most four times the elements of a bucket, parameters and gradients as
they are sent and as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from scale_core.comm.all_to_all import all_to_all
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.parameters import copy_attributes
from scale_core.shard import on_local_tensors, shard_of
from scale_oss.buckets.state_placement import Range, ShardedParam, StatePlacement


class FullParamBucket:
    """Parameters of one dtype and device, sharded over one group; each has one owner, which steps on it."""

    def __init__(self, shards: Sequence[ShardedParam], owners: Sequence[int], title: str, contract: Contract) -> None:
        self.group = shards[0].group
        self.params = [shard.param for shard in shards]
        self._pieces = [shard.ranges for shard in shards]
        self._title, self._contract = title, contract
        self._built_as = [(param.dtype, param.device) for param in self.params]
        self._with_grad: list[int] = []  # parameters that had a gradient in the last step
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
        return [placement.optimizer_param for placement in self.placements if placement.optimizer_param is not None]

    @on_local_tensors
    def gather_params(self) -> None:
        """Sends all shards to their owners, without gradients, until `release`; all ranks call it together."""
        if any(param.is_meta for param in self.params):
            return  # They have no values yet.
        self._gather("gather parameters", range(len(self.params)), with_grads=False)

    @on_local_tensors
    def prepare(self) -> None:
        """Checks which parameters have a gradient; changes nothing."""
        self._check_params()
        with_grad = [index for index, param in enumerate(self.params) if param.grad is not None]
        if with_grad != self._with_grad:  # The ranks compare whenever it changes.
            has = set(with_grad)
            lines = [f"'{p.name}' has {'a' if i in has else 'no'} gradient" for i, p in enumerate(self.placements)]
            self._contract.check_equal(f"the gradients that OSS steps with, in {self._title}", lines)
            self._with_grad = with_grad

    @on_local_tensors
    def gather_to_owners(self) -> bool:
        """Sends the shards that have a gradient to their owners, with their gradients."""
        if not self._with_grad:
            return False
        self._gather("gather to owners", self._with_grad, with_grads=True)
        return True

    def _gather(self, phase: str, indices: Sequence[int], *, with_grads: bool) -> None:
        factor = 2 if with_grads else 1
        sent = [tensor for index in self._by_owner(indices) for tensor in _flat(self.params[index], with_grads)]
        input_sizes = [factor * size for size in self._sizes_by_owner(indices)]
        output_sizes = [factor * size for size in self._sizes_by_peer(indices)]
        received = self._exchange(phase, indices, _concat(sent, self.params[0]), input_sizes, output_sizes)
        shards_by_peer = list(received.split(output_sizes))
        for index in self._owned(indices):
            full_param = self._full_param(index)
            full_param.untyped_storage().resize_(full_param.numel() * full_param.itemsize)
            targets = [full_param.data]
            if with_grads:
                full_param.grad = torch.empty_like(full_param)
                targets.append(full_param.grad)
            for peer, shard_range in enumerate(self._pieces[index]):
                for target in targets:  # Each shard is taken from the beginning of its rank's message.
                    target.view(-1)[slice(*shard_range)] = shards_by_peer[peer][: shard_range.numel]
                    shards_by_peer[peer] = shards_by_peer[peer][shard_range.numel :]

    @on_local_tensors
    def scatter_to_shards(self) -> None:
        """Sends the updated shards back, and frees the full parameters."""
        sent = [
            self._full_param(index).detach().view(-1)[slice(*self._pieces[index][peer])]
            for peer in range(self.group.size)
            for index in self._owned(self._with_grad)
        ]
        source = _concat(sent, self.params[0])
        self.release()
        sizes = self._sizes_by_peer(self._with_grad), self._sizes_by_owner(self._with_grad)
        received = self._exchange("scatter to shards", self._with_grad, source, *sizes)
        offset = 0
        for index in self._by_owner(self._with_grad):
            param = self.params[index]
            param.data.copy_(received[offset : offset + param.numel()].view(param.shape))
            offset += param.numel()
        # Gathered copies are stale now, on all ranks, whatever a rank holds of them.
        increment_version([self.params[index] for index in self._with_grad])

    def release(self) -> None:
        for full_param in self.optimizer_params:
            full_param.grad = None
            full_param.untyped_storage().resize_(0)

    # A message holds one rank's shards, one parameter after the other, in the order of the bucket.

    def _by_owner(self, indices: Sequence[int]) -> list[int]:
        """The parameters that are sent, in the order of their owners."""
        return sorted(indices, key=lambda index: (self.placements[index].owner, index))

    def _owned(self, indices: Sequence[int]) -> list[int]:
        """The parameters that this rank owns."""
        return [index for index in indices if self.placements[index].owner == self.group.rank]

    def _sizes_by_owner(self, indices: Sequence[int]) -> list[int]:
        """Elements that this rank holds of the parameters of each owner."""
        sizes = [0] * self.group.size
        for index in indices:
            owner = self.placements[index].owner
            assert owner is not None
            sizes[owner] += self._pieces[index][self.group.rank].numel
        return sizes

    def _sizes_by_peer(self, indices: Sequence[int]) -> list[int]:
        """Elements that each rank holds of this rank's parameters."""
        owned = self._owned(indices)
        return [sum(self._pieces[index][peer].numel for index in owned) for peer in range(self.group.size)]

    def _exchange(
        self,
        phase: str,
        indices: Sequence[int],
        source: Tensor,
        input_sizes: Sequence[int],
        output_sizes: Sequence[int],
    ) -> Tensor:
        """All-to-all of `source`, [sum of `input_sizes`]; returns [sum of `output_sizes`]."""
        event = Event(phase, self._title if len(indices) == len(self.params) else f"{self._title}, {indices}")
        target = source.new_empty(sum(output_sizes))
        sizes = {"output_sizes": output_sizes, "input_sizes": input_sizes}
        pending = all_to_all(target, source, self.group, **sizes, tag=message_tag(event))
        del source  # The transfer frees it.
        with self._contract.waiting(event):
            return pending.wait(self._contract.limit_seconds)

    def _full_param(self, index: int) -> nn.Parameter:
        full_param = self.placements[index].optimizer_param
        assert full_param is not None, "only its owner has a full parameter"
        return full_param

    def _check_params(self) -> None:
        for param, placement, pieces, (dtype, device) in zip(
            self.params, self.placements, self._pieces, self._built_as, strict=True
        ):
            shard = shard_of(param)
            local_range = None if shard is None else Range(shard.start, shard.stop)
            if local_range != pieces[self.group.rank] or (param.dtype, param.device) != (dtype, device):
                raise RuntimeError(
                    f"'{placement.name}' was {_describe(pieces[self.group.rank], dtype, device)} when OSS was built, "
                    f"and is {_describe(local_range, param.dtype, param.device)} now: convert, move or shard the model "
                    "first, then build OSS(model.parameters(), ...)"
                )


def _flat(param: nn.Parameter, with_grad: bool) -> list[Tensor]:
    """A shard and, if asked for, its gradient, each [numel], in the parameter's dtype."""
    tensors: list[Tensor] = [param]
    if with_grad:
        assert param.grad is not None
        tensors.append(param.grad)
    return [tensor.detach().reshape(-1).to(param.dtype) for tensor in tensors]


def _concat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(tensors)) if tensors else like.detach().new_empty(0)


def _unallocated(shard: ShardedParam) -> nn.Parameter:
    """A parameter of the full shape whose storage is empty outside of a step.

    Each has its own storage, aligned as any tensor's: libraries may compute otherwise from another alignment.
    """
    full_size = torch.empty(shard.shape, dtype=shard.param.dtype, device=shard.param.device)
    full_size.untyped_storage().resize_(0)
    full = nn.Parameter(full_size)
    copy_attributes(shard.param, full)
    return full


def _describe(held: Range | None, dtype: torch.dtype, device: torch.device) -> str:
    elements = "none of the model's" if held is None else f"elements {held.start:,} to {held.stop:,}"
    return f"{elements} in {dtype} on {device}"
