"""`ShardedDataParallel`: gradients are reduce-scattered bucket by bucket in the backward pass (ZeRO-2).

A rank keeps the averaged gradients of the part that its `OSS` updates. As many bytes are sent as in plain data
parallelism: a reduce-scatter of gradients, and an all-gather of updated parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core import compat, uneven_inputs
from scale_core.arguments import checked_arguments, refuse_inference_mode
from scale_core.comm.collectives import broadcast
from scale_core.comm.group import GroupLike
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event
from scale_core.hooks.autograd import in_backward
from scale_core.optim.step_checks import invalidate_cache
from scale_core.optim.step_hooks import OptimizerSteps, watch_optimizers
from scale_core.sharded_tensor.tensor import is_sharded
from scale_oss.buckets.bucket import Bucket
from scale_oss.ddp_checks import (
    check_optimizers,
    check_params_held,
    check_takes_hooks,
    copy_what_is_assigned,
    unwrap_optimizer,
)
from scale_oss.oss import OSS
from scale_oss.piece_gradient import PieceGradient
from scale_oss.reducer import Reducer

_logger = logging.getLogger(__name__)


# The overlap of the all-gather: each module waits in its forward pre-hook for its updated parameters.
#
# A parent may read a child's parameters without calling the child: torch's attention reads the weights of its
# projection, and a `ParameterList` never runs. So modules of torch.nn other than containers wait for all parameters
# inside, and the model waits for the parameters of modules that were never seen to run.

_CONTAINERS = (
    nn.Module,
    nn.ModuleDict,
    nn.ModuleList,
    nn.Sequential,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerEncoder,
)


class GatherWait:
    """The wait of one module."""

    def __init__(self, buckets: Sequence[Bucket], contract: Contract | None, *, has_run: bool = False) -> None:
        self._buckets, self._contract = buckets, contract  # A copy has none, and nothing to wait for.
        self.has_run = has_run  # Its forward is known to be called, or another module waits in its place.

    @compat.untraced
    def pre_forward(self, *_: Any) -> None:
        """Forward pre-hook."""
        self.has_run = True
        for bucket in self._buckets:
            if bucket.is_gathering:
                self.wait()
                return

    def wait(self) -> None:
        """Returns when the parameters have arrived."""
        for bucket in self._buckets:
            if bucket.is_gathering and self._contract is not None:
                self._contract.wait(bucket.gather_event, bucket.wait)

    def __reduce__(self) -> Any:
        """A copy has parameters of its own, and waits for nothing."""
        return GatherWait, ((), None)


class RootGatherWait:
    """The wait before the model, for modules that were not seen to run."""

    def __init__(self, waits: Iterable[GatherWait] = ()) -> None:
        self.waits = list(waits)

    def __call__(self, *_: Any) -> None:
        for waiting in self.waits:
            if not waiting.has_run:
                waiting.wait()

    def __reduce__(self) -> Any:
        return RootGatherWait, ()


def register_gather_waits(model: nn.Module, buckets: Sequence[Bucket], contract: Contract) -> list[GatherWait]:
    """Registers the waits of modules before their forward; returns them."""
    places = {id(param): number for number, bucket in enumerate(buckets) for param in bucket.params}
    inside: set[nn.Module] = set()  # Others read their parameters, or may do so.
    waits = []
    for module in model.modules():  # The outer ones first.
        members = list(module.modules()) if _may_read_children(module) else [module]
        inside.update(members[1:])
        numbers = _numbers_in(members, places)
        if numbers:
            waiting = GatherWait([buckets[number] for number in numbers], contract, has_run=module in inside)
            # Before hooks that were there already: the hooks of weight and spectral norm compute with parameters.
            module.register_forward_pre_hook(waiting.pre_forward, prepend=True)
            waits.append(waiting)
    return waits


def _may_read_children(module: nn.Module) -> bool:
    """Whether this is a module of torch's own that is not a mere container, or derived from one."""
    return any(base.__module__.startswith("torch.nn.") and base not in _CONTAINERS for base in type(module).__mro__)


def _numbers_in(members: Sequence[nn.Module], places: Mapping[int, int]) -> list[int]:
    params = (param for member in members for param in member._parameters.values())
    return sorted({places[id(param)] for param in params if id(param) in places})


class ShardedDataParallel(nn.Module):
    """Data parallelism for a model whose optimizer is an `OSS`.

        >>> import torch
        >>> from scale_oss import OSS, ShardedDataParallel
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
        >>> model = ShardedDataParallel(model, optimizer)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()

    After a backward pass `param.grad` is this rank's part of the averaged gradient, a `ShardedTensor`, and the
    optimizer steps with the values that it has then. Inside `no_sync()` gradients add up in `param.grad`, as in
    plain PyTorch.

    Args:
        module: The model; all its parameters that train must be in one of the optimizers.
        sharded_optimizer: The `OSS`, or several of them on disjoint parameters. You may pass a wrapper that has one as
            its `optimizer`, for example AdaScale.
        process_group: The ranks; the optimizers' own if None, and no other.
        broadcast_buffers: All ranks take rank 0's buffers before each forward pass.
        sync_module_states: All ranks take rank 0's parameters and buffers now.
        reduce_fp16: Send gradients of fp32 parameters in half precision.
        overlap_gather: Gather updated parameters during the next forward pass, and wait at their first use. With False,
            `step` waits.

    Raises:
        TypeError: An optimizer is not an `OSS`.
        ValueError: A trainable parameter is in no optimizer, or in two; the groups differ; or the module has a
            `torch.jit.ScriptModule` and `overlap_gather` is True.

    See also: [the guide to OSS](../guides/oss.md).
    """

    @checked_arguments
    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: Optimizer | Sequence[Optimizer],
        process_group: GroupLike = None,
        broadcast_buffers: bool = True,
        sync_module_states: bool = True,
        *,
        reduce_fp16: bool = False,
        overlap_gather: bool = True,
    ) -> None:
        super().__init__()
        refuse_inference_mode("ShardedDataParallel")
        several = sharded_optimizer if isinstance(sharded_optimizer, Sequence) else [sharded_optimizer]
        optimizers: list[OSS] = [unwrap_optimizer(optimizer) for optimizer in several]
        check_optimizers(module, optimizers, process_group)
        if overlap_gather:
            check_takes_hooks(module)
        self.module = module
        self.sharded_optimizers = optimizers
        self.group = optimizers[0].shard_group
        self.broadcast_buffers = broadcast_buffers
        devices = [bucket.device for bucket in self._buckets]
        self.is_multi_device_module = len(set(devices)) > 1  # an attribute of torch's own wrapper
        self.device_type = next((device.type for device in devices), "cpu")
        # The settings that decide which messages are sent, and their dtypes.
        settings = f"{broadcast_buffers=}, {sync_module_states=}, {reduce_fp16=}"
        self._contract = self._new_contract(settings, with_buffers=broadcast_buffers or sync_module_states)
        self._reducer = Reducer(optimizers, self._contract, in_half=reduce_fp16)
        self._with_params = [member for member in module.modules() if member._parameters]
        self._overlaps = overlap_gather
        self._root_wait = RootGatherWait()
        self._registered: list[Bucket] = []
        self._held_ids: set[int] = set()  # their parameters, by id
        self._attach_optimizers()
        if sync_module_states:
            self._sync_model()
        self._register_hooks()
        self._register_new_buckets()
        if self.group.rank == 0:
            _logger.info(
                "ShardedDataParallel of %s: gradients in %d buckets over %d ranks; broadcast_buffers=%s, "
                "reduce_fp16=%s, overlap_gather=%s",
                *(type(module).__name__, len(self._buckets), self.group.size),
                *(broadcast_buffers, reduce_fp16, overlap_gather),
            )

    def _new_contract(self, settings: str, *, with_buffers: bool) -> Contract:
        """Returns the contract of the ranks, which have compared the settings and perhaps the buffers."""
        contract = Contract(self.group, self.sharded_optimizers[0].contract.limit_seconds)
        contract.named_params = self.module.named_parameters
        named = self.module.named_buffers() if with_buffers else ()
        buffers = [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in named]
        contract.check_equal("what was given to ShardedDataParallel", [settings, *buffers])
        return contract

    def _attach_optimizers(self) -> None:
        """Tells the optimizers that their gradients are averaged here."""
        recorded_steps = self._contract.recorded_steps = OptimizerSteps()
        for optimizer in self.sharded_optimizers:
            optimizer.gets_reduced_gradients = True
            optimizer.waits_in_step = not self._overlaps
            optimizer.reduced_by = weakref.ref(self)
            optimizer.recorded_steps = recorded_steps

    def _register_hooks(self) -> None:
        """Registers hooks of the model, of its modules and of the optimizers of this process."""
        if self._overlaps:
            self.module.register_forward_pre_hook(self._root_wait, prepend=True)
        watch_optimizers()
        for member in self.module.modules():  # The outermost that is loaded looks at the parameters of all others.
            if not isinstance(member, torch.jit.ScriptModule):  # It takes no hooks.
                member.register_load_state_dict_pre_hook(copy_what_is_assigned)

    # Forward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; in a world of several ranks its backward pass reduces the gradients."""
        self._register_new_buckets()
        if torch.is_grad_enabled():
            self._check_params_held()
        recomputes = in_backward()
        takes_buffers = self.broadcast_buffers and self._reducer.begins_step and not recomputes
        buffers = self._replicated_buffers() if takes_buffers else []
        self._reducer.prepare(in_step=bool(buffers), recomputes=recomputes)
        self._broadcast(buffers, "buffers")
        # As in DistributedDataParallel: once for all micro-batches of a step.
        self._reducer.begins_step = torch.is_grad_enabled() and self._reducer.require_backward_grad_sync
        if self.group.size == 1 or not torch.is_grad_enabled() or recomputes:
            return self.module(*args, **kwargs)
        try:
            outputs = self.module(*args, **kwargs)
        except Exception as error:
            if self.training:  # No backward follows an evaluation.
                self._reducer.abort_forward(error)
            raise
        self._reducer.pending_forwards.watch(outputs, counts=self.training and self._reducer.require_backward_grad_sync)
        return outputs

    def sync_buffers(self) -> None:
        """All ranks take rank 0's buffers."""
        self._broadcast(self._replicated_buffers(), "buffers")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes leave their gradients in `param.grad`; the first one outside reduces the sum.

        Raises:
            RuntimeError: `join()` counts the steps.
        """
        if uneven_inputs.active_share is not None:
            raise RuntimeError(
                "join() counts whole steps, and no_sync() makes one of several backward passes. Let join() yield all "
                "micro-batches of a step together and sum their losses, or leave no_sync() out"
            )
        before, self._reducer.require_backward_grad_sync = self._reducer.require_backward_grad_sync, False
        try:
            yield
        finally:
            self._reducer.require_backward_grad_sync = before

    def reduce(self) -> None:
        """Reduces now the gradients that passes under `no_sync()` have left in `param.grad`. All ranks call it.

        A rank that has nothing there, as one that has skipped all of its micro-batches, counts as zeros.

        Raises:
            RuntimeError: There is nothing to reduce on any rank.
        """
        if not self._reducer.reduce_now():
            raise RuntimeError(
                "reduce(): no gradient waits for it. Call it once, after the backward passes under no_sync()"
            )

    # The module.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients."""
        for optimizer in self.sharded_optimizers:
            optimizer.zero_grad(set_to_none)
        super().zero_grad(set_to_none)

    def wait(self) -> None:
        """Returns when the parameters are up to date after an optimizer's step."""
        for optimizer in self.sharded_optimizers:
            optimizer.wait()

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
                    f"{converted.dtype} on {converted.device} now. Convert or move the model first, then build OSS(...)"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    @property
    def _buckets(self) -> list[Bucket]:
        return [bucket for optimizer in self.sharded_optimizers for bucket in optimizer.buckets]

    def _check_params_held(self) -> None:
        """Runs before each forward, so it looks for names only after a failure."""
        params = (param for member in self._with_params for param in member._parameters.values() if param is not None)
        if any(id(param) not in self._held_ids and param.requires_grad for param in params):
            check_params_held(self.module, self._registered)

    def _sync_model(self) -> None:
        self._broadcast([bucket.full for bucket in self._buckets], "parameters")
        in_buckets = ((i, param, bucket) for bucket in self._buckets for i, param in enumerate(bucket.params))
        bucketed = {id(param) for index, param, bucket in in_buckets if index not in bucket.unflattened}
        unbucketed = [param.data for param in self.module.parameters() if id(param) not in bucketed]
        self._broadcast([*unbucketed, *self._replicated_buffers()], "parameters and buffers")

    def _replicated_buffers(self) -> list[Tensor]:
        """The values of the buffers. A buffer to which a program has added shards, as of gradients, is left out."""
        return [buffer.data for buffer in self.module.buffers() if not is_sharded(buffer)]

    def _broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        if self.group.size == 1 or not tensors:
            return
        with self._contract.waiting(Event(what, "")):
            for tensor in tensors:
                contiguous = tensor.contiguous()
                broadcast(contiguous.reshape(-1).view(torch.uint8), self.group).wait(self._contract.limit_seconds)
                if not contiguous.is_set_to(tensor):
                    tensor.copy_(contiguous)

    def _register_new_buckets(self) -> None:
        """Takes in the buckets of parameter groups that were added to an optimizer."""
        new = [bucket for bucket in self._buckets if bucket not in self._registered]
        if new:
            for optimizer, bucket in ((owner, bucket) for owner in self.sharded_optimizers for bucket in owner.buckets):
                if bucket in new:
                    indices = range(len(bucket.params))
                    bucket.show_grads([PieceGradient(bucket, index, optimizer, self) for index in indices])
            invalidate_cache()
            self._registered += new
            self._held_ids |= {id(param) for bucket in new for param in bucket.params}
            if self._overlaps:
                self._root_wait.waits += register_gather_waits(self.module, new, self._contract)
