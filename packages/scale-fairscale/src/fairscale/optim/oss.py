"""`OSS`: FairScale's arguments on scale-oss's optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import scale_oss
from fairscale._warnings import warn_argument, warn_once
from fairscale.internal.process_group import unwrap_process_group
from scale_core.consistency.execution_order import message_tag
from scale_core.errors import DivergenceError
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad, unreduced_grad
from scale_oss.buckets.bucket import Bucket, part_of_gradient
from scale_oss.buckets.state_placement import StatePlacement


class _StateByParam(defaultdict[Any, Any]):
    """The state of the optimizer inside, by the pieces that it steps on; the user's parameters find it, too."""

    def __init__(self, state: Mapping[Any, Any], placements: Mapping[int, StatePlacement]) -> None:
        super().__init__(dict, state)
        self._placements = placements

    def __missing__(self, key: Any) -> Any:
        placement = self._placements.get(id(key))
        if placement is None or placement.optimizer_param is None or placement.optimizer_param is key:
            return super().__missing__(key)
        return self[placement.optimizer_param]

    def __reduce__(self) -> Any:
        # A copy has parameters of its own, which no placement knows.
        return defaultdict, (dict,), None, None, iter(self.items())

    def __copy__(self) -> Any:
        return defaultdict(dict, self)

    copy = __copy__


class RankBucket(NamedTuple):
    """What one rank updates of a bucket."""

    buffer: Tensor  # [S], the memory of that part of the parameters
    params: list[nn.Parameter]


class Buckets(list[Bucket]):
    """The buckets in order and, as FairScale's mapping, by device and rank: `buckets[device][rank].buffer`.

    Of several buckets on a device the second has the ranks from `world_size` on, and so forth.
    """

    def keys(self) -> list[torch.device]:
        """The devices."""
        return list(dict.fromkeys(bucket.device for bucket in self))

    def values(self) -> list[dict[int, RankBucket]]:
        """What ranks update, for each device."""
        return [self[device] for device in self.keys()]

    def items(self) -> list[tuple[torch.device, dict[int, RankBucket]]]:
        """The devices with what ranks update."""
        return list(zip(self.keys(), self.values(), strict=True))

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, torch.device):
            return super().__getitem__(key)
        parts = [part for bucket in self if bucket.device == key for part in _by_rank(bucket)]
        if not parts:
            raise KeyError(key)
        return dict(enumerate(parts))


def _by_rank(bucket: Bucket) -> Iterator[RankBucket]:
    """Yields what each rank updates of a bucket."""
    partition = bucket.partition
    for rank, spans in enumerate(partition.spans_by_rank):
        params = [param for param, span in zip(bucket.params, spans, strict=True) if span.start < span.stop]
        yield RankBucket(bucket.full.narrow(0, partition.start(rank), partition.sizes[rank]), params)


class OSS(scale_oss.OSS):
    """Optimizer state sharding, as FairScale's class of this name.

    In new code: `scale_oss.OSS(params, optim, process_group=..., lr=...)`.

    Args:
        params: As in FairScale.
        optim: The class of the optimizer, or what builds one, as a function or a `functools.partial`. It is called once
            with parameters of one element, to see the class and the options of the optimizer that it builds.
        group: The ranks, `process_group` in new code.
        broadcast_buffer_size: Without effect, as there.
        broadcast_fp16: As in FairScale; may be set later.
        force_broadcast_object: Without effect.
        **default: Arguments of `optim`.
    """

    def __init__(
        self,
        params: Any,
        optim: Callable[..., Optimizer] = SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        if not isinstance(optim, type):
            params, optim, default = _as_built_by(optim, params, default)
        if group is not None:
            name = optim.__name__
            warn_argument(
                "OSS", "group", f"is process_group in new code: scale_oss.OSS(params, {name}, process_group=group)"
            )
        if broadcast_buffer_size != -1:
            warn_argument(
                "OSS", "broadcast_buffer_size", "has no effect, leave it out: scale_oss.OSSOptions(bucket_numel=...)"
            )
        if force_broadcast_object:
            warn_argument("OSS", "force_broadcast_object", "has no effect, leave it out: state is sent as tensors")
        kind = cast("type[Optimizer]", optim)
        group = unwrap_process_group(group)
        super().__init__(params, kind, process_group=group, broadcast_fp16=broadcast_fp16, **default)
        self.buckets = self._assigner.replicated = Buckets(self.buckets)
        self._show_state()

    @property
    def group(self) -> Any:
        """torch's process group of the ranks, as in FairScale; None where torch.distributed is not initialized."""
        return self.shard_group.process_group or (dist.group.WORLD if dist.is_initialized() else None)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Updates this rank's part of the parameters, and gives all ranks all parts.

        As in FairScale, gradients of a `ShardedDataParallel` that no pass outside of `no_sync()` has reduced are
        stepped on unchanged: each part by the gradients of the rank that updates it. It warns of that once. Without
        that wrapper, ranks may also begin with different parameters: the first step makes them equal, with a warning.

        Args:
            closure: As for `scale_oss.OSS`.
            **kwargs: As for `scale_oss.OSS`.

        Returns:
            What the closure has returned.
        """
        loss = None
        if callable(closure):
            self.wait()
            with torch.enable_grad():
                loss = closure()
            closure = None
        self._take_local_grads()
        stepped = self._step(closure, kwargs)
        return stepped if loss is None else loss

    def _take_local_grads(self) -> None:
        waiting = self._unreduced()
        if waiting and self.shard_group.size > 1:
            warn_once(
                "OSS.step()",
                "these gradients were accumulated under no_sync() and not reduced, so that each part of the parameters "
                "is updated by the gradients of only one rank; run the last backward() before the step outside of "
                "no_sync(), or call model.reduce()",
            )
        for bucket in {id(bucket): bucket for bucket, _ in waiting}.values():
            bucket.drop_consumed_grads()
        for bucket, index in waiting:
            _step_on_local_grad(bucket, index)
        if self.gets_reduced_gradients:  # Another rank may have some where this one has none.
            for bucket in self.buckets:
                bucket.needs_gather = bucket.needs_gather or any(param.requires_grad for param in bucket.params)

    def _check_replicas(self, number: int) -> None:
        try:
            super()._check_replicas(number)
        except DivergenceError:  # On all ranks.
            if number > 1 or self.gets_reduced_gradients:
                raise
            warn_once(
                "OSS.step()",
                "ranks begin with different parameters, and the first step makes them equal: each rank updates its "
                "part of its own parameters, and all ranks take that; call torch.manual_seed(seed) before the model is "
                "built, or load a checkpoint on all ranks",
            )
            for bucket in self.buckets:  # No step sends frozen parameters, and a later comparison would raise.
                if not any(param.requires_grad for param in bucket.params):
                    bucket.all_gather(message_tag(bucket.gather_event), updates_all=True)
                    self.contract.wait(bucket.gather_event, bucket.wait)

    def _unreduced(self) -> list[tuple[Bucket, int]]:
        """Where gradients are in `param.grad` that a `ShardedDataParallel` has not reduced: buckets and indices."""
        if not self.gets_reduced_gradients:
            return []
        return [
            (bucket, index)
            for bucket in self.buckets
            for index, param in enumerate(bucket.params)
            if unreduced_grad(param) is not None
        ]

    @property
    def params_with_gradients(self) -> list[nn.Parameter]:
        """What has averaged gradients before a step, for a scaler to divide.

        Raises:
            RuntimeError: Some were not averaged, and would be stepped on undivided.
        """
        if self._unreduced():
            raise RuntimeError(
                "a scaler divides gradients of which some were accumulated under no_sync() and not reduced. Call "
                "model.reduce() before, or run the last backward() before the step outside of no_sync()"
            )
        return super().params_with_gradients

    @property
    def _per_device_params(self) -> dict[torch.device, list[list[nn.Parameter]]]:
        """By device and rank the parameters of which the rank updates some part."""
        by_rank = [[param for group in its for param in group["params"]] for its in self.partition_parameters()]
        devices = dict.fromkeys(param.device for its in by_rank for param in its)
        return {device: [[param for param in its if param.device == device] for its in by_rank] for device in devices}

    def load_checked(self, local: dict[str, Any]) -> None:
        """Loads what `check_state_dict` has returned."""
        super().load_checked(local)
        self._show_state()

    def _show_state(self) -> None:
        """Lets `optimizer.optim.state[param]` be this rank's part of the state of a parameter, as in FairScale."""
        self.optim.state = _StateByParam(self.optim.state, self.placements)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, filter_params_fn: Any = None) -> Tensor:
        """Clips by the norm over all ranks; `clip_grad_norm_` in new code."""
        return self.clip_grad_norm_(max_norm, norm_type, filter_params_fn)

    def refresh_trainable(self) -> None:
        """Takes FairScale's call, which is not needed: what trains is looked up in every step."""

    def _clear_cache(self) -> None:
        """Takes what trainers call; nothing is cached."""


def _as_built_by(
    build: Callable[..., Any], params: Iterable[Any], default: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], type[Optimizer], dict[str, Any]]:
    """Returns parameter groups, class and defaults of the optimizer that a function builds.

    Raises:
        TypeError: It builds no optimizer.
        ValueError: It builds one with other groups than it was given.
    """
    listed = list(params)
    groups = [dict(group) for group in listed] if listed and isinstance(listed[0], dict) else [{"params": listed}]
    probes = [{**group, "params": [nn.Parameter(torch.zeros(1, 1))]} for group in groups]
    built = build(probes, **default)
    if not isinstance(built, Optimizer):
        raise TypeError(
            f"OSS: expected optim to build an optimizer, got {built!r}: return torch.optim.SGD(params, ...)"
        )
    if len(built.param_groups) != len(groups):
        raise ValueError(
            f"OSS: optim was given {len(groups)} parameter groups and built an optimizer with "
            f"{len(built.param_groups)}: divide the parameters before, OSS([{{'params': ...}}, ...], optim)"
        )
    pairs = zip(built.param_groups, groups, strict=True)
    return [built_group | {"params": group["params"]} for built_group, group in pairs], type(built), built.defaults


def _step_on_local_grad(bucket: Bucket, index: int) -> None:
    """Gives a piece its part of this rank's own gradient, in addition to what was reduced."""
    param, piece, span = bucket.params[index], bucket.pieces[index], bucket.spans[index]
    grad = unreduced_grad(param)
    assert grad is not None, "found by its gradient"
    set_unreduced_grad(param, None)
    part = part_of_gradient(grad, piece, span)
    piece.grad = part if piece.grad is None else piece.grad + part


__all__ = ["OSS"]
