"""`LocalSGD`: ranks take some steps on their own, then average their parameters; DiLoCo and SlowMo among it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import all_gather, broadcast, reduce_scatter
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.flat.packing import group_in_buckets
from scale_core.shard import Placement, Shard, check_undivided, on_local_tensors, shard_of
from scale_oss.buckets.partition import cut_evenly
from scale_oss.options import LocalSGDOptions, OuterStep, check_count
from scale_oss.sharded_ddp import ShardedDataParallel

if TYPE_CHECKING:
    from scale_core.state.local_shard import LocalShard  # It loads torch.distributed.checkpoint, for states alone.


class LocalSGD:
    """Lets each rank train on its own for `sync_every` steps, and then takes an outer step over the changes of all.

        >>> import torch
        >>> from scale_oss import LocalSGD
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> local_sgd = LocalSGD.diloco(model, optimizer, sync_every=2)
        >>> for _ in range(4):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()    # every second one is followed by an outer step
        ...     optimizer.zero_grad()
        >>> local_sgd.num_syncs
        2

    The training loop and the optimizer stay as they are: `optimizer.step()` counts, by torch's hooks. Ranks send
    nothing between two outer steps, so that the model is not wrapped in DistributedDataParallel over the same ranks.
    Inside a node it may be, or sharded by `fully_shard`; `process_group` then has the ranks that hold the same part,
    one in each node.

    With x the parameters at the last outer step, y the present parameters of each rank, and lr the learning rate of
    `optimizer`, the outer step is, element by element:

        d = (x - mean of y) / lr                                                  (lr is 1 unless `scale_by_lr`)
        u = outer.momentum * u + d
        x = x - outer.lr * lr * (d + outer.momentum * u if nesterov else u)

    Without momentum and with `outer.lr` 1 that is the plain average, as in local SGD (arXiv 1805.09767). SlowMo (arXiv
    1910.00643, algorithm 1) divides by lr, and DiLoCo (arXiv 2311.08105, algorithm 1) has Nesterov's momentum: `slowmo`
    and `diloco` make these.

    Each rank keeps x and u of its shard only, 1/W of them, in fp32 for parameters of half precision. An outer step
    sends 2 (W-1)/W of the parameters' bytes from each rank, as DistributedDataParallel does in every step.

    Args:
        model: The module, with its parameters on their device. Its values on the first rank are sent to all.
        optimizer: The inner optimizer, of parameters of the model.
        sync_every: After how many steps of it the outer step comes.
        outer: The outer step, see `OuterStep`; None is the plain average.
        process_group: The ranks that train on their own; None is the default group. Of a ParallelDims these are the
            ranks of `dp_replicate`. Shard each of them with `dims.get_mesh("fsdp")`.
        options: The inner optimizer's state, buffers and messages: see `LocalSGDOptions`.

    Attributes:
        num_syncs: How many outer steps there were.
        steps_since_sync: How many inner steps this rank has taken since the last of them.

    Raises:
        ValueError: Options that make no sense, or parameters that are not the model's, or the ranks hold
            different parts; a `ContractError`: ranks differ.

    See also: [the guide to local SGD](../guides/slow-networks.md#local-sgd-slowmo-and-diloco).
    """

    @checked_arguments(own="sync_every")
    @on_local_tensors
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int,
        outer: OuterStep | None = None,
        process_group: GroupLike = None,
        options: LocalSGDOptions | None = None,
    ) -> None:
        check_count("LocalSGD", "sync_every", sync_every)
        outer, options = outer or OuterStep(), options or LocalSGDOptions()
        while isinstance(model, DistributedDataParallel | ShardedDataParallel):
            model = model.module
        self.model, self.optimizer, self.sync_every = model, optimizer, sync_every
        self.outer, self.inner_state, self.broadcast_buffers = outer, options.inner_state, options.broadcast_buffers
        self.group = _check_replicas(group_of(process_group, "dp_replicate"), process_group)
        self.num_syncs = self.steps_since_sync = 0
        names = _names_of(model, optimizer, self.group)
        if outer.scale_by_lr and not all("lr" in group for group in optimizer.param_groups):
            raise ValueError(
                f"OuterStep(scale_by_lr=True): expected a learning rate 'lr' in each parameter group, and "
                f"{type(optimizer).__name__} has none in some: leave scale_by_lr out"
            )
        self._contract = Contract(self.group, options.limit_seconds)
        self._contract.check_equal(
            "what was given to LocalSGD",
            [
                f"{sync_every=}, {outer}, inner_state={options.inner_state!r}",
                f"broadcast_buffers={options.broadcast_buffers}, bucket_numel={options.bucket_numel}",
                *(f"{name} {tuple(param.shape)} {param.dtype}" for param, name in names.items()),
            ],
        )
        self._buckets = [
            _OuterBucket(params, [names[param] for param in params], self.group, number, bool(outer.momentum))
            for number, params in enumerate(_in_buckets(list(names), options.bucket_numel))
        ]
        self._broadcast([*model.parameters(), *model.buffers()])
        for bucket in self._buckets:
            bucket.take_changes()
        if options.inner_state == "maintain":
            optimizer.is_per_rank = True  # type: ignore[attr-defined]  # `scale_snapshot` saves each rank's.
        optimizer.register_step_pre_hook(self._before_inner_step)
        optimizer.register_step_post_hook(self._after_inner_step)

    @classmethod
    def slowmo(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int = 48,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.5,
        process_group: GroupLike = None,
        options: LocalSGDOptions | None = None,
    ) -> Self:
        """SlowMo (arXiv 1910.00643): slow momentum over differences in units of the learning rate."""
        outer = OuterStep(outer_lr, outer_momentum, scale_by_lr=True)
        return cls(model, optimizer, sync_every=sync_every, outer=outer, process_group=process_group, options=options)

    @classmethod
    def diloco(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        process_group: GroupLike = None,
        options: LocalSGDOptions | None = None,
    ) -> Self:
        """DiLoCo (arXiv 2311.08105): Nesterov's momentum over differences; the inner optimizer is AdamW there."""
        outer = OuterStep(outer_lr, outer_momentum, nesterov=True)
        return cls(model, optimizer, sync_every=sync_every, outer=outer, process_group=process_group, options=options)

    @torch.no_grad()
    @on_local_tensors
    def sync(self) -> None:
        """Takes the outer step now. All ranks call it together, after the same number of inner steps.

        It is called after every `sync_every`-th inner step. Call it yourself where training ends or is saved between.

        Raises:
            ContractError: Ranks have taken other numbers of steps; before anything is changed.
            ScaleDistributedError: A rank can't be reached.
        """
        states = self._averaged_states()
        took = f"{self.steps_since_sync} steps after outer step {self.num_syncs}"
        self._contract.check_equal("LocalSGD.sync()", [took, *states])
        lrs = {
            id(param): float(group["lr"]) if self.outer.scale_by_lr else 1.0
            for group in self.optimizer.param_groups
            for param in group["params"]
        }
        for bucket in self._buckets:
            mean = bucket.mean(bucket.params, self._contract, "parameters")
            bucket.step(mean, lrs, self.outer.lr, self.outer.momentum, nesterov=self.outer.nesterov)
            bucket.gather(bucket.slow, bucket.params, self._contract, "parameters")
            for key, tensors in states.items():
                of_bucket = [tensors[param] for param in bucket.params]
                bucket.gather(bucket.mean(of_bucket, self._contract, key), of_bucket, self._contract, key)
        if self.inner_state == "reset":
            for param in (param for bucket in self._buckets for param in bucket.params):
                self.optimizer.state.pop(param, None)
        if self.broadcast_buffers:
            self._broadcast(list(self.model.buffers()))
        self.num_syncs += 1
        self.steps_since_sync = 0

    @on_local_tensors
    def state_dict(self) -> dict[str, Any]:
        """The outer state by the parameters' names, each rank's shard of it, as `LocalShard`s.

        `scale_snapshot` and `torch.distributed.checkpoint` save it, and load it at any number of ranks.

        Raises:
            RuntimeError: Between two outer steps, where each rank has other parameters.
        """
        if self.steps_since_sync:
            raise RuntimeError(
                f"LocalSGD.state_dict() {self.steps_since_sync} steps after the last outer step of {self.sync_every}, "
                "where each rank has parameters of its own: save when local_sgd.steps_since_sync is 0, or call "
                "local_sgd.sync() on all ranks before"
            )
        state: dict[str, Any] = {"num_syncs": self.num_syncs}
        for bucket in self._buckets:
            state.update(bucket.state())
        return state

    @on_local_tensors
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state that `state_dict` has returned; the model's and the optimizer's are loaded by themselves.

        Raises:
            ValueError: An entry is missing.
        """
        local_state = {key: value for bucket in self._buckets for key, value in bucket.state().items()}
        if missing := sorted({*local_state, "num_syncs"} - state_dict.keys()):
            raise ValueError(
                f"LocalSGD.load_state_dict: expected an entry '{missing[0]}', and there are {len(state_dict)} others: "
                "load what local_sgd.state_dict() of the same model has returned, with the same outer.momentum"
            )
        for key, part in local_state.items():
            loaded = state_dict[key]
            part.tensor.copy_((loaded.tensor if isinstance(loaded, type(part)) else loaded).view(part.tensor.shape))
        self.num_syncs, self.steps_since_sync = int(state_dict["num_syncs"]), 0

    @on_local_tensors
    def _before_inner_step(self, *_: Any) -> None:
        if self.steps_since_sync:
            return
        local_params = {id(param) for bucket in self._buckets for param in bucket.params}
        for number, group in enumerate(self.optimizer.param_groups):
            if any(param.requires_grad and id(param) not in local_params for param in group["params"]):
                raise RuntimeError(
                    f"the optimizer has parameters in group {number} that LocalSGD does not know, which would never be "
                    "averaged: add groups and unfreeze parameters first, and build LocalSGD(model, optimizer, ...) then"
                )
        for bucket in self._buckets:
            bucket.take_changes()

    @on_local_tensors
    def _after_inner_step(self, *_: Any) -> None:
        self.steps_since_sync += 1
        if self.steps_since_sync >= self.sync_every:
            self.sync()

    def _averaged_states(self) -> dict[str, dict[Tensor, Tensor]]:
        """The inner optimizer's states that are averaged, by key and parameter, in an order that all ranks have."""
        if self.inner_state != "average":
            return {}
        params = [param for bucket in self._buckets for param in bucket.params]
        averaged: dict[str, dict[Tensor, Tensor]] = {}
        for param in params:
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point():
                    averaged.setdefault(key, {})[param] = value
        for values in averaged.values():  # A parameter without a state counts as zeros, which stay where they are.
            values.update({param: torch.zeros_like(param) for param in params if param not in values})
        return dict(sorted(averaged.items()))

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        event = Event("LocalSGD", "values of the first rank")
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            self._contract.wait(event, broadcast(sent, self.group).wait)
            if not tensor.is_contiguous():
                tensor.copy_(sent)


class _OuterBucket:
    """Parameters of one dtype and device, and this rank's shard of their outer state."""

    @on_local_tensors
    def __init__(
        self, params: Sequence[nn.Parameter], names: Sequence[str], group: Group, number: int, has_momentum: bool
    ) -> None:
        self.params, self._names, self._group, self._number = list(params), list(names), group, number
        self._partition = cut_evenly(names, [tuple(param.shape) for param in params], group.size)
        self._spans = self._partition.spans_by_rank[group.rank]
        self._dtype = torch.promote_types(params[0].dtype, torch.float32)
        numel = self._partition.sizes[group.rank]
        self.slow = torch.zeros(numel, dtype=self._dtype, device=params[0].device)  # x
        self._momentum = torch.zeros_like(self.slow) if has_momentum else None  # u

    @torch.no_grad()
    def take_changes(self) -> None:
        """Takes over writes to the parameters since the last outer step, for example of a loaded state."""
        for slow, param, span in zip(self._pieces(self.slow), self.params, self._spans, strict=True):
            local = param.detach().reshape(-1)[span.start : span.stop]
            slow.copy_(torch.where(slow.to(local.dtype) == local, slow, local))

    def mean(self, tensors: Sequence[Tensor], contract: Contract, what: str) -> Tensor:
        """This rank's shard of the average over the ranks; tensors are like the parameters. All ranks call it."""
        full = self._full()
        for tensor, view in zip(tensors, self._views(full), strict=True):
            view.copy_(tensor)
        event = self._event(f"the average of {what}")
        work = reduce_scatter(full, self._group, dtype=self._dtype, tag=message_tag(event))
        with contract.waiting(event):
            return work.wait(contract.limit_seconds)

    def step(self, mean: Tensor, lrs: Mapping[int, float], outer_lr: float, beta: float, *, nesterov: bool) -> None:
        """The outer step of this rank's shard; `mean` is consumed."""
        if outer_lr == 1 and self._momentum is None:
            self.slow.copy_(mean)
            return
        step = self.slow - mean
        momenta: Sequence[Tensor | None] = [None] * len(self.params)
        if self._momentum is not None:
            momenta = self._pieces(self._momentum)
        for param, part, u in zip(self.params, self._pieces(step), momenta, strict=True):
            lr = lrs[id(param)]
            if lr:  # Without a learning rate nothing has moved.
                part.div_(lr)
            if u is not None:
                u.mul_(beta).add_(part)
                part.copy_(part + u * beta if nesterov else u)
            part.mul_(outer_lr * lr)
        self.slow.sub_(step)

    def gather(self, part: Tensor, tensors: Sequence[Tensor], contract: Contract, what: str) -> None:
        """Writes all ranks' parts into tensors that are like the parameters. All ranks call it."""
        full, event = self._full(), self._event(f"the gather of {what}")
        work = all_gather(full, part.to(full.dtype), self._group, tag=message_tag(event))
        contract.wait(event, work.wait)
        for tensor, view in zip(tensors, self._views(full), strict=True):
            tensor.copy_(view)

    def state(self) -> dict[str, LocalShard]:
        """This rank's shards of x and u, by the parameters' names."""
        from scale_core.state.local_shard import LocalShard

        state = {}
        for key, flat in (("slow", self.slow), ("momentum", self._momentum)):
            if flat is None:
                continue
            for name, param, span, piece in zip(self._names, self.params, self._spans, self._pieces(flat), strict=True):
                shard = shard_of(param)
                if shard is None:
                    shard = Shard(name, tuple(param.shape), 0, param.numel())
                start, stop = shard.start + span.start, shard.start + span.stop
                location = (shard.shape, start, stop, shard.ranges)
                state[f"{key}.{name}"] = LocalShard(piece, *location, written=shard.written)
        return state

    def _full(self) -> Tensor:
        return self.params[0].new_zeros(self._partition.full_numel)

    def _views(self, full: Tensor) -> list[Tensor]:
        return [full.narrow(0, entry.offset, entry.numel).view(entry.shape) for entry in self._partition.entries]

    def _pieces(self, part: Tensor) -> list[Tensor]:
        return [part.narrow(0, span.shard_offset, span.numel) for span in self._spans]

    def _event(self, phase: str) -> Event:
        return Event(phase, f"LocalSGD's bucket {self._number}")


def _check_replicas(group: Group, process_group: GroupLike) -> Group:
    if isinstance(process_group, ParallelDims) and group.size == 1 < process_group.world_size:
        raise ValueError(
            f"LocalSGD: expected ranks along dp_replicate, which train on their own, got {process_group}: write "
            "ParallelDims(dp_replicate=the number of replicas)"
        )
    return group


def _names_of(model: nn.Module, optimizer: Optimizer, group: Group) -> dict[nn.Parameter, str]:
    """The optimizer's parameters that train, by their names in the model, in the order of the model."""
    stepped = {id(param): tuple(param.shape) for group in optimizer.param_groups for param in group["params"]}
    names = {param: name for name, param in model.named_parameters() if id(param) in stepped}
    named = {id(param) for param in names}
    if missing := [shape for param, shape in stepped.items() if param not in named]:
        raise ValueError(
            f"LocalSGD: the optimizer has {len(missing)} parameters that are none of the model's, the first of shape "
            f"{missing[0]}: pass the model whose parameters it was built with"
        )
    names = {param: name for param, name in names.items() if param.requires_grad}
    if not names:
        raise ValueError("LocalSGD: the optimizer has no parameters that train: pass one with parameters of the model")
    for param, name in names.items():
        if not param.is_floating_point():
            raise ValueError(
                f"LocalSGD: '{name}' is {param.dtype}, which has no average: leave it out of the optimizer"
            )
    check_undivided(((name, param) for param, name in names.items()), group, "LocalSGD")
    for param, name in names.items():
        shard = shard_of(param)
        for axis in () if shard is None else shard.axes:
            common = set(axis.group.ranks).intersection(group.ranks)
            if axis.placement is Placement.SHARD and len(common) > 1:
                raise ValueError(
                    f"LocalSGD: '{name}' is sharded between the ranks {list(axis.group.ranks)}, and LocalSGD was given "
                    f"{list(group.ranks)} as ranks that train on their own: shard the model along one axis of a mesh, "
                    'and give LocalSGD the other one, process_group=mesh["replicate"]'
                )
    return names


def _in_buckets(params: Sequence[nn.Parameter], bucket_numel: int) -> Iterator[list[nn.Parameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    for params_of_kind in kinds.values():
        for members in group_in_buckets([param.numel() for param in params_of_kind], bucket_numel):
            yield [params_of_kind[index] for index in members]
