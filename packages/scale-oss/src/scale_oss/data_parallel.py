"""`ShardedDataParallel`: gradients reduced bucket by bucket in the backward pass, straight into shards (ZeRO-2).

Beside `OSS`, no rank keeps more of the averaged gradients than the part that it updates, and what is sent is no more
than plain data parallelism sends: the reduced part of each gradient one way, the updated part of each parameter the
other.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from scale_core.backward import after_gradient, in_backward, once_after_backward
from scale_core.collectives import broadcast
from scale_core.contract import Contract
from scale_core.events import Event, PassKind, message_tag
from scale_core.exchange import exchange_text
from scale_core.group import GroupLike, group_of
from scale_oss.bucket import Bucket
from scale_oss.optimizer import OSS

T = TypeVar("T")


class ShardedDataParallel(nn.Module):
    """Data parallelism for a model whose optimizer is an `OSS`.

        >>> import torch
        >>> from scale_oss import OSS, ShardedDataParallel
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
        >>> model = ShardedDataParallel(model, optimizer)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()

    After a backward pass the averaged gradients are in the optimizer's pieces and `param.grad` is None: clip by
    `optimizer.clip_grad_norm`. Inside `no_sync()` gradients add up in `param.grad`, as in plain PyTorch.

    Args:
        module: The model; all its parameters that train must be in one of the optimizers.
        sharded_optimizer: The `OSS`, or several of them on disjoint parameters.
        process_group: The ranks; the optimizers' own if None, and no other.
        broadcast_buffers: All ranks take rank 0's buffers before each forward pass.
        sync_models_at_startup: All ranks take rank 0's parameters and buffers now.
        reduce_buffer_size: FairScale's; the size of what travels together is `OSS(bucket_numel=...)`.
        auto_refresh_trainable: FairScale's; what trains is looked up in every pass.
        reduce_fp16: Send gradients of fp32 parameters in half precision.
        warn_on_trainable_params_changed: FairScale's; without effect.
        overlap_gather: Updated parameters travel beside the next forward pass, and are waited for where they are first
            used: by a module's forward, by `parameters()` or `state_dict()` of this wrapper. Off, `step` waits.

    Raises:
        TypeError: An optimizer is no `OSS`.
        ValueError: A parameter that trains is in none of them, or in two; the groups differ.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | list[OSS] | tuple[OSS, ...],
        process_group: GroupLike = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int | None = None,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
        *,
        overlap_gather: bool = True,
    ) -> None:
        super().__init__()
        several = sharded_optimizer if isinstance(sharded_optimizer, list | tuple) else [sharded_optimizer]
        optimizers: list[OSS] = list(several)
        _check(module, optimizers, process_group)
        self.module = module
        self.sharded_optimizers = optimizers
        self.group = optimizers[0].group
        self.broadcast_buffers = broadcast_buffers
        self.reduce_fp16 = reduce_fp16
        self._contract = Contract(self.group, optimizers[0].contract.limit_seconds)
        self._synchronizes = True
        self._buffers_are_due = True
        self._in_backward = False
        self._hooked: set[tuple[int, int]] = set()
        self._order: list[int] = []
        self._order_is_known = False
        self._reducing: int | None = None
        self._ready: list[int] = []
        self._started: list[int] = []
        self._missing: dict[tuple[int, int], bool] = {}  # reduced as zeros; whether there was no gradient before
        for optimizer in optimizers:
            optimizer.gets_reduced_gradients = True
            optimizer.waits_by_itself = not overlap_gather
        if sync_models_at_startup:
            self._sync_model()
        if overlap_gather:
            self._wait_where_parameters_are_used()

    # Forward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; in a world of several ranks its backward pass reduces the gradients."""
        if self._in_backward and not in_backward():
            self._abort(RuntimeError("the backward pass before this one did not come to its end"))
        self._hook_what_trains()
        if self.broadcast_buffers and self._buffers_are_due and not in_backward():
            self.sync_buffers(blocking=True)
        # As DistributedDataParallel does: after a pass that reduces, so once for all micro-batches of a step.
        self._buffers_are_due = torch.is_grad_enabled() and self._synchronizes
        return self.module(*args, **kwargs)

    def sync_buffers(self, blocking: bool = False) -> None:
        """All ranks take rank 0's buffers.

        Args:
            blocking: FairScale's; buffers have arrived when this returns.
        """
        if self.group.size > 1:
            self._broadcast([buffer.data for buffer in self.module.buffers()], "buffers")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes leave their gradients in `param.grad`; the first one outside reduces the sum."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    # Backward.

    def reduce(self) -> None:
        """Reduces now what passes under `no_sync()` have left in `param.grad`; all ranks call it together.

        Raises:
            RuntimeError: There is nothing to reduce on this rank.
        """
        if all(param.grad is None for bucket in self._buckets for param in bucket.params):
            raise RuntimeError(
                "reduce(): no gradient waits for it: call it once, after the backward passes under no_sync()"
            )
        self._begin_backward()
        self._finish_backward()
        self._buffers_are_due = True

    def _packer(self, number: int, index: int) -> Callable[[Tensor], None]:
        held = weakref.ref(self)  # Autograd holds the hook, and shows nobody what its hooks hold.

        def pack(_: Tensor) -> None:
            wrapper = held()
            if wrapper is not None and wrapper._synchronizes:
                wrapper._pack(number, index)

        return pack

    def _pack(self, number: int, index: int) -> None:
        if not self._in_backward:
            self._begin_backward()
            once_after_backward(self._finish_backward)
        gradient = self._buckets[number].gradient
        gradient.pack(index)
        if not gradient.missing() and number not in self._ready:
            self._ready.append(number)
            self._reduce_what_is_due()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._reducing, self._ready, self._started, self._missing = None, [], [], {}
        self._contract.begin(PassKind("backward", grad=True, training=True), new_step=True)

    def _reduce_what_is_due(self) -> None:
        """Starts reductions in an order that is the same on all ranks, whichever parameters each of them has used."""
        for number in self._order[len(self._started) :]:
            if number not in self._ready:
                return
            self._reduce(number)

    def _reduce(self, number: int) -> None:
        event, bucket = self._event("reduction", number), self._buckets[number]
        self._contract.announce(event)
        self._wait_for_reduction()
        if number not in self._started:
            self._started.append(number)
            for index in bucket.gradient.missing():
                self._missing[number, index] = bucket.pieces[index].grad is None
        self._reducing = number
        wire = torch.float16 if self.reduce_fp16 and bucket.dtype == torch.float32 else None
        bucket.reduce(message_tag(event), wire)

    def _wait_for_reduction(self) -> None:
        if self._reducing is not None:
            with self._contract.waiting(self._event("reduction", self._reducing)):
                self._buckets[self._reducing].reduction.wait(self._contract.limit_seconds)
            self._reducing = None

    def _finish_backward(self) -> None:
        try:
            for number in self._order[len(self._started) :]:
                self._pack_what_was_left(number)
                self._reduce(number)
            self._wait_for_reduction()
            late = [number for number, bucket in enumerate(self._buckets) if bucket.gradient]
            notes = self._contract.close(len(late), len(self._missing), int(self._order_is_known))
            if any(row[0] for row in notes):
                for number in sorted({number for numbers in self._tell(late) for number in numbers}):
                    self._buckets[number].reduce(message_tag(self._event("late reduction", number)))
            self._commit()
            if all(row[1] for row in notes):
                self._restore_unused()
            if not all(row[2] for row in notes):
                self._learn_order()
        except BaseException as error:
            self._abort(error)
            raise
        self._in_backward = False

    def _pack_what_was_left(self, number: int) -> None:
        """Gradients of passes under `no_sync()`, of parameters that this pass has not used."""
        for index in range(len(self._buckets[number].params)):
            self._buckets[number].gradient.pack(index)

    def _commit(self) -> None:
        for number, bucket in enumerate(self._buckets):
            with self._contract.waiting(self._event("reduction", number)):
                bucket.commit(self._contract.limit_seconds)

    def _restore_unused(self) -> None:
        """What no rank has used keeps the gradient that it had, none as a rule, as in plain PyTorch."""
        everyones = self._tell([list(key) for key in sorted(self._missing)])
        nobody = set.intersection(*({(number, index) for number, index in keys} for keys in everyones))
        for (number, index), had_none in self._missing.items():
            if (number, index) in nobody and had_none:
                self._buckets[number].pieces[index].grad = None

    def _learn_order(self) -> None:
        """From now on buckets are reduced in the order in which they became ready on rank 0."""
        ready = self._tell(self._ready)[0]
        self._order = [*ready, *(number for number in self._order if number not in ready)]
        self._order_is_known = True

    def _abort(self, error: BaseException) -> None:
        self._in_backward = False
        for bucket in self._buckets:
            bucket.gradient.drop()
            bucket.reduction.abandon()
        self._contract.report_failure(error)

    def _tell(self, mine: T) -> list[T]:
        with self._contract.waiting(Event("the end", "")):
            texts = exchange_text(json.dumps(mine), self.group, limit_seconds=self._contract.limit_seconds)
        return [json.loads(text) for text in texts]

    # What surrounds it.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients: of the parameters, and of the optimizers' pieces of them."""
        super().zero_grad(set_to_none)
        for optimizer in self.sharded_optimizers:
            optimizer.zero_grad(set_to_none)

    def refresh_trainable(self) -> None:
        """Takes over what was frozen or unfrozen; every forward pass does so by itself."""
        self._hook_what_trains()

    def wait(self) -> None:
        """Returns when the parameters are up to date after an optimizer's step."""
        for optimizer in self.sharded_optimizers:
            optimizer.wait()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters, up to date; `parameters()` does so, too."""
        self.wait()
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state, up to date, under the names that DistributedDataParallel gives it."""
        self.wait()
        return super().state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        for bucket in self._buckets:
            probe = bucket.full.new_empty(0)
            converted = fn(probe)
            if converted.dtype != probe.dtype or converted.device != probe.device:
                raise RuntimeError(
                    f"the optimizer holds parameters in {probe.dtype} on {probe.device}, which can't become "
                    f"{converted.dtype} on {converted.device} now: convert or move the model first, then build OSS(...)"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    @property
    def _buckets(self) -> list[Bucket]:
        return [bucket for optimizer in self.sharded_optimizers for bucket in optimizer.buckets]

    def _hook_what_trains(self) -> None:
        buckets = self._buckets
        known = set(self._order)
        for number, bucket in enumerate(buckets):
            if number not in known:  # From the last to the first: so their gradients come, as a rule.
                self._order.insert(0, number)
                self._order_is_known = False
            for index, param in enumerate(bucket.params):
                if param.requires_grad and (number, index) not in self._hooked:
                    self._hooked.add((number, index))
                    after_gradient(param, self._packer(number, index))

    def _sync_model(self) -> None:
        self._broadcast([bucket.full for bucket in self._buckets], "parameters")
        held = {id(param) for bucket in self._buckets for param in bucket.params}
        rest = [param.data for param in self.module.parameters() if id(param) not in held]
        self._broadcast([*rest, *(buffer.data for buffer in self.module.buffers())], "parameters and buffers")

    def _broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        with self._contract.waiting(Event(what, "")):
            for tensor in tensors:
                whole = tensor.contiguous()
                broadcast(whole.reshape(-1).view(torch.uint8), self.group).wait(self._contract.limit_seconds)
                if not whole.is_set_to(tensor):
                    tensor.copy_(whole)

    def _wait_where_parameters_are_used(self) -> None:
        places = {id(param): bucket for bucket in self._buckets for param in bucket.params}
        for module in self.module.modules():
            used = {
                id(bucket): bucket for p in module._parameters.values() if (bucket := places.get(id(p))) is not None
            }
            if used:
                module.register_forward_pre_hook(_Waiting(list(used.values()), self._contract.limit_seconds))

    def _event(self, phase: str, number: int) -> Event:
        return Event(phase, f"bucket {number}")


class _Waiting:
    """A hook before a module's forward: its parameters must have arrived."""

    def __init__(self, buckets: Sequence[Bucket], limit_seconds: float) -> None:
        self._buckets, self._limit_seconds = buckets, limit_seconds

    def __call__(self, module: nn.Module, args: Any) -> None:
        for bucket in self._buckets:
            bucket.wait(self._limit_seconds)


def _check(module: nn.Module, optimizers: Sequence[OSS], process_group: GroupLike) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, OSS):
            raise TypeError(
                f"ShardedDataParallel: expected sharded_optimizer to be an OSS, got {type(optimizer).__name__}: "
                "build OSS(model.parameters(), torch.optim.AdamW, lr=...), or take DistributedDataParallel"
            )
    if not optimizers:
        raise ValueError("ShardedDataParallel: expected an OSS or several, got none")
    groups = {optimizer.group.ranks for optimizer in optimizers}
    if process_group is not None:
        groups.add(group_of(process_group).ranks)
    if len(groups) > 1:
        raise ValueError(
            f"ShardedDataParallel and its optimizers are on different ranks: {sorted(map(list, groups))}: pass the "
            "same group to OSS(..., group=group) and ShardedDataParallel(..., process_group=group)"
        )
    held: dict[int, str] = {}
    for optimizer in optimizers:
        for bucket in optimizer.buckets:
            for param, name in zip(bucket.params, bucket.names, strict=True):
                if id(param) in held:
                    raise ValueError(f"'{name}' is in two of the optimizers: give each parameter to one of them")
                held[id(param)] = name
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in held:
            raise ValueError(
                f"'{name}' trains, but no optimizer holds it, so its gradient would never be averaged: add it to "
                "OSS(...), or freeze it by requires_grad_(False)"
            )
