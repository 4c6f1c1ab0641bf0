"""The step of `OSS`: this rank updates its shard with the inner optimizer, and an all-gather brings it to all ranks.

The inner optimizer steps on all parameters at once, on one bucket after the other, or on one rank. A rank whose
optimizer raises still joins every collective of the step, so that no other rank waits for it.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from scale_core.comm.collectives import exchange_text
from scale_core.compat import profiler_runs
from scale_core.consistency.all_ranks import all_gather_json
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import compare_replicas
from scale_core.consistency.execution_order import message_tag
from scale_core.errors import ScaleDistributedError, recovery_hint
from scale_core.optim.step_hooks import OptimizerSteps
from scale_core.optim.traits import KINDS
from scale_core.shard import as_local, on_local_tensors
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad, unreduced_grad
from scale_oss.buckets.bucket import Bucket
from scale_oss.buckets.full_param_bucket import FullParamBucket
from scale_oss.buckets.in_place_bucket import InPlaceBucket
from scale_oss.piece_gradient import raise_unreduced
from scale_oss.state_dict import OSSStateDictMixin

_MASTER = "master_param"


class OSSStep(OSSStateDictMixin):
    """The step of an `OSS`, which is built and described there."""

    buckets: list[Bucket]  # of replicated parameters
    in_place_buckets: list[InPlaceBucket]  # of shards that are updated where they are
    full_param_buckets: list[FullParamBucket]  # of shards that are gathered into full parameters for the step
    together: bool
    waits_in_step: bool
    gets_reduced_gradients: bool
    reduced_by: weakref.ref[nn.Module] | None
    recorded_steps: OptimizerSteps
    _optim_class: type[Optimizer]
    _broadcast_fp16: bool
    _check_every: int
    _step_numbers: Iterator[int]

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Updates this rank's shard of the parameters, and gathers the shards of all ranks.

        Args:
            closure: Computes the loss again and returns it; its gradients must be averaged, too. A value that can't be
                called is for the step of `optim`.
            **kwargs: For the step of `optim`.

        Returns:
            The result of the closure.

        Raises:
            RuntimeError: Gradients have not been reduced, or a rank can't be reached.
            ContractError: Hyperparameters differ between ranks, for example because a scheduler saw different losses;
                or the step of `optim` has raised on a different rank. That rank raises its own error. With
                `ShardedDataParallel`, and over shards of `fully_shard`, it is raised at the end of the next backward
                pass.
        """
        return self._step(closure, kwargs)

    def _step(self, closure: Any, kwargs: dict[str, Any]) -> Any:
        """`step`, below the hooks that torch calls around it: for a class whose own `step` does more."""
        self.wait()
        loss = None
        if closure is not None and not callable(closure):
            kwargs["closure"] = closure  # It is for the optimizer's own step.
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._consolidated is not None or self._is_empty:
            self._consolidated, self._is_empty = None, False
        self._resync_storage()
        number = next(self._step_numbers)
        if self._check_every and number % self._check_every == 1 % self._check_every:
            self._check_replicas(number)
        if self.buckets:
            self.recorded_steps.add(self)
        self.shard_grads()
        for bucket in self.full_param_buckets:
            bucket.prepare()
        copy_options(self.param_groups, self.optim.param_groups)
        failure = self._step_optimizer(kwargs)
        if failure is not None:
            self.recorded_steps.mark_failed(failure)
        copy_options(self.optim.param_groups, self.param_groups)
        for shards in self.in_place_buckets:
            shards.mark_updated()
        try:
            if self.buckets and not self.gets_reduced_gradients:  # No pass of ours compares; during the all-gathers.
                self.contract.compare_steps()
        except Exception:
            if failure is None:
                raise
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # With its traceback it would hold the tensors of the step.
        self._wait_unless_overlapped()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters, and of this rank's pieces of them."""
        for bucket in self.buckets:
            bucket.zero_grad(set_to_none=set_to_none)
        if not self.gets_reduced_gradients or self.in_place_buckets or self.full_param_buckets:
            super().zero_grad(set_to_none)

    def wait(self) -> None:
        """Returns when the parameters are up to date after a step that overlaps the next forward pass."""
        for bucket in self.buckets:
            if bucket.is_gathering:
                self.contract.wait(bucket.gather_event, bucket.wait)

    # The parts of the step, in order.

    def _resync_storage(self) -> None:
        """Moves replaced parameters back into the buckets, and loads and syncs unrounded ones."""
        with as_local():
            states = self.optim.state
            for bucket in self.buckets:
                bucket.resync_storage()
                for piece in bucket.optimizer_params:
                    master = states[piece].get(_MASTER) if piece in states else None
                    if master is not None and not master.is_set_to(piece.data):
                        bucket.load_master(piece, master, torch.float16)
                        states[piece][_MASTER] = piece.data
                bucket.sync_master()

    @on_local_tensors
    def _check_replicas(self, number: int) -> None:
        """Compares the parameters between the ranks; for a module once for all its optimizers."""
        wrapper = None if self.reduced_by is None else self.reduced_by()
        named = [item for bucket in self.buckets for item in zip(bucket.names, bucket.params, strict=True)]
        if isinstance(wrapper, nn.Module) and isinstance(module := wrapper.module, nn.Module):
            optimizers = cast(Any, wrapper).sharded_optimizers
            named = list(module.named_parameters()) if optimizers[0] is self else []
        if named:
            compare_replicas(named, self.contract, number)

    def shard_grads(self) -> None:
        """Gives the pieces their parts of averaged gradients, unless these are reduced into them.

        Raises:
            RuntimeError: They are, but a gradient has not been reduced.
        """
        with as_local():
            for bucket in self.buckets:
                if not self.gets_reduced_gradients:
                    bucket.shard_full_grads()
                    continue
                for index, param in enumerate(bucket.params):
                    if unreduced_grad(param) is not None:
                        raise_unreduced(bucket.names[index])
                bucket.prepare_step()

    def _step_optimizer(self, kwargs: Mapping[str, Any]) -> Exception | None:
        """Steps on this rank's shard and starts the all-gathers of the buckets.

        Returns the exception of the inner optimizer. The rank still takes part in all collectives of the step.
        """
        with as_local():
            local_params = [param for shards in self.in_place_buckets for param in shards.optimizer_params]
            parts = [bucket.optimizer_params for bucket in self.buckets]
            if self._optim_class in KINDS and len(parts) > 1 and not self.full_param_buckets and not self.together:
                turns = [params or None for params in (*parts, local_params)]
                return step_in_turn(self.optim, turns, self.contract, kwargs, self._gather_bucket)
            # An unknown optimizer takes one step: it may count its calls.
            failure = None
            if self.together:
                call_on_one_rank(self.optim, self.contract, "step", (), kwargs, self.buckets)
            elif self.full_param_buckets:
                local_params += [param for params in parts for param in params]
                try:
                    failure = step_in_turn(self.optim, self._full_parts(local_params), self.contract, kwargs)
                except BaseException:
                    for bucket in self.full_param_buckets:
                        bucket.release()
                    raise
                raise_on_all_ranks(failure, self.contract, self._optim_class.__name__)
            else:
                failure = failure_of(lambda: self.optim.step(**kwargs), self.contract)
            for number in range(len(parts)):
                self._gather_bucket(number)
            return failure

    def _full_parts(self, local_params: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
        """Yields the parameters to step on: local ones, if any rank has some, and gathered ones of buckets.

        An optimizer of torch steps on one bucket after the other. Any other takes a single step, because it may count
        its calls, so that all full parameters of this rank are in memory at once. They are sent back after the step.
        """
        in_turn = self._optim_class in KINDS
        if in_turn and (self.buckets or self.in_place_buckets):
            yield local_params
        for buckets in [[bucket] for bucket in self.full_param_buckets] if in_turn else [self.full_param_buckets]:
            gathered = [bucket for bucket in buckets if bucket.gather_to_owners()]
            if in_turn and not gathered:
                continue
            full_params = [full for bucket in gathered for full in bucket.optimizer_params if full.grad is not None]
            yield full_params if in_turn else [*local_params, *full_params]
            for bucket in gathered:
                bucket.scatter_to_shards()

    def _gather_bucket(self, number: int) -> None:
        """Starts the all-gather of a bucket after its step; the number after the last one stands for the shards."""
        with as_local():
            if number == len(self.buckets):
                return
            bucket = self.buckets[number]
            if bucket.needs_gather:
                self._send_bucket(bucket)
            if self.gets_reduced_gradients:
                bucket.consume_grads()
            else:
                bucket.drop_grads()

    def _send_bucket(self, bucket: Bucket, *, updates_all: bool = False) -> None:
        """Starts the all-gather of the elements that this rank has updated: with a gradient, or all of them."""
        in_half = self._broadcast_fp16 and bucket.dtype == torch.float32
        wire_dtype = torch.float16 if in_half else None
        bucket.all_gather(message_tag(bucket.gather_event), wire_dtype, updates_all=updates_all)
        if bucket.master is not None:  # Only this rank has it unrounded: save it with the state.
            for piece in bucket.optimizer_params:
                if piece.grad is not None:
                    self.optim.state.setdefault(piece, {})[_MASTER] = piece.data

    def _wait_unless_overlapped(self) -> None:
        """Waits for the all-gathers that can't run during the next forward pass."""
        waits = self.waits_in_step or profiler_runs()  # No transfer may be under way when a profiler ends.
        for bucket in self.buckets:
            if bucket.is_gathering and (waits or bucket.is_read_past_parameters()):
                self.contract.wait(bucket.gather_event, bucket.wait)


# The step of the inner optimizer.


def copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copies hyperparameters from groups to groups: schedulers change the groups of OSS, some optimizers their own."""
    for options, target_options in zip(source, target, strict=True):
        target_options.update({key: value for key, value in options.items() if key not in ("params", "param_names")})


def failure_of(step: Callable[[], object], contract: Contract) -> Exception | None:
    """Calls an optimizer's step; returns its exception, which the others can read."""
    try:
        step()
    except Exception as error:
        contract.report_failure(error)
        return error
    return None


def step_in_turn(
    optim: Optimizer,
    parts: Iterable[Sequence[nn.Parameter] | None],
    contract: Contract,
    kwargs: Mapping[str, Any],
    after_part: Callable[[int], None] | None = None,
) -> Exception | None:
    """Steps on one part of the parameters after the other, so that each is sent during the next step.

    `optim` looks at one parameter at a time; a part that is None has nothing to step on. `after_part` is called with
    the number of each part when it is updated. Returns the exception of `optim`; it steps on no part after that.
    """
    groups = stepped = optim.param_groups
    failure: Exception | None = None

    def step(params: Sequence[nn.Parameter]) -> None:
        nonlocal stepped
        stepped = _step_params(optim, params, kwargs)

    try:
        for number, params in enumerate(parts):
            if params is not None and failure is None:
                failure = failure_of(functools.partial(step, params), contract)
            if after_part is not None:
                after_part(number)
    except BaseException as error:
        contract.report_failure(error)
        raise
    copy_options(stepped, groups)
    return failure


def _step_params(optim: Optimizer, params: Sequence[nn.Parameter], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lets the optimizer step on these alone; returns its groups as it has left them.

    Counts per group, not per parameter, begin from the same number in each bucket.
    """
    chosen = {id(param) for param in params}
    groups = optim.param_groups
    optim.param_groups = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    try:
        optim.step(**kwargs)
        return optim.param_groups
    finally:
        optim.param_groups = groups


def raise_on_all_ranks(failure: Exception | None, contract: Contract, optim_name: str) -> None:
    """Raises on all ranks if the step of one has raised, because each updates full parameters for the others."""
    reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
    reasons = all_gather_json(reason, contract, f"the step of {optim_name}")
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # With its traceback it would hold the tensors of the step.
    for rank, reason in enumerate(reasons):
        if reason:
            raise _failed_step(f"{optim_name}.step()", rank, reason)


def call_on_one_rank(
    optim: Optimizer,
    contract: Contract,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    buckets: Sequence[Bucket],
) -> Any:
    """Calls a method on the first rank, which has all parameters.

    The others take over its hyperparameters, and drop the gradients that it has dropped.
    """
    group, packed, result = contract.group, "", None
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    has_grads = [piece.grad is not None for piece in pieces]
    failure: Exception | None = None
    if group.rank == 0:
        try:
            result = getattr(optim, name)(*args, **kwargs)
        except Exception as error:
            failure = error
        options = [{key: value for key, value in options.items() if key != "params"} for options in optim.param_groups]
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
        packed = pickle.dumps((options, [piece.grad is not None for piece in pieces], reason)).hex()
    with contract.waiting("the owner's options"):
        packed = exchange_text(packed, group, limit_seconds=contract.limit_seconds)[0]
    options, keeps_grads, reason = pickle.loads(bytes.fromhex(packed))
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # With its traceback it would hold the tensors of the step.
    if reason:
        raise _failed_step(f"{type(optim).__name__}.{name}()", 0, reason)
    copy_options(options, optim.param_groups)
    params = [param for bucket in buckets for param in bucket.params]
    for param, piece, had_grad, keeps_grad in zip(params, pieces, has_grads, keeps_grads, strict=True):
        if had_grad and not keeps_grad:
            piece.grad = None
            set_unreduced_grad(param, None)
    return result


def _failed_step(call: str, rank: int, reason: str) -> ScaleDistributedError:
    return ScaleDistributedError(
        f"{call} has raised on rank {rank}, which updates parameters for all: {reason}. They may be updated in part: "
        f"{recovery_hint()}",
        rank=rank,
    )
