"""`OSS`: any optimizer, with its state sharded between the ranks (ZeRO-1).

Parameters and gradients are replicated. Each rank updates its shard of the parameters, with an optimizer that holds the
state of that shard alone, and an all-gather brings the updated shards to all ranks.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer

from scale_core.arguments import checked_arguments, refuse_inference_mode
from scale_core.comm.group import GroupLike, group_of
from scale_core.consistency.all_ranks import call_on_all_ranks
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import check_interval
from scale_core.consistency.flight_recorder import next_unique_id
from scale_core.errors import renamed_arguments
from scale_core.optim.clip_grad import MeasuredGradient, check_max_norm, clip_factor, norm_of, scale_gradients
from scale_core.optim.step_checks import allow_full_state
from scale_core.optim.step_hooks import OptimizerSteps
from scale_core.optim.traits import check_kind, constructor_arguments, is_elementwise
from scale_core.shard import as_local, on_local_tensors, stages_of
from scale_oss.buckets.bucket import Bucket
from scale_oss.buckets.bucketing import BucketAssigner, check_no_layer_shards, check_separate_updates, describe_groups
from scale_oss.buckets.full_param_bucket import FullParamBucket
from scale_oss.buckets.state_placement import ranks_of_shards
from scale_oss.inner_methods import check_call, inner_attribute
from scale_oss.options import OSSOptions
from scale_oss.state_dict import StateByParam
from scale_oss.step import OSSStep, call_on_one_rank, copy_options

_logger = logging.getLogger(__name__)


class OSS(OSSStep):
    """Optimizer state sharding: wraps any optimizer. Schedulers, scalers and loops accept it as an optimizer.

        >>> import torch
        >>> from scale_oss import OSS
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()

    Before it steps, gradients must be averaged over the ranks, by DistributedDataParallel or by `ShardedDataParallel`.
    With the latter each rank keeps only its shard of them.

    Parameters may be shards already, as in a model under `fully_shard` (scale-fsdp). An optimizer that updates
    each element by itself then steps on the shards themselves, as it would without OSS. One that needs full tensors,
    for example Muon, Adafactor or LAMB, gets each full tensor on one rank during the step, and keeps its state
    there: see `full_param_bucket`. In a hybrid mesh each copy of the model does so by itself. One OSS may hold both
    kinds of parameters.

    Args:
        params: Parameters, named parameters or parameter groups, equal on all ranks. Except shards, they move into flat
            buffers.
        optim: The class of the optimizer.
        process_group: The ranks. If all parameters are shards, None is the ranks that hold the shards. Otherwise it is
            the default group. Of a ParallelDims these are the ranks of `edp`, with or without experts.
        broadcast_fp16: Send updated parameters in half precision: less to send, and every rank computes with rounded
            parameters. The unrounded ones are in the optimizer's state, as `master_param`. May be set later as an
            attribute. Pieces of shards are sent as they are.
        options: How the optimizer is divided between ranks: see `OSSOptions`.
        **defaults: Arguments of `optim`, or the `defaults` of an optimizer that was built.

    Attributes:
        optim: The optimizer of this rank's shard; its parameters are pieces of the user's.
        group: The ranks.
        shard_group: The same ranks, for derived classes with a different object as `group`.
        waits_in_step: Whether `step` waits until the parameters are up to date. Otherwise each one waits at its use.

    Raises:
        TypeError: `optim` is not an optimizer class.
        ValueError: An optimizer that can't be sharded, or shards that can't be gathered; ranks with different
            parameters are a `ContractError`.

    See also: [the guide to OSS](../guides/oss.md).
    """

    @checked_arguments(own="optim")
    @renamed_arguments(
        group="process_group=",
        **{field.name: f"options=OSSOptions({field.name}=...)" for field in fields(OSSOptions)},
    )
    def __init__(
        self,
        params: Iterable[Any],
        optim: type[Optimizer] = SGD,
        process_group: GroupLike = None,
        *,
        broadcast_fp16: bool = False,
        options: OSSOptions | None = None,
        **defaults: Any,
    ) -> None:
        refuse_inference_mode("OSS")
        options = options or OSSOptions()
        elementwise, self.together = options.elementwise, options.together
        is_known_elementwise = is_elementwise(optim)
        check_kind(optim, elementwise=elementwise, together=self.together)
        self.elementwise = (is_known_elementwise and not self.together) if elementwise is None else elementwise
        self._broadcast_fp16 = broadcast_fp16
        self._bucket_numel = options.bucket_numel
        self._check_every = check_interval(options.check_replicas_every)
        self._step_numbers = itertools.count(1)
        self._optim_class = optim
        self._built = False
        self._consolidated = None
        self.waits_in_step = True
        self.gets_reduced_gradients = False  # `ShardedDataParallel` averages gradients into the pieces.
        self.reduced_by: weakref.ref[nn.Module] | None = None  # who does so
        super().__init__(params, dict(defaults))
        self.shard_group = (
            ranks_of_shards(self._all_params()) if process_group is None else group_of(process_group, "edp")
        )
        check_no_layer_shards(self.param_groups, self.shard_group)
        self.contract = Contract(self.shard_group, options.limit_seconds)
        self.recorded_steps = self.contract.recorded_steps = OptimizerSteps()
        self._check_same_arguments()
        if not self.together:
            check_separate_updates(optim, defaults, self._all_params())
        self._assigner = BucketAssigner(
            self.shard_group,
            self.contract,
            optim.__name__,
            next_unique_id("OSS", self.shard_group),
            elementwise=self.elementwise,
            together=self.together,
            bucket_numel=options.bucket_numel,
        )
        self.buckets = self._assigner.replicated
        self.contract.named_params = functools.partial(_named_params, self.buckets)
        self.in_place_buckets = self._assigner.in_place
        self.full_param_buckets = self._assigner.full_param
        self.placements = self._assigner.placements
        self.optim = self._build_optimizer(self._assigner.add(self.param_groups), defaults)
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups)
        self._state = StateByParam((self.optim, self.placements))
        self._check_initial_state()
        self._built = True
        if self.shard_group.rank == 0 and _logger.isEnabledFor(logging.INFO):
            self._log_plan()

    @property
    def group(self) -> Any:
        """The ranks, a `scale_core.Group`."""
        return self.shard_group

    @property
    def broadcast_fp16(self) -> bool:
        """Whether updated parameters are sent in half precision. All ranks set it together; ContractError if not."""
        return self._broadcast_fp16

    @broadcast_fp16.setter
    def broadcast_fp16(self, value: bool) -> None:
        self.contract.check_equal("OSS.broadcast_fp16", [f"broadcast_fp16={value}"])
        self._broadcast_fp16 = value

    def _check_same_arguments(self) -> None:
        """Compares the arguments of the ranks."""
        settings = (
            f"{self._optim_class.__name__}, elementwise={self.elementwise}, together={self.together}, "
            f"{self._bucket_numel} elements per bucket, check_replicas_every={self._check_every}, "
            f"broadcast_fp16={self._broadcast_fp16}"
        )
        self.contract.check_equal("the parameters given to OSS", [settings, *describe_groups(self.param_groups)])

    def _log_plan(self) -> None:
        """Logs how the parameters are divided."""
        _logger.info(
            "OSS of %s: %d parameters over %d ranks in %d buckets of %d bytes in all, %d of shards that are "
            "stepped on in place, %d of shards that are put together; %s",
            self._optim_class.__name__,
            len(self._all_params()),
            self.shard_group.size,
            len(self.buckets),
            sum(bucket.full.nbytes for bucket in self.buckets),
            len(self.in_place_buckets),
            len(self.full_param_buckets),
            "the first rank updates all" if self.together else f"tensors are {'cut' if self.elementwise else 'whole'}",
        )

    def _build_optimizer(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> Optimizer:
        """The optimizer of this rank's shard; an error of one rank, as of Muon for a vector, is raised on all."""
        with self._gathered_full_params(self._assigner.full_param):
            optimizer = call_on_all_ranks(
                lambda: self._optim_class(groups, **constructor_arguments(self._optim_class, defaults)),
                f"the start of {self._optim_class.__name__}",
                self.contract,
            )
        if not self.elementwise:  # It gets full tensors, also if they are shards of a model that one rank has in full.
            allow_full_state(optimizer)
        return optimizer

    @contextmanager
    def _gathered_full_params(self, buckets: Sequence[FullParamBucket]) -> Iterator[None]:
        """Inside, the full parameters of these buckets have values: an optimizer may read them when it gets them."""
        for bucket in buckets:
            bucket.gather_params()
        try:
            # If a rank holds all elements of a parameter, its optimizer reads a plain tensor: no other rank takes part.
            with nullcontext() if self.elementwise else as_local():
                yield
        finally:
            for bucket in buckets:
                bucket.release()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Iterator[nn.Parameter]], Iterable[nn.Parameter]] | None = None,
    ) -> Tensor:
        """Scales the gradients in place so that their norm is at most `max_norm`; all ranks call it together.

        Each rank measures its own shard, so that each element counts once and is measured once. Parameters of a
        pipeline's stage are clipped by the norm of all stages, whose ranks call it together.

        Args:
            max_norm: The largest norm allowed; `math.inf` only measures.
            norm_type: p of the p-norm; `math.inf` is the largest magnitude.
            filter_params_fn: Gets an iterator over the parameters and returns those whose norm is meant.

        Returns:
            The norm before, scalar; equal on all ranks.

        Raises:
            ValueError: `max_norm` is below 0 or not a number, `norm_type` is not above 0, or `filter_params_fn` returns
                none of the parameters.
        """
        return clip_grads_of([self], max_norm, norm_type, filter_params_fn)

    # Methods and attributes of the inner optimizer.

    def __getattr__(self, name: str) -> Any:
        return inner_attribute(self, vars(self).get("optim"), name, self._call_inner)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("optim")
        if inner is None or name.startswith("_") or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def _call_inner(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the inner optimizer on all ranks, and gathers its changes; all ranks together."""
        check_call(name, self.optim, [*args, *kwargs.values()], together=self.together, reassembles=self._reassembles)
        self.wait()
        self._invalidate()
        self._resync_storage()
        self.shard_grads()
        copy_options(self.param_groups, self.optim.param_groups)
        if self.together:
            result = call_on_one_rank(self.optim, self.contract, name, args, kwargs, self.buckets)
        else:
            result = getattr(self.optim, name)(*args, **kwargs)
        copy_options(self.optim.param_groups, self.param_groups)
        for bucket in self.buckets:
            self._send_bucket(bucket, updates_all=True)
            if not self.gets_reduced_gradients:
                bucket.drop_grads()
        for shards in self.in_place_buckets:
            increment_version(shards.params)
        self._wait_unless_overlapped()
        return result

    @property
    def _reassembles(self) -> bool:
        """Whether full tensors are put together for the step."""
        return bool(self.full_param_buckets)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an OSS can't be copied or pickled: it updates the parameters of this very model, and its state is sharded "
            "between the ranks. Copy the module and build OSS(copied.parameters(), ...) and its wrapper again, or save "
            "optimizer.state_dict()"
        )

    # Parameter groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, for example of layers that begin to train; all ranks together.

        If it raises, the group is not added.

        Raises:
            ValueError: A parameter is in a group already, or can't be sharded; a `ContractError`: ranks differ.
        """
        super().add_param_group(param_group)
        if not self._built:
            return
        number = len(self.param_groups) - 1
        group = self.param_groups[number]
        description = f"a group of {self._optim_class.__name__}"
        try:
            check_no_layer_shards([group], self.shard_group, number)
            self.contract.check_equal("a parameter group added to OSS", list(describe_groups([group], number)))
            num_buckets = len(self.full_param_buckets)
            (stepped,) = self._assigner.add([group], number)
            with self._gathered_full_params(self.full_param_buckets[num_buckets:]):
                call_on_all_ranks(lambda: self.optim.add_param_group(stepped), description, self.contract)
        except BaseException:
            del self.param_groups[number:], self.optim.param_groups[number:]
            self._assigner.rollback(group["params"])
            raise
        self._consolidated = None
        self._check_initial_state()  # Always: one rank alone may have looked at its state, and take it for changed.
        copy_options(self.optim.param_groups[-1:], [group])

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Returns, by rank, the parameter groups with the parameters that the rank updates in part or in full."""
        return [
            [{**group, "params": [p for p in group["params"] if id(p) in updated]} for group in self.param_groups]
            for updated in self._assigner.params_by_rank()
        ]

    @property
    def params_with_gradients(self) -> list[nn.Parameter]:
        """The parameters with averaged gradients before a step, for `ShardedGradScaler` to divide."""
        return self.local_params if self.gets_reduced_gradients else self._all_params()

    @property
    def local_params(self) -> list[nn.Parameter]:
        """This rank's holders of averaged gradients: pieces, and shards as they are."""
        pieces = [piece for bucket in self.buckets for piece in bucket.optimizer_params]
        return pieces + [param for bucket in self._assigner.shard_buckets for param in bucket.params]

    def grad_holders(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yields each parameter and the holder of its averaged gradient here, in an order that all ranks have."""
        for bucket in self.buckets:
            yield from zip(bucket.params, bucket.pieces, strict=True)
        for shards in self._assigner.shard_buckets:
            yield from zip(shards.params, shards.params, strict=True)


def _named_params(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        yield from zip(bucket.names, bucket.params, strict=True)


@torch.no_grad()
@on_local_tensors
def clip_grads_of(
    optimizers: Sequence[OSS],
    max_norm: float,
    norm_type: float = 2.0,
    filter_params_fn: Callable[[Iterator[nn.Parameter]], Iterable[nn.Parameter]] | None = None,
) -> Tensor:
    """Scales the gradients of several optimizers by one norm, and returns it, a scalar: see `OSS.clip_grad_norm_`."""
    check_max_norm(max_norm)
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    selected = {id(param) for param in (params if filter_params_fn is None else filter_params_fn(iter(params)))}
    if selected.isdisjoint(map(id, params)):
        raise ValueError(
            "clip_grad_norm_: filter_params_fn returned none of the optimizer's parameters, and nothing would be "
            "clipped. Have it return some of those that it is given, each once, such as a list of them"
        )
    measured: list[MeasuredGradient] = []
    scaled: list[nn.Parameter] = []
    for optimizer in optimizers:
        optimizer.shard_grads()
        reduced = optimizer.gets_reduced_gradients
        # Full gradients are scaled in full, so that every rank sees the same ones.
        for param, piece in optimizer.grad_holders():
            if id(param) in selected:
                measured.append(MeasuredGradient(param, piece, piece.grad))
                scaled.append(piece if reduced else param)
    contract = optimizers[0].contract
    with contract.waiting("gradient norm"):
        norm = norm_of(measured, norm_type, contract.limit_seconds, stages_of(params))
    if math.isinf(max_norm):
        return norm
    scale_gradients(scaled, clip_factor(norm, max_norm))
    return norm
