"""`OSS`: any optimizer, with its state sharded between the ranks (ZeRO-1).

The model stays whole on every rank, and so do its gradients; each rank updates its part of the parameters, with an
optimizer that holds the state of that part alone, and the ranks then give each other what they have updated.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from scale_core.comm.group import GroupLike, group_of
from scale_core.compat import profiler_runs
from scale_core.consistency.all_ranks import do_alike
from scale_core.consistency.contract import Contract, next_number
from scale_core.consistency.execution_order import Event
from scale_core.optim.clip_grad import check_max_norm, clip_factor, grad_norm
from scale_core.optim.step_checks import step_for_all
from scale_core.optim.traits import KINDS, check_kind, constructor_arguments, works_by_element
from scale_oss.bucketing import Sorter, lines_of_groups, refuse_parts
from scale_oss.state_by_param import StateByParam
from scale_oss.state_dict import WithState
from scale_oss.state_placement import ranks_of_shards
from scale_oss.step import (
    copy_options,
    follow_parameters,
    give_gradients,
    publish,
    step_by_buckets,
    step_in_turn,
    step_on_one_rank,
    wait,
)


def clip_together(
    optimizers: Sequence[OSS],
    max_norm: float,
    norm_type: float = 2.0,
    filter_params_fn: Callable[[Iterator[nn.Parameter]], Iterable[nn.Parameter]] | None = None,
) -> Tensor:
    """Scales the gradients of several optimizers by one norm: see `OSS.clip_grad_norm`."""
    check_max_norm(max_norm)
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    wanted = {id(param) for param in (params if filter_params_fn is None else filter_params_fn(iter(params)))}
    if wanted.isdisjoint(map(id, params)):
        raise ValueError(
            "clip_grad_norm: filter_params_fn returned none of the optimizer's parameters, and nothing would be "
            "clipped: have it return some of those that it is given, each once, such as a list of them"
        )
    chosen: list[tuple[nn.Parameter, nn.Parameter]] = []  # whose gradient is measured, and whose is scaled
    for optimizer in optimizers:
        optimizer.take_gradients()
        reduced = optimizer.gets_reduced_gradients
        # Of whole gradients all is scaled, so that every rank sees the same ones.
        chosen += [(piece, piece if reduced else p) for p, piece in optimizer.measured() if id(p) in wanted]
    contract = optimizers[0].contract
    with contract.waiting(Event("gradient norm", "")):
        norm = grad_norm([piece for piece, _ in chosen], norm_type, contract.limit_seconds)
    if math.isinf(max_norm):
        return norm
    factor = clip_factor(norm, max_norm)
    for _, scaled in chosen:
        if scaled.grad is not None:
            scaled.grad.mul_(factor.to(scaled.grad.device))
    return norm


BUCKET_NUMEL = 2**23
"""Elements of a bucket: some tens of megabytes, enough for full speed and little beside a model."""


class OSS(WithState):
    """Optimizer state sharding: wraps any optimizer, and is one to schedulers, scalers and loops.

        >>> import torch
        >>> from scale_oss import OSS
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()

    Gradients must be averaged over the ranks when it steps, by DistributedDataParallel, or by `ShardedDataParallel`,
    which leaves each rank its part of them alone.

    Parameters may be shards already, as those of a model under `fully_shard` (scale-fsdp). An optimizer that updates
    each element by itself then steps on the shards as they are, as it would without OSS. One that needs whole tensors,
    such as Muon, Adafactor or LAMB, gets each tensor whole on one rank for the time of the step, and keeps its state
    there: see `whole`. In a hybrid mesh each copy of the model does so by itself. One OSS may hold both kinds of
    parameters.

    Args:
        params: Parameters, named parameters or parameter groups, equal on all ranks. They get their memory in flat
            buffers, but for shards.
        optim: The class of the optimizer.
        group: The ranks. None is those between which shards are divided, if all parameters are shards, or else the
            default group.
        broadcast_buffer_size: FairScale's; without effect.
        broadcast_fp16: Send updated parameters in half precision: less to send, and every rank computes with rounded
            parameters. The unrounded ones are in the optimizer's state, as `master_param`. May be set later as an
            attribute. Pieces of shards travel as they are.
        force_broadcast_object: FairScale's; without effect.
        elementwise: Whether `optim` updates each element by itself, so that tensors may be cut. None is what is known
            of torch.optim's own classes; of any other class, False: right for all that look at one tensor at a time.
        together: Whether `optim` looks at all tensors together, as Prodigy and D-Adaptation do, which estimate one step
            size. Then the first rank updates all of them and has all of the state: nothing is shared out, and results
            are right. Not for shards.
        bucket_numel: Elements that travel together; of shards that are put together for the step, elements that each
            rank gets at a time.
        limit_seconds: The longest wait for another rank; None is the group's own limit, at most ten minutes.
        **defaults: Arguments of `optim`; the `defaults` of one that was built will do, too.

    Attributes:
        optim: The optimizer of this rank's part; its parameters are pieces of the user's.
        group: The ranks.
        buckets: The parameters that are whole on every rank, in the order in which they were given.
        in_place_buckets: The shards that are stepped on where they are.
        whole_buckets: The shards that are put together for the step.
        waits_by_itself: `step` returns with whole parameters; otherwise whoever uses them next calls `wait`.
        gets_reduced_gradients: Gradients are averaged into the pieces, bucket by bucket, by somebody else.
        reduced_by: Who does so.

    Raises:
        TypeError: `optim` is no optimizer class.
        ValueError: An optimizer that can't be sharded, or shards that can't be put together; ranks with different
            parameters are a `ContractError`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[Optimizer] = SGD,
        group: GroupLike = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        *,
        elementwise: bool | None = None,
        together: bool = False,
        bucket_numel: int = BUCKET_NUMEL,
        limit_seconds: float | None = None,
        **defaults: Any,
    ) -> None:
        known = works_by_element(optim)
        check_kind(optim, elementwise=elementwise, together=together)
        self.elementwise = (known and not together) if elementwise is None else elementwise
        self.together = together
        self.broadcast_fp16 = broadcast_fp16
        self._bucket_numel = bucket_numel
        self._optim_class = optim
        self._built = False
        self._consolidated = None
        self.waits_by_itself = True
        self.gets_reduced_gradients = False
        self.reduced_by: weakref.ref[nn.Module] | None = None
        super().__init__(params, dict(defaults))
        self.group = ranks_of_shards(self._all_params()) if group is None else group_of(group)
        refuse_parts(self.param_groups, self.group)
        self.contract = Contract(self.group, limit_seconds)
        how = (
            f"{optim.__name__}, elementwise={self.elementwise}, together={together}, {bucket_numel} elements per bucket"
        )
        self.contract.agree("the parameters given to OSS", [how, *lines_of_groups(self.param_groups)])
        self._sorter = Sorter(
            self.group,
            self.contract,
            optim.__name__,
            next_number("the number of an OSS", self.contract),
            elementwise=self.elementwise,
            together=together,
            bucket_numel=bucket_numel,
        )
        self.buckets = self._sorter.replicated
        self.in_place_buckets = self._sorter.in_place
        self.whole_buckets = self._sorter.whole
        self.optim = self._build(self._sorter.add(self.param_groups), defaults)
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups)
        self.state = StateByParam(self.optim, self._sorter.places)
        self._look_for_state()
        self._built = True

    def _build(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> Optimizer:
        """The optimizer of this rank's part, which may refuse it, as Muon refuses what is no matrix."""
        made = do_alike(
            lambda: self._optim_class(groups, **constructor_arguments(self._optim_class, defaults)),
            f"the start of {self._optim_class.__name__}",
            self.contract,
        )
        if self.together:
            step_for_all(made)
        return made

    # The step.

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Updates this rank's part of the parameters, and gives all ranks all parts.

        Args:
            closure: Computes the loss anew and returns it; its gradients must be averaged, too. What can't be called is
                for the step of `optim`.
            **kwargs: For the step of `optim`.

        Returns:
            What the closure has returned.

        Raises:
            RuntimeError: Gradients have not been reduced, or the ranks have lost each other.
        """
        self.wait()
        loss = None
        if closure is not None and not callable(closure):
            kwargs["closure"] = closure  # The optimizer's own step may know what it is.
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._has_changed()
        follow_parameters(self.buckets, self.optim.state)
        self.take_gradients()
        for bucket in self.whole_buckets:
            bucket.prepare()
        copy_options(self.param_groups, self.optim.param_groups)
        self._update(kwargs)
        copy_options(self.optim.param_groups, self.param_groups)
        for shards in self.in_place_buckets:
            shards.publish()
        if self.waits_by_itself or profiler_runs():  # Nothing may be on its way when a profiler ends.
            self.wait()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters, and of this rank's pieces of them."""
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            bucket.clear_gradients(set_to_none=set_to_none)

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Iterator[nn.Parameter]], Iterable[nn.Parameter]] | None = None,
    ) -> Tensor:
        """Scales the gradients in place so that their norm is at most `max_norm`; all ranks call it together.

        Each rank measures its own part, so that each element counts once and is measured once.

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
        return clip_together([self], max_norm, norm_type, filter_params_fn)

    def wait(self) -> None:
        """Returns when the parameters are whole again after a step that runs beside the next forward pass."""
        wait(self.buckets, self.contract)

    def refresh_trainable(self) -> None:
        """FairScale's name; what trains is looked up in every step."""

    def _clear_cache(self) -> None:
        """FairScale's name, which trainers call; nothing is cached."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an OSS can't be copied or pickled: it updates the parameters of this very model, and its state is shared "
            "between the ranks: copy the module and build OSS(copied.parameters(), ...) and its wrapper anew, or save "
            "optimizer.state_dict()"
        )

    # Parameter groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as of layers that begin to train; all ranks together. What is refused is not added.

        Raises:
            ValueError: A parameter is in a group already, or can't be sharded; a `ContractError`: ranks differ.
        """
        super().add_param_group(param_group)
        if not self._built:
            return
        number = len(self.param_groups) - 1
        group = self.param_groups[number]
        what = f"a group of {self._optim_class.__name__}"
        try:
            refuse_parts([group], self.group, number)
            self.contract.agree("a parameter group added to OSS", list(lines_of_groups([group], number)))
            (stepped,) = self._sorter.add([group], number)
            do_alike(lambda: self.optim.add_param_group(stepped), what, self.contract)
        except BaseException:
            del self.param_groups[number:], self.optim.param_groups[number:]
            self._sorter.take_back(group["params"])
            raise
        self._consolidated = None
        self._look_for_state()  # Always: one rank alone may have looked at its state, and take it for changed.
        copy_options(self.optim.param_groups[-1:], [group])

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Returns, by rank, the parameter groups with those parameters of which the rank updates some part."""
        everyones = self._sorter.updated_by()
        return [
            [{**group, "params": [p for p in group["params"] if id(p) in updated]} for group in self.param_groups]
            for updated in everyones
        ]

    @property
    def params_with_gradients(self) -> list[nn.Parameter]:
        """Where averaged gradients stand before a step, which is what `ShardedGradScaler` divides."""
        return self.local_params if self.gets_reduced_gradients else self._all_params()

    @property
    def local_params(self) -> list[nn.Parameter]:
        """What this rank has of the parameters' gradients when they are averaged: pieces, and shards as they are."""
        pieces = [piece for bucket in self.buckets for piece in bucket.stepped]
        return pieces + [param for bucket in self._sorter.of_shards for param in bucket.params]

    def measured(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yields each parameter and what has its averaged gradient on this rank, in an order that all ranks have."""
        for bucket in self.buckets:
            yield from zip(bucket.params, bucket.pieces, strict=True)
        for shards in self._sorter.of_shards:
            yield from zip(shards.params, shards.params, strict=True)

    # What the step is made of.

    def _update(self, kwargs: Mapping[str, Any]) -> None:
        """Steps on this rank's parts, and sends those of which others have the rest."""
        here = [param for shards in self.in_place_buckets for param in shards.stepped]
        parts = [bucket.stepped for bucket in self.buckets]
        if self._optim_class in KINDS and len(parts) > 1 and not self.whole_buckets and not self.together:
            step_in_turn(self.optim, [*parts, here], self._send, self.contract, kwargs)
            return
        # Of what is not known it is not known either whether it bears several steps in place of one.
        if self.together:
            step_on_one_rank(self.optim, self.contract, kwargs)
        elif self.whole_buckets:
            here += [param for params in parts for param in params]
            some_are_here = bool(parts or self.in_place_buckets)
            step_by_buckets(self.optim, here if some_are_here else None, self.whole_buckets, self.contract, kwargs)
        else:
            self.optim.step(**kwargs)
        for number in range(len(parts)):
            self._send(number)

    def _send(self, number: int) -> None:
        """A bucket was stepped on; the last number is that of the shards, which stay where they are."""
        if number < len(self.buckets):
            publish(self.buckets[number], self.optim.state, in_half=self.broadcast_fp16)
            self.buckets[number].use_up()

    def take_gradients(self) -> None:
        """Lets pieces have their part of averaged gradients, where these are not reduced into them.

        Raises:
            RuntimeError: They are, but some gradient has not been reduced.
        """
        give_gradients(self.buckets, are_reduced=self.gets_reduced_gradients)
