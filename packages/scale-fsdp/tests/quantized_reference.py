"""A plain model on one process whose weights and gradients are rounded as `CommunicationPolicy` says, by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from fsdp_cases import loss_of
from torch import Tensor, nn

from scale_core.flat.buffer import FlatBuffer
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.transports.blocks import BlockFormat, dequantize, quantize
from scale_fsdp.transports.policy import wire_formats


def num_senders(buffer: FlatBuffer) -> int:
    """Between how many ranks quantized values are sent: all that share the shards, or one of each node."""
    nodes = buffer.groups.nodes
    return buffer.group.size if nodes is None else nodes.inter_node.size


def rounded(values: Tensor, block_format: BlockFormat) -> Tensor:
    """What arrives of each row [..., n]."""
    rows = values.reshape(-1, values.shape[-1])
    return dequantize(quantize(rows, block_format), rows.shape[1], block_format).view(values.shape)


def added(parts: Sequence[Tensor]) -> Tensor:
    """In their order."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


class QuantizedReference:
    """Trains `plain` as all ranks together train `model`; each rank holds one, and computes what all ranks do.

    Args:
        plain: The model with the weights that the shards begin with.
        model: The sharded model: its layouts say which elements stand in one message.
        param_dtype: Of the computation.
        reduce_dtype: Of gradients before they are rounded.
    """

    def __init__(self, plain: nn.Module, model: nn.Module, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        self.plain, self.param_dtype, self.reduce_dtype = plain, param_dtype, reduce_dtype
        self.buffers = [buffer for unit in units_in(model) for buffer in unit.buffers]
        self.params = dict(plain.named_parameters())
        groups = self.buffers[0].groups
        self.shards, self.replicas = groups.shard.size, groups.replicas.size
        self.errors: dict[tuple[str, str, int], Tensor] = {}  # by buffer, stage and rank, of gradients not scaled
        self.scale: float = 1.0  # by which losses are multiplied

    def step(
        self, batches: Sequence[Sequence[Tensor]], no_sync: bool, factors: Mapping[int, float] = MappingProxyType({})
    ) -> list[list[float]]:
        """Puts the gradients of one step into the plain model; returns the losses, by rank and micro-batch.

        `factors` are what the losses of some ranks are multiplied by beside the scale.
        """
        replica = copy.deepcopy(self.plain)
        for buffer in self.buffers:
            self._load_weights(replica, buffer)
        losses: list[list[float]] = [[] for _ in batches]
        self.plain.zero_grad()
        grads = [
            [self._alone(replica, data, losses[rank], self.scale * factors.get(rank, 1.0)) for data in own]
            for rank, own in enumerate(batches)
        ]
        if no_sync:
            grads = [[{name: added([g[name].float() for g in own]) for name in own[0]}] for own in grads]
        for per_rank in zip(*grads, strict=True):
            for buffer in self.buffers:
                self._reduce(buffer, [self._flat(buffer, named) for named in per_rank])
        return losses

    def _load_weights(self, replica: nn.Module, buffer: FlatBuffer) -> None:
        full = self._flat(buffer, {name: self.params[name].detach() for name in buffer.names})
        wire = wire_formats(buffer)
        if wire is not None and wire.gather is not None and num_senders(buffer) > 1:
            full = rounded(full.view(self.shards, -1), wire.gather).view(-1)
        params = dict(replica.named_parameters())
        for name, entry in zip(buffer.names, buffer.layout.entries, strict=True):
            whole = full[entry.offset : entry.offset + entry.numel].view(entry.shape)
            params[name].data = whole.to(self.param_dtype)

    def _alone(self, replica: nn.Module, data: Tensor, losses: list[float], factor: float) -> dict[str, Tensor]:
        replica.zero_grad()
        loss = loss_of(replica(data.to(self.param_dtype) if data.is_floating_point() else data))
        (loss * factor).backward()
        losses.append(loss.item())
        return {name: param.grad for name, param in replica.named_parameters()}

    def _flat(self, buffer: FlatBuffer, named: dict[str, Tensor]) -> Tensor:
        full = torch.zeros(buffer.layout.full_numel, dtype=named[buffer.names[0]].dtype)
        for name, entry in zip(buffer.names, buffer.layout.entries, strict=True):
            full[entry.offset : entry.offset + entry.numel] = named[name].reshape(-1)
        return full

    def _reduce(self, buffer: FlatBuffer, flats: Sequence[Tensor]) -> None:
        """Adds the averages of all ranks' [W * S] to the plain gradients."""
        flats = [flat.to(self.reduce_dtype) for flat in flats]
        rows = [flats[first : first + self.shards] for first in range(0, len(flats), self.shards)]
        means = [self._mean_of_shards(buffer, row) for row in rows]  # [W, S] for each replica of the model
        if self.replicas > 1:
            means = [self._mean_of_replicas(buffer, torch.stack(means))]
        for name, entry in zip(buffer.names, buffer.layout.entries, strict=True):
            mean = means[0].view(-1)[entry.offset : entry.offset + entry.numel].view(entry.shape)
            param = self.params[name]
            param.grad = mean.clone() if param.grad is None else param.grad + mean

    def _mean_of_shards(self, buffer: FlatBuffer, flats: Sequence[Tensor]) -> Tensor:
        parts = [flat.view(self.shards, -1).float() for flat in flats]
        wire, nodes = wire_formats(buffer), buffer.groups.nodes
        if wire is None or wire.reduce is None or num_senders(buffer) == 1:
            return added(parts) / self.shards
        size = 1 if nodes is None else nodes.intra_node.size
        means = []
        for rank in range(self.shards):  # [N, S]: what this rank has for each node, of the ranks of its own.
            first = rank - rank % size
            means.append(added([part[rank % size :: size] for part in parts[first : first + size]]) / size)
        result = []
        for rank in range(self.shards):
            among = range(rank % size, self.shards, size)
            sent = [self._sent(buffer, "reduce", peer, means[peer], peer // size, wire.reduce) for peer in among]
            result.append(added([part[rank // size] for part in sent]) / len(among))
        self._commit(buffer, "reduce")
        return torch.stack(result)

    def _sent(
        self, buffer: FlatBuffer, stage: str, rank: int, values: Tensor, own: int, block_format: BlockFormat
    ) -> Tensor:
        """What arrives of one rank's [N, S], and its own row as it is; keeps the error."""
        wire = wire_formats(buffer)
        assert wire is not None
        values = values + self.errors.get((buffer.names[0], stage, rank), 0) * self.scale
        arrives = rounded(values, block_format)
        arrives[own] = values[own]
        if wire.error_feedback:
            self.errors[buffer.names[0], f"{stage} next", rank] = (values - arrives) / self.scale
        return arrives

    def _commit(self, buffer: FlatBuffer, stage: str) -> None:
        for key in [key for key in self.errors if key[:2] == (buffer.names[0], f"{stage} next")]:
            self.errors[key[0], stage, key[2]] = self.errors.pop(key)

    def _mean_of_replicas(self, buffer: FlatBuffer, means: Tensor) -> Tensor:
        """[R, W, S] -> [W, S]."""
        wire = wire_formats(buffer)
        if wire is None or wire.replicate is None:
            return added(list(means)) / self.replicas
        result = []
        for place in range(self.shards):
            numel = means.shape[2]
            size = -(-numel // self.replicas)
            padded = torch.nn.functional.pad(means[:, place], (0, size * self.replicas - numel))
            parts = padded.view(self.replicas, self.replicas, size)
            stage = f"replicate {place}"
            sent = [self._sent(buffer, stage, r, parts[r], r, wire.replicate) for r in range(self.replicas)]
            mean = torch.stack([added([part[r] for part in sent]) / self.replicas for r in range(self.replicas)])
            key = buffer.names[0], f"{stage} gather", 0
            mean = mean + self.errors.get(key, 0) * self.scale
            arrives = rounded(mean, wire.replicate)
            if wire.error_feedback:
                self.errors[key] = (mean - arrives) / self.scale
            self._commit(buffer, stage)
            result.append(arrives.view(-1)[:numel])
        return torch.stack(result)
