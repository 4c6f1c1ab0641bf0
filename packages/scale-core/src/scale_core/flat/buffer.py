"""The flat buffer: all-gather into it, its release, and the reduction of its gradients.

Parameters of one dtype are in one flat buffer. Each rank keeps its shard of it; the full buffer exists only between a
gather and a release, and the parameters that a module computes with are *views* of it. A collective therefore reads and
writes the very memory that the module uses: nothing is split, concatenated or copied per parameter. ZeRO-1, -2 and -3
differ only in when they call gather, release and reduce.

Reduced gradients are published to `.grad` only when the pass has succeeded on every rank: an optimizer must not see
half of a pass, and a failed pass must leave no trace in a sum. `storage` makes and moves the memory, `gradient` has the
gradients and their reduce-scatter, `transport` the interface of other messages than plain ones.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Container, Iterable, Sequence

from torch import Tensor, nn

from scale_core import uneven_inputs
from scale_core.comm.collectives import UNTAGGED, all_gather
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork
from scale_core.device import buffer_pool
from scale_core.device.streams import copy_over
from scale_core.flat.gradient import PlainReduceScatter, view_of
from scale_core.flat.host_staged import HostStagedTransport
from scale_core.flat.storage import FlatStorage
from scale_core.flat.transport import ShardTransport
from scale_core.hooks.gradients import call_local_grad_hooks, gradient_hooks
from scale_core.optim.error_feedback import ErrorFeedback
from scale_core.optim.step_hooks import OptimizerSteps
from scale_core.shard import as_local


class State(enum.Enum):
    """The memory of a flat buffer, in addition to the shard of S elements that is always there."""

    SHARDED = "nothing else: the full buffer has no memory (but for a part of it, after `release(keep_part=True)`)"
    GATHERING = "the full buffer, W * S elements, being filled: it must not be read yet"
    GATHERED = "the full buffer, W * S elements, readable"


class PlainTransport(PlainReduceScatter, ShardTransport):
    """Sends parameters in the dtype of the computation, and gradients in their own."""

    def all_gather(
        self, all_gather_input: Tensor, all_gather_output: Tensor, *, tag: int = UNTAGGED, copies_input: bool = False
    ) -> CollectiveWork:
        if copies_input or all_gather_input.dtype != all_gather_output.dtype:
            all_gather_input = self.new_all_gather_input(all_gather_input, all_gather_output).copy_(all_gather_input)
        return all_gather(all_gather_output, all_gather_input, self.group, sizes=self._sizes, tag=tag)

    def new_all_gather_input(self, shard: Tensor, all_gather_output: Tensor) -> Tensor:
        return part_of(all_gather_output, self.group)


class FlatBuffer(FlatStorage):
    """Parameters of one dtype, sharded over a group.

    Args:
        names: The parameters' names, for errors and for `shard_of`.
        params: The full parameters, equal on all ranks, of one dtype and device. They are copied, not kept.
        layout: The place of each; planned for the group's size.
        groups: The ranks that share them, or the `Group` between whose ranks they are cut.
        dtypes: In which dtypes they are computed with and reduced.
        flatten: Expose one flat parameter [S] in place of one local shard per parameter.
        devices: Where shard, full buffer and reduced gradients live.
        transport_policy: How parameters and gradients are sent; None sends them as they are.

    Attributes:
        unsharded_params: Per parameter, a view of the full buffer in the full shape.
        state: Whether they can be read.
        has_post_all_gather: Whether a module computes with tensors around the gathered data (`post_all_gather`).
        part: [W * S / size of the part's group], the part of the full buffer left by `release(keep_part=True)`, or
            None.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.flat.buffer import FlatBuffer
        >>> from scale_core.flat.layout import FlatLayout
        >>> names, params = zip(*torch.nn.Linear(3, 4).named_parameters())
        >>> layout = FlatLayout.plan(names, [param.shape for param in params], world_size=1)
        >>> buffer = FlatBuffer(names, params, layout, Group())  # a group of this rank only
        >>> [tuple(param.shape) for param in buffer.sharded_params]
        [(4, 3), (4,)]

    See also: [the core](../how-the-core-works.md).
    """

    state: State
    part: Tensor | None
    _plain_transport: ShardTransport  # Of full parameters in their own dtype
    recorded_steps: OptimizerSteps | None = None  # Of the model, whose ranks compare them
    gradient_divisor: float | None = None  # The divisor of the sum of gradients; None is the number of ranks
    awaits_backward = False  # A module has computed with it, and no backward pass has come since
    _gathering: CollectiveWork | None
    _unpublished: list[tuple[nn.Parameter, Tensor]]  # Results of reductions since the last `commit`

    def _init_transports(self) -> None:
        plain: ShardTransport = PlainTransport(self.groups)
        policy, copies = self.transport_policy, self._host_copies
        transport = plain if policy is None else policy.transport(self.groups, self.spans)
        self.transport = transport if copies is None else HostStagedTransport(transport, copies)
        self._plain_transport = plain if copies is None else HostStagedTransport(plain, copies)
        self.has_post_all_gather = self.transport.all_gather_dtype is not None

    def _init_transfers(self) -> None:
        self.state, self.part, self._gathering, self._unpublished = State.GATHERED, None, None, []
        self._unsharded_version = self.unsharded_params[0]._version
        self._gathered_version, self._gathered_after = self.version, self.group.state.optimizer_steps.number
        self.release()

    # Properties.

    @property
    def version(self) -> int:
        """Grows whenever the shard is written to, directly or through a sharded parameter, and when it is replaced."""
        with as_local():
            return self._past_versions + sum(tensor._version for tensor in self._written)

    @property
    def trains(self) -> bool:
        """Whether any of the parameters wants a gradient."""
        with as_local():
            return any(param.requires_grad for param in self.sharded_params)

    def follow_trainable(self) -> dict[str, bool]:
        """Copies `requires_grad` from the sharded parameters to the unsharded ones; returns the changed names."""
        sharded = self.sharded_params * len(self.names) if self.flatten else self.sharded_params
        changed = {}
        with as_local():
            for index, (param, shard) in enumerate(zip(self.unsharded_params, sharded, strict=True)):
                if param.requires_grad != shard.requires_grad:
                    param.requires_grad_(shard.requires_grad)
                    changed[self.names[index]] = shard.requires_grad
        return changed

    def post_all_gather(self, index: int) -> Tensor:
        """Returns the tensor to compute with for a gathered parameter; its gradient goes to the unsharded parameter."""
        data = view_of(self.full, self.layout.entries[index])
        return self.transport.post_all_gather(index, self.unsharded_params[index], data)

    # Gather and release.

    def allocate(self) -> None:
        """Takes the memory of the full buffer, as the next gather does; `release` frees it."""
        if self.is_aliased or self.full.untyped_storage().nbytes():
            return
        if self._is_pooled:
            buffer_pool.allocate(self.full)
        else:
            self.full.untyped_storage().resize_(self.full.nbytes)

    def gather(self, tag: int = UNTAGGED, *, copies_shard: bool = False) -> None:
        """Starts to fill the full buffer with every rank's shard; does nothing where it is filled or being filled.

        With `copies_shard` the shard may be written to before `wait_gathered`: its values at the call are sent.
        """
        if self.state is not State.SHARDED:
            return
        if self.is_stale():
            self.part = None
        if self.part is None:
            self._gathered_version, self._gathered_after = self.version, self.group.state.optimizer_steps.number
        if self.is_aliased:
            self.state = State.GATHERED
            return
        if self.layout.full_numel:
            self.allocate()
            if self.part is not None and self.groups.part is not None:
                self._gathering = all_gather(self.full, self.part, self.groups.part, tag=tag)
            else:
                shard = self.shard.data
                self._gathering = self.transport.all_gather(shard, self.full, tag=tag, copies_input=copies_shard)
            if copies_shard:
                self.wait_sent()
        self.state = State.GATHERING  # Only now: where there was no memory for it, it has not begun.

    def wait_gathered(self, limit_seconds: float | None = None) -> None:
        """Waits until the unsharded parameters can be read.

        Raises:
            TransferError: See `CollectiveWork.wait`.
            Exception: A message of this rank could not be made; it is sharded again.
        """
        assert self.state is not State.SHARDED, "waited for a gather that was not started"
        if self._gathering is not None:
            work, self._gathering = self._gathering, None
            work.wait(limit_seconds)
            deferred = self.transport.deferred
            if deferred.error is not None:
                if not deferred.is_ignored:
                    self.release()  # It has zeros in place of the failed part: the next gather starts again.
                deferred.check()
        self.part = None
        self.state = State.GATHERED
        self._unsharded_version = self.unsharded_params[0]._version

    @property
    def is_overwritten(self) -> bool:
        """Whether an unsharded parameter was written to in place since the gather: a release loses that."""
        return not self.is_aliased and self.unsharded_params[0]._version != self._unsharded_version

    def release(self, limit_seconds: float | None = None, *, keep_part: bool = False) -> None:
        """Frees the full buffer; the unsharded parameters stay views of it and can't be read until the next gather.

        `keep_part` keeps this rank's part of it, for a gather among the ranks of `ShardGroups.part`.

        Raises:
            TransferError: It was still being filled, and that has failed; see `CollectiveWork.wait`.
        """
        if self._gathering is not None:
            self.wait_gathered(limit_seconds)
        part_group = self.groups.part
        if keep_part and part_group is not None and self.state is State.GATHERED and not self.is_aliased:
            self.part = part_of(self.full, part_group).clone()
        elif not keep_part:
            self.part = None
        if not self.is_aliased:
            if self._is_pooled:
                buffer_pool.free(self.full)
            else:
                self.full.untyped_storage().resize_(0)
        self.state = State.SHARDED

    @property
    def gather_has_second_half(self) -> bool:
        """Whether its gather has a second half, which starts when it is waited for, in one order on all ranks."""
        return self.state is State.GATHERING and self.part is None and self.transport.traits.gathers_in_halves

    def wait_sent(self) -> None:
        """Waits until the shard may be written to: no gather reads it any more."""
        if self._host_copies is not None:
            self._host_copies.wait()

    def is_stale(self, *, by_writes_alone: bool = False) -> bool:
        """Whether an optimizer has stepped, or the shard was written to, since the full buffer was gathered.

        All ranks must get the same answer, or only some of them would gather it again. So each step on shards of these
        ranks counts, whether or not it wrote to these tensors, unless `by_writes_alone`.
        """
        if self.state is State.SHARDED and self.part is None:
            return False
        stepped = self.group.state.optimizer_steps.number != self._gathered_after and self.trains
        return (stepped and not by_writes_alone) or self.version != self._gathered_version

    # Reduce.

    @property
    def error_feedback(self) -> Sequence[ErrorFeedback]:
        """The rounding errors of the gradients, which are added to the gradients of the next step; empty without it."""
        return self.transport.feedback

    def has_grad(self, index: int) -> bool:
        """Whether a sharded parameter has a reduced gradient; one that is flattened always counts as having one."""
        return self.flatten or self.sharded_param(index).grad is not None

    def drop_grad(self, index: int) -> None:
        """Takes the reduced gradient of a sharded parameter away."""
        self.sharded_param(index).grad = None

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return bool(self.gradient)

    @property
    def needs_transfer_after_reduce(self) -> bool:
        """Whether gradients must still be sent after the reduction: to replicas, between nodes or to the host."""
        return self.transport.traits.reduces_in_halves or self.devices.reduced != self.compute_device

    def reduce(self, tag: int = UNTAGGED) -> None:
        """Starts the reduce-scatter of the local gradients in `reduce_dtype`; missing gradients count as zeros."""
        # So does all of it on a rank that has run out of data (see `join`).
        share = uneven_inputs.active_share
        if share is not None and not share.weight:
            self.gradient.drop()
        if gradient_hooks.local:
            self._report_local_grads()
        gradient = self.gradient.take(self.compute_device)
        if share is not None and share.weight not in (0, 1):
            gradient.mul_(share.weight)
        divisor: float | None = None if share is None else share.divisor
        if self.gradient_divisor is not None:
            num_ranks = self.group.size * self.groups.replicas.size
            divisor = self.gradient_divisor * ((divisor or num_ranks) / num_ranks)
        self.reduction.start(gradient.to(self.reduce_dtype), tag, divisor)

    def contribute_zeros(self) -> None:
        """This rank has failed: until `discard` it takes part in collectives only for the other ranks, with zeros."""
        self.gradient.use_zeros()
        self.transport.deferred.is_ignored = True

    def wait_reduced(self, limit_seconds: float | None = None) -> None:
        """Waits for the reduction, if there is one; its result is kept until `commit`."""
        self.reduction.wait(limit_seconds)

    def finish_reduction(self, limit_seconds: float | None = None) -> None:
        """As `wait_reduced`, for all parts of it."""
        self.reduction.finish(limit_seconds)

    def wait_results(self, limit_seconds: float | None = None) -> list[tuple[nn.Parameter, Tensor]]:
        """Waits for the gradients reduced since the last call; returns them by sharded parameter, in local shapes."""
        with as_local():
            new: list[tuple[nn.Parameter, Tensor]] = []
            for reduced in self.reduction.results(limit_seconds):
                if reduced.device != self.shard.device:
                    reduced = copy_over(reduced, self.shard.device, self._grad_stream)
                if self.flatten:
                    new.append((self.sharded_params[0], reduced))
                    continue
                for param, span in zip(self.sharded_params, self.spans, strict=True):
                    new.append((param, reduced.narrow(0, span.shard_offset, span.numel).view(span.shape)))
            self._unpublished += new
            return new

    def zero_accumulated(self, params: Container[int], *, set_to_none: bool) -> None:
        """Drops gradients of these sharded parameters, by id, that are not reduced yet, or sets them to zeros."""
        indices = [index for index in range(len(self.names)) if id(self.sharded_param(index)) in params]
        self.gradient.zero_accumulated(indices, set_to_none=set_to_none)

    def publish_grads(self, params: Container[Tensor] | None = None, frozen: Collection[Tensor] = ()) -> None:
        """Adds kept results to the `.grad` of these sharded parameters, None is all, that train or are `frozen` now."""
        with as_local():
            aside, self._unpublished = self._unpublished, []
            for param, gradient in aside:
                if params is not None and param not in params:
                    self._unpublished.append((param, gradient))
                elif param.requires_grad or self.flatten or param in frozen:
                    if param.grad is None:
                        param.grad = gradient
                    else:
                        param.grad.add_(gradient)

    def commit(self, limit_seconds: float | None = None, frozen: Iterable[int] = ()) -> None:
        """Publishes all reduced gradients, and adds local ones that were not reduced to the accumulated sum.

        `frozen` are the parameters that some rank had an accumulated gradient for when they were frozen.
        """
        # Own gradients that were not reduced join those that wait for a later reduction.
        self.wait_results(limit_seconds)
        self.publish_grads(frozen={self.sharded_param(index) for index in frozen})
        if gradient_hooks.local and self.gradient.has_begun:
            self._report_local_grads()
        self.gradient.commit_pass()
        self.reduction.commit()

    def _report_local_grads(self) -> None:
        """Calls the local gradient hooks with the current pass, without the sum of earlier ones."""
        indices, flat = self.gradient.pass_gradient()
        if flat is None or not indices:
            call_local_grad_hooks([], [])
        elif self.flatten:
            call_local_grad_hooks(self.sharded_params, [flat])
        else:
            views = [view_of(flat, self.layout.entries[index]) for index in indices]
            call_local_grad_hooks([self.sharded_params[index] for index in indices], views)

    # After an error, and full tensors for checkpoints and for people.

    def discard(self) -> None:
        """After an error: cancels every transfer, and drops results since the last `commit`."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
            if self._host_copies is not None:
                self._host_copies.stream.join()  # A transfer that failed has not waited for the work before it there.
        self.reduction.cancel()
        self._unpublished = []
        self.gradient.rollback_pass()
        self.release()
        self.wait_sent()

    def load(self, index: int, whole: Tensor) -> None:
        """Copies this rank's elements out of a full tensor, after transfers from the shard have ended."""
        self.wait_sent()
        super().load(index, whole)

    def gather_full_params(self, tag: int = UNTAGGED, limit_seconds: float | None = None) -> list[Tensor]:
        """Returns every full parameter, in its own dtype; they share one new buffer of W * S elements."""
        buffer = self._new_full(self.dtype)
        if buffer.numel() and not self.is_meta:
            self._plain_transport.all_gather(self.shard.data, buffer, tag=tag).wait(limit_seconds)
        return [view_of(buffer, entry) for entry in self.layout.entries]


def part_of(full: Tensor, group: Group) -> Tensor:
    """The part of this rank of `group` in a full buffer that is cut evenly."""
    size = full.numel() // group.size
    return full.narrow(0, group.rank * size, size)
