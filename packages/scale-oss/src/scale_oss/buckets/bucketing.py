"""Bucket assignment: which kind of bucket updates each parameter.

parameter                      element-wise optimizer            optimizer that needs full parameters
replicated                     `Bucket`, cut evenly              `Bucket`, each given to one rank
shard, divided                 `InPlaceBucket`                   `FullParamBucket`
shard, all on one rank         `InPlaceBucket`                   `InPlaceBucket`
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.dtensor import is_dtensor
from scale_core.flat.layout import alignment_of
from scale_core.optim.joint_update import has_joint_update
from scale_core.optim.traits import KINDS, constructor_arguments, is_known_elementwise
from scale_core.parameters import check_memory_unshared
from scale_core.shard import check_undivided, is_divided, on_local_tensors, unit_shard_of
from scale_oss.buckets.bucket import Bucket
from scale_oss.buckets.full_param_bucket import FullParamBucket
from scale_oss.buckets.in_place_bucket import InPlaceBucket
from scale_oss.buckets.partition import assign_whole, choose_owners, cut_evenly, group_from_the_end, group_in_rounds
from scale_oss.buckets.state_placement import ShardedParam, StatePlacement, check_not_flat, gather_shards


class BucketAssigner:
    """Assigns parameters to buckets."""

    def __init__(
        self,
        group: Group,
        contract: Contract,
        optim_name: str,
        number: int,
        *,
        elementwise: bool,
        together: bool,
        bucket_numel: int,
    ) -> None:
        if bucket_numel < 1:
            raise ValueError(f"OSS: expected bucket_numel of at least 1 element, got {bucket_numel}")
        self._group, self._contract, self._optim_name, self._number = group, contract, optim_name, number
        self._elementwise, self._together, self._bucket_numel = elementwise, together, bucket_numel
        # Elements that each rank owns; frozen parameters have no state, so they are counted apart.
        self._loads: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        self.replicated: list[Bucket] = []  # of replicated parameters, in the order in which they were given
        self.in_place: list[InPlaceBucket] = []  # of shards that are updated where they are
        self.full_param: list[FullParamBucket] = []  # of shards that are gathered into full parameters for the step
        self.placements: dict[int, StatePlacement] = {}  # by the parameter's `id`, in the order of the optimizer

    @property
    def shard_buckets(self) -> list[InPlaceBucket | FullParamBucket]:
        return [*self.in_place, *self.full_param]

    @on_local_tensors
    def add(self, groups: Sequence[Mapping[str, Any]], first: int = 0) -> list[dict[str, Any]]:
        """Assigns the parameters of groups, from number `first` on; returns groups for this rank's optimizer.

        Raises ValueError for parameters that share memory, a shard that can't be gathered, or ranks that are not all in
        the group; changes nothing.
        """
        placements: dict[int, StatePlacement] = {}
        named = [
            (param_name(group, number, index), param)
            for number, group in enumerate(groups, first)
            for index, param in enumerate(group["params"])
        ]
        for name, param in named:
            self._check(param, name)
        check_memory_unshared(
            "OSS",
            (item for item in named if unit_shard_of(item[1]) is None),
            moved=[memory for bucket in self.replicated for memory in bucket.original_memory],
        )
        with self._contract.waiting("the shards given to OSS"):
            shards = [param for group in groups for param in group["params"] if unit_shard_of(param) is not None]
            gathered_shards = gather_shards(shards, self._group, self._contract.limit_seconds)
        keep_strides = params_with_ddp_strides(param for group in groups for param in group["params"])
        for number, group in enumerate(groups, first):
            placements.update(self._add_replicated(group, number, keep_strides))
        placements.update(self._add_shards(gathered_shards))
        for group in groups:
            self.placements.update((id(param), placements[id(param)]) for param in group["params"])
        return [
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": [
                    stepped for p in group["params"] if (stepped := placements[id(p)].optimizer_param) is not None
                ],
            }
            for group in groups
        ]

    def rollback(self, params: Sequence[nn.Parameter]) -> None:
        refused = {id(param) for param in params}
        self.replicated[:] = [bucket for bucket in self.replicated if id(bucket.params[0]) not in refused]
        self.in_place[:] = [bucket for bucket in self.in_place if id(bucket.params[0]) not in refused]
        self.full_param[:] = [bucket for bucket in self.full_param if id(bucket.params[0]) not in refused]
        for key in refused:
            self.placements.pop(key, None)

    def params_by_rank(self) -> list[set[int]]:
        """Returns, by rank, the `id`s of the parameters that the rank updates in part."""
        params_by_rank: list[set[int]] = []
        for rank in self._group.ranks:
            updated = set()
            for key, placement in self.placements.items():
                ranks = placement.group.ranks
                member = ranks.index(rank) if placement.group.size > 1 and rank in ranks else None
                if placement.group.size == 1 or (member is not None and placement.ranges[member].numel):
                    updated.add(key)
            params_by_rank.append(updated)
        return params_by_rank

    @on_local_tensors
    def _check(self, param: nn.Parameter, name: str) -> None:
        if not self._elementwise:
            check_not_flat(param, name, self._optim_name)
        if unit_shard_of(param) is None and param.is_meta:
            raise ValueError(
                f"OSS: '{name}' is on the meta device, where there is nothing to update. Call "
                "model.to_empty(device=...) and initialize it before"
            )
        if self._together and (unit_shard_of(param) is not None or is_divided(param)):
            raise ValueError(
                f"OSS: {self._optim_name} needs all tensors on one rank, but '{name}' is a shard. If its step can be "
                "written with sums and norms of single tensors, use it without OSS, because those count all ranks. "
                "Otherwise take a different optimizer, or ShardedDataParallel for the model"
            )

    def _add_replicated(
        self, group: Mapping[str, Any], number: int, keep_strides: Collection[Tensor]
    ) -> dict[int, StatePlacement]:
        """Puts neighbors of one dtype and device into buckets; returns the placements by `id`."""
        placements: dict[int, StatePlacement] = {}
        indices_by_kind: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
        for index, param in enumerate(group["params"]):
            if unit_shard_of(param) is None:
                indices_by_kind.setdefault((param.dtype, param.device, param.requires_grad), []).append(index)
        for indices in indices_by_kind.values():
            for run in group_from_the_end([group["params"][index].numel() for index in indices], self._bucket_numel):
                members = [indices[index] for index in run]
                names = [param_name(group, number, index) for index in members]
                bucket = self._make_bucket([group["params"][index] for index in members], names, keep_strides)
                self.replicated.append(bucket)
                placements.update((id(placement.param), placement) for placement in bucket.placements)
        return placements

    def _make_bucket(
        self, params: Sequence[nn.Parameter], names: Sequence[str], keep_strides: Collection[Tensor]
    ) -> Bucket:
        shapes, size = [tuple(param.shape) for param in params], self._group.size
        alignment = alignment_of(params[0].itemsize)
        if self._elementwise:
            partition = cut_evenly(names, shapes, size, alignment=alignment)
        elif self._together:
            partition = assign_whole(names, shapes, [0] * len(params), size, alignment=alignment)
        else:
            owners = self._choose_owners([param.numel() for param in params], self._group, params[0].requires_grad)
            partition = assign_whole(names, shapes, owners, size, alignment=alignment)
        title = f"bucket {len(self.replicated)} of optimizer {self._number}"
        unflattened = [index for index, param in enumerate(params) if param in keep_strides]
        return Bucket(params, partition, self._group, title, unflattened)

    def _add_shards(self, shards: Sequence[ShardedParam]) -> dict[int, StatePlacement]:
        in_place: dict[Group, list[ShardedParam]] = {}
        divided: dict[tuple[Group, torch.dtype, torch.device, bool], list[ShardedParam]] = {}
        for shard in shards:
            if self._elementwise or shard.holder is not None:
                in_place.setdefault(shard.group, []).append(shard)
                if shard.holder is not None:
                    self._loads_of(shard.group, shard.param.requires_grad)[shard.holder] += max(1, shard.numel)
            else:
                kind = (shard.group, shard.param.dtype, shard.param.device, shard.param.requires_grad)
                divided.setdefault(kind, []).append(shard)
        buckets: list[InPlaceBucket | FullParamBucket] = []
        for members in in_place.values():
            self.in_place.append(InPlaceBucket(members, self._elementwise))
            buckets.append(self.in_place[-1])
        for (group, _, _, trains), members in divided.items():
            numels = [shard.numel for shard in members]
            owners = self._choose_owners(numels, group, trains)
            for run in group_in_rounds(numels, owners, self._bucket_numel):
                title = f"bucket {len(self.full_param)} of full tensors of optimizer {self._number}"
                its_owners = [owners[index] for index in run]
                self.full_param.append(
                    FullParamBucket([members[index] for index in run], its_owners, title, self._contract)
                )
                buckets.append(self.full_param[-1])
        return {id(placement.param): placement for bucket in buckets for placement in bucket.placements}

    def _choose_owners(self, numels: Sequence[int], group: Group, trains: bool) -> list[int]:
        loads = self._loads_of(group, trains)
        owners = choose_owners(numels, group.size, loads)
        for numel, owner in zip(numels, owners, strict=True):
            loads[owner] += max(1, numel)
        return owners

    def _loads_of(self, group: Group, trains: bool) -> list[int]:
        return self._loads.setdefault((group.ranks, trains), [0] * group.size)


def params_with_ddp_strides(params: Iterable[Tensor]) -> set[Tensor]:
    """Returns the parameters whose strides must stay, because DistributedDataParallel has recorded them.

    It reads gradients of other strides in a wrong order.
    """
    strided = {p for p in params if unit_shard_of(p) is None and not p.is_contiguous() and _is_dense(p)}
    if not strided:
        return set()
    # A parameter does not know its wrapper, which may be older than the import of this package.
    wrappers = [wrapper for wrapper in gc.get_objects() if issubclass(type(wrapper), DistributedDataParallel)]
    return strided.intersection(param for wrapper in wrappers for param in wrapper.parameters())


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in any order of the dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def check_no_layer_shards(groups: Sequence[Mapping[str, Any]], ranks: Group, first: int = 0) -> None:
    """Checks that no parameter is sharded by its layer between ranks of this group, whose parts would be mixed."""
    for number, group in enumerate(groups, first):
        named = [(param_name(group, number, index), param) for index, param in enumerate(group["params"])]
        for name, param in named:
            if is_dtensor(param):
                raise TypeError(
                    f"OSS: '{name}' is a DTensor, as parallelize_module makes of a parameter, and OSS sends plain ones "
                    'in one buffer: call fully_shard(model, mesh=mesh["dp"]), which shards these too, and step with a '
                    "plain optimizer; or divide the layers by scale_tp.parallelize"
                )
        check_undivided(named, ranks, "OSS")


@on_local_tensors
def check_separate_updates(optim_class: type[Optimizer], defaults: Mapping[str, Any], params: Iterable[Tensor]) -> None:
    """Raises ValueError if the update of one tensor depends on others, which another rank may own."""
    if optim_class in KINDS or is_known_elementwise(optim_class):
        return
    if not has_joint_update(optim_class, constructor_arguments(optim_class, defaults)):
        return
    name = optim_class.__name__
    if any(unit_shard_of(param) is not None for param in params):
        remedy = (
            f"Use {name} on the shards, without OSS, and compute its number from norms and sums of single tensors, "
            "which count all ranks there"
        )
    else:
        remedy = f"So that one rank updates all, pass OSS(..., {name}, options=OSSOptions(together=True))"
    raise ValueError(
        f"OSS: {name} updates each tensor by numbers from all tensors, for example a norm over all of them, and each "
        f"rank would see only the tensors that it owns. {remedy}. If it only clips by the norm of all gradients, "
        "switch that off, and call optimizer.clip_grad_norm_() before step()"
    )


def describe_groups(groups: Sequence[Mapping[str, Any]], first: int = 0) -> Iterator[str]:
    """Yields a line per parameter, which must be equal on all ranks."""
    for number, group in enumerate(groups, first):
        for index, param in enumerate(group["params"]):
            if is_lazy(param):
                raise ValueError(
                    f"OSS: '{param_name(group, number, index)}' has no shape yet. Run the model once, model(batch), "
                    "and build OSS(...) then"
                )
            if param.layout is not torch.strided:
                raise ValueError(
                    f"OSS: expected dense parameters, got '{param_name(group, number, index)}' in {param.layout}: give "
                    "it param.to_dense(), or leave it to an optimizer of its own. Gradients may be sparse"
                )
            shard = unit_shard_of(param)
            shape = f"{tuple(param.shape)}" if shard is None else f"shard of {shard.shape}"
            yield f"{param_name(group, number, index)} {shape} {param.dtype} trains={param.requires_grad}"


def param_name(group: Mapping[str, Any], number: int, index: int) -> str:
    """The name of a parameter in errors."""
    names = group.get("param_names")
    if names:
        return str(names[index])
    shard = unit_shard_of(group["params"][index])
    return shard.name if shard is not None else f"parameter {index} of group {number}"
