"""Finds tensors that must be equal on several ranks and are not: replicas, copies of shards, buffers, inputs.

Nothing else notices where ranks come apart: each goes on with values of its own, and only the results get worse. So
the bits of each tensor are summed up, and the sums are compared: if two ranks hold the same part of the same
parameter has to be the same. `shard_of` says which part that is, so any mixture of techniques is compared in one call.

The sums of a tensor are over the rows and the columns of a square of its words (as 64-bit integers, so that they
are exact in any order, and NaN is a value like others). Two reads of the memory are all that it takes; one changed
value, or two that are swapped, change a sum.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import broadcast, exchange, fingerprint_of
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.consistency.all_ranks import all_gather_json
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event
from scale_core.consistency.flight_recorder import by_rank
from scale_core.errors import DivergenceError, recovery_hint
from scale_core.shard import Placement, names_of_stages, on_local_tensors, shard_of, stages_of, wait_for

EVERY_VARIABLE = "SCALE_CHECK_REPLICAS_EVERY"
"""The environment variable that says how often techniques compare replicas by themselves, in steps; 0 is never."""

_DEFAULT_EVERY = 100
_SMALL_WORDS = 64  # Tensors of so few words are compared word by word.
_NAMED = 3  # in an error
_MASK = (1 << 62) - 1
_COMPARISON = "the comparison of what must be equal"


@checked_arguments
def check_replicas(
    model: nn.Module | Iterable[tuple[str, Tensor]],
    process_group: GroupLike = None,
    *,
    buffers: bool = True,
    step: int = 0,
    limit_seconds: float | None = None,
) -> None:
    """Checks that ranks which hold the same parameters hold the same values; all ranks of the group call it together.

    It compares bits of buffers, of undivided parameters, of parameters that several pipeline stages share, and of equal
    pieces of divided parameters, for example in hybrid sharding. It costs two reads of their memory, one small message,
    and on an accelerator one wait for it.

        >>> import torch
        >>> from scale_core import check_replicas
        >>> model = torch.nn.Linear(4, 2)
        >>> check_replicas(model, step=100)  # in a loop: if step % 100 == 0

    Args:
        model: The model, between two steps. If only some of its parameters are the same on all ranks, pass pairs of a
            name and a tensor, of any shape and dtype. Meta tensors and DTensors are left out.
        process_group: The ranks; None is the default group.
        buffers: Also compare the model's buffers, except running statistics of batch and instance norms, because each
            rank has those of its batches.
        step: The step, for the error.
        limit_seconds: The longest wait for a rank; None is the group's own limit, at most ten minutes.

    Raises:
        DivergenceError: On all ranks: some differ. It names the parameters and the ranks.
        ScaleDistributedError: A rank did not come.

    See also: [the guide to debugging](../guides/debugging.md).
    """
    named = named_replicas(model, buffers=buffers) if isinstance(model, nn.Module) else list(model)
    compare_replicas(named, Contract(group_of(process_group), limit_seconds), step)


def check_interval(every: int | None) -> int:
    """Returns after how many steps replicas are compared: as asked for, or by `SCALE_CHECK_REPLICAS_EVERY`, or 100.

    Raises ValueError if the value is not a number of steps.
    """
    asked: int | str = os.environ.get(EVERY_VARIABLE, _DEFAULT_EVERY) if every is None else every
    if isinstance(asked, bool) or not str(asked).isdecimal():
        name = EVERY_VARIABLE if every is None else "check_replicas_every"
        raise ValueError(f"expected a number of steps in {name}, got {asked!r}: 0 is never")
    return int(asked)


def named_replicas(model: nn.Module, *, buffers: bool) -> list[tuple[str, Tensor]]:
    """A model's parameters, and its buffers that are not running statistics, by name."""
    return [*model.named_parameters(), *(named_buffers(model) if buffers else ())]


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """A model's buffers that are not running statistics of batch or instance norms, by name."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    statistics = {id(buffer) for module in norms for buffer in module.buffers(recurse=False)}
    return [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in statistics]


@torch.no_grad()
@on_local_tensors
def compare_replicas(named: Sequence[tuple[str, Tensor]], contract: Contract, step: int) -> None:
    """Compares tensors by name between the ranks of a contract: see `check_replicas`."""
    if contract.is_single_rank or contract.group.backend == "fake" or compat.active_fake_mode() is not None:
        return
    wait_for(*(tensor for _, tensor in named))
    pieces = list(_pieces(named))
    digests = digests_of([piece.tensor for piece in pieces])
    keys = [piece.key for piece in pieces]
    with contract.waiting(_COMPARISON):
        summary = [len(keys), fingerprint_of(*keys, *digests)]
        rows = exchange(summary, contract.group, limit_seconds=contract.limit_seconds)
        if all(row == rows[0] for row in rows):
            return
        # Ranks that hold different pieces, or a difference: then piece by piece.
        longest = max(row[0] for row in rows)
        padding = [0] * (longest - len(keys))
        record = [*keys, *padding, *digests, *padding]
        rows = exchange(record, contract.group, limit_seconds=contract.limit_seconds)
    held: dict[int, dict[int, int]] = {}  # the digest of each piece, by rank
    for rank, row in enumerate(rows):
        for key, digest in zip(row[:longest], row[longest:], strict=True):
            if key:
                held.setdefault(key, {})[rank] = digest
    diverged = [key for key, digest_by_rank in held.items() if len(set(digest_by_rank.values())) > 1]
    if diverged:
        here = {piece.key: piece.title for piece in pieces}
        titles = all_gather_json([here.get(key, "") for key in diverged], contract, _COMPARISON)
        named_by_rank = [next(filter(None, names)) for names in zip(*titles, strict=True)]
        found = [Divergence(name, held[key]) for name, key in zip(named_by_rank, diverged, strict=True)]
        raise divergence_error(found, len(held), step)


@torch.no_grad()
def compare_inputs(tensors: Sequence[tuple[str, Tensor]], module: str, group: Group) -> None:
    """Compares the inputs of a module, by name, if all ranks of the group must have the same.

    Raises DivergenceError on all of them, with the first place that differs and each rank's value there.
    """
    contract = Contract(group)
    digests = digests_of([tensor for _, tensor in tensors])
    event = Event("the comparison of inputs", module)
    with contract.waiting(event):
        rows = exchange([fingerprint_of(*digests)], group, limit_seconds=contract.limit_seconds)
        if all(row == rows[0] for row in rows):
            return
    mine = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    names_by_rank = all_gather_json(mine, contract, event)
    if any(names != names_by_rank[0] for names in names_by_rank):
        found = by_rank([", ".join(names) or "no tensors" for names in names_by_rank])
    else:
        by_tensor = zip(*all_gather_json(digests, contract, event), strict=True)
        number = next(number for number, found in enumerate(by_tensor) if len(set(found)) > 1)
        found = f"{mine[number]}, first {_first_difference(tensors[number][1], contract, event)}"
    raise DivergenceError(
        f"'{module}' is given other inputs on some of the ranks {list(group.ranks)}, which must all be given the same: "
        f"{found}. Give all ranks that share one copy of the model the same batch, as by seeding the sampler with the "
        "number of the copy and not with the rank; where the batch is the same, a module before this one computes "
        "with random numbers or parameters of the rank's own",
        names=(module,),
    )


def _first_difference(tensor: Tensor, contract: Contract, event: Event) -> str:
    """The first place where a tensor of one shape and dtype differs between the ranks, and all values there."""
    values = tensor.detach().contiguous().reshape(-1)
    first = values.clone()
    with contract.waiting(event):
        broadcast(first.view(torch.uint8), contract.group).wait(contract.limit_seconds)
    differs = (values.view(torch.uint8) != first.view(torch.uint8)).view(values.numel(), -1).any(1)
    place = int(differs.nonzero()[0]) if differs.any() else values.numel()
    place = min(all_gather_json(place, contract, event))
    found = all_gather_json(str(values[place].item()), contract, event)
    index = [int(each) for each in torch.unravel_index(torch.tensor(place), tensor.shape)]
    return f"at {index}: {'; '.join(f'rank {rank}: {value}' for rank, value in enumerate(found))}"


class _Piece(NamedTuple):
    """The elements of a tensor that this rank holds."""

    title: str
    tensor: Tensor
    key: int  # of the same elements of the same tensor on all ranks; not 0


class Divergence(NamedTuple):
    """A piece that ranks hold with different values."""

    title: str
    digests: dict[int, int]  # by rank

    @property
    def ranks_by_values(self) -> list[list[int]]:
        """The ranks that agree with each other, most of them first."""
        by_digest: dict[int, list[int]] = {}
        for rank, digest in self.digests.items():
            by_digest.setdefault(digest, []).append(rank)
        return sorted(by_digest.values(), key=lambda ranks: (-len(ranks), ranks))

    def __str__(self) -> str:
        most, *others = (", ".join(map(str, ranks)) for ranks in self.ranks_by_values)
        if "," not in most:  # Nobody is in the majority.
            return f"{self.title}: each of the ranks {', '.join(map(str, self.digests))} has values of its own"
        return f"{self.title}: ranks {most} hold equal values, and others than these: rank {'; rank '.join(others)}"


def _pieces(named: Sequence[tuple[str, Tensor]]) -> Iterator[_Piece]:
    """The tensors that can be compared, each with a key of its elements."""
    names: dict[Tensor, str] = {}
    for model in stages_of([tensor for _, tensor in named]) if named else ():
        # A part of a pipeline calls its layers by numbers of its own, and a tied one by its own name.
        names |= names_of_stages(model) | model.shared_names()
    for name, tensor in named:
        if tensor.is_meta or not tensor.numel() or type(tensor.data) not in compat.plain_tensor_types():
            continue
        name, shard = names.get(tensor, name), shard_of(tensor)
        if shard is None:
            shape = tuple(tensor.shape)
            yield _Piece(f"'{name}' {list(shape)}", tensor, fingerprint_of(name, shape) or 1)
        elif not any(axis.placement is Placement.PARTIAL for axis in shard.axes):
            apart = shard.name.partition("@")[2]  # Other ranks have other parameters of this name, for example experts.
            place = apart, shard.shape, shard.start, shard.stop, shard.ranges
            yield _Piece(f"'{name}' {list(shard.shape)}", tensor, fingerprint_of(name, *place) or 1)


def digests_of(tensors: Sequence[Tensor]) -> list[int]:
    """A number of 62 bits for the values, the dtype and the shape of each tensor, equal where they are equal."""
    sums = [_sums(tensor) for tensor in tensors]
    on_device: dict[torch.device, list[int]] = {}
    for number, each in enumerate(sums):
        on_device.setdefault(each.device, []).append(number)
    digests = [0] * len(tensors)
    for numbers in on_device.values():
        flat = torch.cat([sums[number] for number in numbers]).cpu()  # The one wait for a device.
        memory = memoryview(ctypes.string_at(flat.data_ptr(), flat.nbytes))
        ends = list(accumulate(sums[number].nbytes for number in numbers))
        for number, start, stop in zip(numbers, [0, *ends], ends, strict=False):
            tensor = tensors[number]
            digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode(), digest_size=8)
            digest.update(memory[start:stop])
            digests[number] = int.from_bytes(digest.digest(), "little") & _MASK
    return digests


def _sums(tensor: Tensor) -> Tensor:
    """1-D integers that are equal where a tensor's bits are, on its device: see the top of this file."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    raw = flat.resolve_neg().contiguous().view(-1).view(torch.uint8)
    if raw.data_ptr() % 8:
        raw = raw.clone()
    num_words = raw.numel() // 8
    words, rest = raw[: num_words * 8].view(torch.int64), raw[num_words * 8 :]
    parts = [words]
    if num_words > _SMALL_WORDS:
        width = 1 << (num_words.bit_length() // 2)
        square = words[: num_words // width * width].view(-1, width)
        parts = [square.sum(1), square.sum(0), words[square.numel() :]]
    if rest.numel():
        parts.append(rest.to(torch.int64))
    return torch.cat(parts)


def divergence_error(found: Sequence[Divergence], num_compared: int, step: int) -> DivergenceError:
    """The error that all ranks raise; its text numbers the ranks as the group does."""
    apart = sorted({rank for each in found for ranks in each.ranks_by_values[1:] for rank in ranks})
    lines = [f"  {each}" for each in found[:_NAMED]]
    if found[_NAMED:]:
        lines.append(f"  and {len(found) - _NAMED} more")
    where = f"step {step}: " if step else ""
    message = (
        f"{where}{len(found)} of {num_compared} tensors that must be equal on several ranks are not:\n"
        + "\n".join(lines)
        + "\nSome ranks alone have changed them (a write to param.data, a checkpoint that was loaded on some ranks, "
        "gradients that were not averaged, other hyperparameters), or a device computes wrong numbers: do on all "
        f"ranks what one does, then {recovery_hint()}"
    )
    return DivergenceError(message, step=step, names=tuple(each.title for each in found), ranks=tuple(apart))
