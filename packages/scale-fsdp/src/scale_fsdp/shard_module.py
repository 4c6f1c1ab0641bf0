"""`fully_shard`: makes a unit of a module, in place.

The module keeps its names and methods, and its class gains the methods of `FSDPModule`. Its `parameters()` are the
local shards under the original names.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from scale_core import compat
from scale_core.arguments import checked_arguments, refuse_inference_mode
from scale_core.comm.group import GroupLike
from scale_core.consistency.contract import Contract
from scale_core.consistency.flight_recorder import next_unique_id
from scale_core.dtensor import DTensorSpec, is_dtensor, local_parameter
from scale_core.errors import renamed_arguments
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DevicePolicy, DtypePolicy, ShardGroups, flat_alignment
from scale_core.flat.layout import FlatLayout
from scale_core.optim.step_checks import register_replaced
from scale_core.parameters import MemoryRange, check_memory_unshared, copy_attributes
from scale_core.shard import check_undivided, on_local_tensors, shard_of
from scale_core.sharded_tensor.tensor import local_tensor, set_shard
from scale_fsdp.api import UnitOptions, resolve_placement, resolve_precision
from scale_fsdp.communication import looks_like_embedding, unquantized_params
from scale_fsdp.fsdp_module import shadowed_name, sharded_class
from scale_fsdp.mesh_info import resolve_mesh_info
from scale_fsdp.options import Init, ShardOptions
from scale_fsdp.reshard.convert import convert_buffers
from scale_fsdp.reshard.meta_init import materialize, should_initialize
from scale_fsdp.runtime.fast_path import keep_fast_path
from scale_fsdp.runtime.flattened_parameter import flat_param_name
from scale_fsdp.runtime.param_registry import (
    ParamModuleInfo,
    ParamOwner,
    managed_modules,
    managed_params,
    register_owner,
    split_owned_and_shared,
)
from scale_fsdp.runtime.step import ShardGuard, post_forward, pre_forward
from scale_fsdp.runtime.unit import ParamSlot, Unit, unit_of, units_in
from scale_fsdp.state_dict.full import register_state_dict_hooks
from scale_fsdp.state_dict.naming import module_names, units_on_other_ranks
from scale_fsdp.transports.float8 import Float8Weight, plain_parameter
from scale_fsdp.transports.policy import WirePolicy, wire_formats

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")


@checked_arguments(own="module reshard_after_forward dp_mesh_dims")
@renamed_arguments(
    process_group="mesh=, which takes a DeviceMesh or a process group",
    mixed_precision="mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
    compute_dtype="mp_policy=MixedPrecisionPolicy(param_dtype=...)",
    fp32_reduce_scatter="mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)",
    move_params_to_cpu="offload_policy=CPUOffloadPolicy()",
    cpu_offload="offload_policy=CPUOffloadPolicy()",
    move_grads_to_cpu="offload_policy=CPUOffloadPolicy(), or FullyShardedDataParallel(module, move_grads_to_cpu=...)",
    state_dict_device="full_state_dict(model, device=...) where the state is taken",
    state_dict_on_rank_0_only="full_state_dict(model, rank_0_only=True) where the state is taken",
    **{field.name: f"options=ShardOptions({field.name}=...)" for field in fields(ShardOptions)},
)
def fully_shard(
    module: M,
    mesh: GroupLike = None,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    dp_mesh_dims: object = None,
    options: ShardOptions | None = None,
) -> M:
    """Shards a module's parameters over the ranks, in place, as one unit; returns the same module.

    Modules inside it that are units already keep their own parameters: shard the children first, then the parent. Each
    unit is gathered before its forward and its backward and released after, so its full parameters must fit
    in memory with the shards: a transformer block is a good one. Build the optimizer afterwards.

        >>> import torch
        >>> from scale_fsdp import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> for layer in model:
        ...     _ = fully_shard(layer)
        >>> model = fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(3, 4)).sum().backward()
        >>> optimizer.step()

    The arguments are as in `torch.distributed.fsdp.fully_shard`; `options` has all that only scale-fsdp knows.

    Args:
        module: The module; must not be a unit yet. A list of modules becomes one unit, which is gathered when the first
            of them runs and released after the last.
        mesh: The ranks to shard over: a ParallelDims, a DeviceMesh of one dimension, or a process group. None is the
            default group, or a world of one where torch.distributed is not initialized. A DeviceMesh of two dimensions
            is hybrid sharding: the ranks along the second share one copy of the model, those along the first hold
            copies. If the mesh is of an accelerator, parameters go there. A `scale_core.ParallelDims` has these ranks
            as `dp_replicate` and `fsdp`. A module whose parameters are experts that `ep` divides is sharded over
            `efsdp`, the ranks that have the same experts.
        reshard_after_forward: Release the parameters between forward and backward: less memory, half as much again
            to send. None is yes, but for the unit that is called first, whose backward comes first. An integer leaves
            the parameters sharded over that many neighboring ranks, for example in one node; the backward then gathers
            among them.
        mp_policy: A `torch.distributed.fsdp.MixedPrecisionPolicy`. Each unit casts the floating-point inputs of each of
            its modules to its `param_dtype`, unless it says `cast_forward_inputs=False`.
        offload_policy: `torch.distributed.fsdp.CPUOffloadPolicy()` keeps the shards, the gradients and so the
            optimizer's state and its step on the host: `torch.optim.Adam` with `fused=True` is quick there.
        ignored_params: Parameters that stay unsharded on each rank; their gradients are not averaged.
        shard_placement_fn: FSDP2's choice of the dimension that a parameter is cut along, `Shard(dim)` or None. It has
            no effect, and warns: the unit's one buffer is cut between rows or elements. No result depends on it.
        dp_mesh_dims: Only None, FSDP2's default; `mesh` has the dimensions of data parallelism and no others.
        options: A `ShardOptions` with what torch has no argument for; None is its defaults.

    Raises:
        TypeError: An argument of the wrong kind, or under a name that FairScale has given it.
        ValueError: The module is a unit already, or a container that is never called. Arguments contradict each other.
            Two parameters, or a parameter and a buffer, share memory and are not one `Parameter`. Nothing gives values
            to a parameter or buffer on meta. `shard_placement_fn` returns different ranks for one parameter, or a
            dimension that the parameter does not have.
        ContractError: The ranks are about to shard different modules.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    if dp_mesh_dims is not None:
        raise TypeError(
            f"fully_shard: expected dp_mesh_dims to be None, got {dp_mesh_dims!r}; write mesh= with the data parallel "
            'dimensions alone, such as mesh=mesh["replicate", "shard"]'
        )
    options = options or ShardOptions()
    argument: Any = module
    is_list = isinstance(argument, list | tuple)
    modules = check_modules(argument if is_list else [argument], options.flatten_parameters)
    ignored = ignored_params or set()
    if shard_placement_fn is not None:
        check_shard_placements(modules, shard_placement_fn, ignored)
    mesh_info = resolve_mesh_info(mesh, _own_params(modules, ignored))
    if options.init is None and stays_on_meta(modules, ignored):
        options = replace(options, init=False)
    unit_options = UnitOptions.of(
        options,
        mesh_info,
        resolve_precision(mp_policy, options.buffer_dtype),
        resolve_placement(offload_policy, options.compute_device, mesh, mesh_info),
        reshard_after_forward=reshard_after_forward,
    )
    shard_modules(modules, unit_options, options.init, sync=options.sync_module_states, ignored=ignored)
    if unit_options.placement.stays_on_host(modules, mesh_info):
        warnings.warn(
            f"fully_shard: {type(modules[0]).__name__} is on the CPU and computes there, but its ranks communicate by "
            f"{mesh_info.whole.backend}: write fully_shard(module.cuda()), or mesh=init_device_mesh('cuda', (size,)), "
            "which moves it as FSDP2 does; with "
            "options=ShardOptions(compute_device='cpu') this warning is gone",
            UserWarning,
            stacklevel=2,
        )
    if shard_placement_fn is not None:
        warnings.warn(
            "shard_placement_fn has no effect here: parameters of a unit stand one after another in one buffer, which "
            "is cut between rows or elements; options=ShardOptions(atom=...) says what must not be cut",
            UserWarning,
            stacklevel=2,
        )
    return module


def _own_params(modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> Iterator[nn.Parameter]:
    """The parameters outside of nested units, except ignored ones."""
    ignored_ids = {id(param) for param in ignored}
    params = (info.param for module in modules for info in managed_params(module))
    return (param for param in params if id(param) not in ignored_ids)


def check_modules(modules: Sequence[nn.Module], flatten_parameters: bool) -> list[nn.Module]:
    """Raises for modules that can't become a unit; returns the modules that no other of them holds."""
    refuse_inference_mode("fully_shard")
    if not modules:
        raise ValueError("fully_shard: expected a module or a list of modules, got an empty list")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard: expected an nn.Module or a list of them, got {type(module).__name__}")
        if unit_of(module) is not None:
            raise ValueError(f"this {type(module).__name__} is sharded already: call fully_shard once per module")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"a {type(module).__name__} is never called, so it can't be gathered before it runs: "
                "shard its members, for member in container: fully_shard(member), or list(container) as one unit"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                "fully_shard: this module is a torch.jit.ScriptModule. TorchScript reads its parameters itself and "
                "takes no hooks, so nothing could gather them. Shard the plain module, and compile it by "
                "module.compile()"
            )
        if isinstance(module, NonDynamicallyQuantizableLinear):
            raise ValueError(
                "fully_shard: this module is the out_proj of an nn.MultiheadAttention. The attention reads its weight "
                "and never calls it, so nothing would gather the weight. Shard the attention itself, for example "
                "fully_shard(layer.self_attn)"
            )
        if (name := shadowed_name(module)) is not None:
            raise ValueError(
                f"a {type(module).__name__} has a '{name}' of its own. fully_shard adds a method of that name to the "
                f"module, which its forward would find instead. Rename the module's '{name}', for example to "
                f"'own_{name}'"
            )
        if flatten_parameters and flat_param_name(0) in module._parameters:
            raise ValueError(f"flatten_parameters=True needs the name {flat_param_name(0)}: rename that parameter")
    inner = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if module not in inner]


def stays_on_meta(modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> bool:
    """Whether shards get no memory yet: it is called under `torch.device("meta")`, and all parameters are there.

    Programs for FSDP2 are written so. They give the shards memory by `to_empty` afterwards.
    """
    if torch.get_default_device().type != "meta":
        return False
    ignored_ids = {id(param) for param in ignored}
    params = (param for module in modules for param in module.parameters())
    return all(param.is_meta for param in params if id(param) not in ignored_ids)


def check_shard_placements(
    modules: Sequence[nn.Module],
    shard_placement_fn: Callable[[nn.Parameter], object],
    ignored: Collection[nn.Parameter],
) -> None:
    """Refuses a `shard_placement_fn` that says more than along which of its dimensions a parameter is cut.

    Its `ShardPlacementResult` gives a parameter ranks of its own, over which its gradient is averaged.
    """
    from torch.distributed.tensor import Shard  # Not needed by any step.

    ignored_ids = {id(param) for param in ignored}
    for info in (param_info for module in modules for param_info in managed_params(module, "")):
        placement = None if id(info.param) in ignored_ids else shard_placement_fn(info.param)
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            raise ValueError(
                f"shard_placement_fn: expected Shard(dim) or None for '{info.name}', got {placement!r}: shard the "
                "module of a parameter that has ranks of its own by itself, fully_shard(module, mesh=...)"
            )
        num_dims = info.param.ndim
        if not -num_dims <= placement.dim < max(num_dims, 1):
            raise ValueError(
                f"shard_placement_fn: expected Shard(dim) with a dimension of '{info.name}' "
                f"{list(info.param.shape)}, got {placement!r}, because a parameter is cut along one of its own "
                "dimensions. Return None for Shard(0)"
            )


@on_local_tensors
def shard_modules(
    modules: Sequence[nn.Module],
    options: UnitOptions,
    init: Init,
    *,
    sync: bool,
    ignored: Collection[nn.Parameter] = (),
) -> None:
    """Puts shards in place of the modules' parameters, when all that can be refused has been."""
    ranks = options.mesh_info
    left = set(ignored)  # tensors are equal by identity alone to sets
    paths = zip(modules, root_paths(modules), strict=True)
    places = (param_info for module, path in paths for param_info in managed_params(module, path))
    owned, shared = split_owned_and_shared([param_info for param_info in places if param_info.param not in left])
    original = [info.param for info in owned]
    owned, float8 = _plain_weights(owned, init)
    owned, specs = _local_pieces(owned, init)
    check_parameters(owned)
    # A policy may know a parameter by its identity, so it is asked about the user's own.
    dtypes = [options.precision.dtypes_of(param, info.name) for param, info in zip(original, owned, strict=True)]
    check_tied_embeddings(shared)
    check_memory(modules, owned, left)
    check_undivided(((info.name, info.param) for info in owned), ranks.whole, "fully_shard")
    if init is False:
        for info in owned:
            if not info.param.is_meta:
                raise ValueError(
                    f"init=False waits for a checkpoint, but '{info.name}' has values already: leave init out, or "
                    "build the model under torch.device('meta')"
                )
        groups = ShardGroups(ranks.shard, ranks.replicas)
        buffers, slots = _make_buffers(owned, dtypes, groups, options, float8, on_meta=True)
    else:
        if ranks.whole.size > 1 and sync:  # Else nothing is sent here, and all is compared when the model first runs.
            kind = ", ".join(type(module).__name__ for module in modules)
            lines = [f"{p.name} {tuple(p.param.shape)} {p.param.dtype} trains={p.param.requires_grad}" for p in owned]
            contract = Contract(ranks.whole, options.limit_seconds)
            subject = f"the module given to fully_shard ({kind})"
            contract.check_equal(subject, [kind, options.communication_line, *lines])
        else:
            options.check_groups()
        parts = [(module, _own_of(owned, module)) for module in modules]
        fill = should_initialize(parts, init, ranks.whole, options.limit_seconds, sync=sync)
        buffers, slots = _make_buffers(owned, dtypes, options.buffer_groups(), options, float8)
        _init_shards(parts, slots, options, init, fill=fill, sync=sync)
    owners = list(dict.fromkeys(owner.unit for _, owner in shared))
    slots += [ParamSlot(p.module, p.attribute, owner.unit.buffers[owner.buffer], owner.number) for p, owner in shared]
    specs += [owner.unit.spec_of(owner.buffer, owner.number) for _, owner in shared]
    unit = Unit(modules, slots, buffers, owners, options, specs)
    unit.original_memory = [MemoryRange.of(info.name, info.param) for info in owned]
    unit.ignored = [param for module in modules for param in module.parameters() if param in left]
    unit.serial = 1 + next_unique_id(f"unit on {ranks.whole.backend}", ranks.whole)
    for owner in owners:
        owner.is_shared = True
    for param, slot in zip(original, unit.slots, strict=False):
        register_replaced(param, slot.buffer, slot.number)
    convert_buffers(unit)
    _install(unit)
    register_owner(unit, original)
    for module in modules:
        _name_units(module)
        keep_fast_path(module)


def _own_of(own: Sequence[ParamModuleInfo], module: nn.Module) -> list[ParamModuleInfo]:
    """The places that are in this module."""
    inside = {id(child) for _, child in managed_modules(module)}
    return [info for info in own if id(info.module) in inside]


def _plain_weights(
    own: Sequence[ParamModuleInfo], init: Init
) -> tuple[list[ParamModuleInfo], dict[nn.Parameter, Float8Weight]]:
    """The same places with plain tensors for weights of torchao; and how these are computed with in fp8."""
    plain: dict[nn.Parameter, nn.Parameter] = {}
    float8: dict[nn.Parameter, Float8Weight] = {}
    for info in own:
        weight = Float8Weight.of(info.param)
        if weight is not None and info.param.is_meta and init is not False:
            raise ValueError(
                f"'{info.name}' is an fp8 weight of torchao on the meta device, and fully_shard initializes plain "
                "tensors: write fully_shard(..., options=ShardOptions(init=False)), then model.to_empty(device=...), "
                "and load a checkpoint; or initialize the model before convert_to_float8_training"
            )
        if weight is not None and info.param not in plain:
            plain[info.param] = plain_parameter(info.param)
            float8[plain[info.param]] = weight
    return [info._replace(param=plain.get(info.param, info.param)) for info in own], float8


def _local_pieces(own: Sequence[ParamModuleInfo], init: Init) -> tuple[list[ParamModuleInfo], list[DTensorSpec | None]]:
    """The same places with the local tensors of DTensors, each known as a piece; and how these are made of them."""
    specs: list[DTensorSpec | None] = []
    pieces: dict[nn.Parameter, nn.Parameter] = {}
    for info in own:
        spec = DTensorSpec.of(info.param, info.name) if is_dtensor(info.param) else None
        specs.append(spec)
        if spec is None or info.param in pieces:
            continue
        if info.param.is_meta and init is not False:
            raise ValueError(
                f"'{info.name}' is a DTensor on the meta device, and fully_shard initializes full tensors: write "
                "fully_shard(..., options=ShardOptions(init=False)), then model.to_empty(device=...), and load a "
                "checkpoint; or initialize the model before parallelize_module"
            )
        pieces[info.param] = local_parameter(info.param)
        set_shard(pieces[info.param], spec.shard(info.name))
    return [info._replace(param=pieces.get(info.param, info.param)) for info in own], specs


def check_tied_embeddings(shared: Sequence[tuple[ParamModuleInfo, ParamOwner]]) -> None:
    """Refuses an embedding that is tied to a matrix of a different unit, if that unit is quantized."""
    for info, owner in shared:
        policy, buffer = owner.unit.options.communication, owner.unit.buffers[owner.buffer]
        is_quantized = wire_formats(buffer) is not None and policy is not None and "embedding" not in policy.include
        if is_quantized and looks_like_embedding(info.module):
            raise ValueError(
                f"'{info.name}' is an embedding that is tied to '{buffer.names[owner.number]}' of a unit that is "
                "sharded already, and quantizes it: shard the module of the embedding before, or both as one unit, "
                "fully_shard([embed, head], ...); or say that it is meant, "
                "CommunicationPolicy(..., include=('embedding',))"
            )


def check_memory(
    modules: Sequence[nn.Module], own: Sequence[ParamModuleInfo], ignored: Collection[nn.Parameter]
) -> None:
    """Refuses parameters that share memory with others, with buffers, or with shards of a unit inside."""
    names = {
        id(child): path
        for module, path in zip(modules, root_paths(modules), strict=True)
        for path, child in module.named_modules(prefix=path)
    }
    moved = [
        replace(memory, name=f"{names[id(slot.module)]}.{slot.attribute}".lstrip("."))
        for module in modules
        for unit in units_in(module)
        for slot, memories in zip(unit.slots, unit.original_memory, strict=False)
        for memory in memories
        if id(slot.module) in names
    ]
    tensors = [
        item
        for module, path in zip(modules, root_paths(modules), strict=True)
        for item in (*module.named_parameters(path), *module.named_buffers(path))
    ]
    others = [(name, tensor) for name, tensor in tensors if not isinstance(tensor, nn.Parameter) or tensor in ignored]
    check_memory_unshared("fully_shard", ((info.name, info.param) for info in own), others, moved)


def root_paths(modules: Sequence[nn.Module]) -> list[str]:
    """The prefix of parameter names: none, or the number of the module if there are several."""
    return [""] if len(modules) == 1 else [str(number) for number in range(len(modules))]


@on_local_tensors
def check_parameters(own: Sequence[ParamModuleInfo]) -> None:
    """Refuses parameters that can't stand in a flat buffer, and hooks that would be lost with them."""
    for info in own:
        param = info.param
        if isinstance(info.module, torch.jit.ScriptModule):
            raise TypeError(
                f"'{info.name}' is a parameter of a torch.jit.ScriptModule. TorchScript reads its parameters itself "
                "and takes no hooks, so nothing could gather them. Shard the plain module, and compile it by "
                "module.compile(); or keep its parameters unsharded, fully_shard(..., ignored_params={...})"
            )
        if is_lazy(param):
            raise ValueError(
                f"'{info.name}' has no shape yet, as in a lazy module: run the model once, model(batch), before "
                "fully_shard(...)"
            )
        with torch._C._EnableTorchFunction():  # Without it the data of a user's class is of torch's.
            kind = type(local_tensor(param).data)
        if kind not in compat.plain_tensor_types():
            raise TypeError(
                f"'{info.name}' is a {kind.__name__}, which can't be cut into shards: keep it replicated, "
                "fully_shard(..., ignored_params={...}), or convert the parameter to a plain tensor first"
                + (
                    ". Its fsdp_pre_all_gather is not called here: gather plain tensors in low precision by "
                    "options=ShardOptions(communication=CommunicationPolicy(...))"
                    if hasattr(kind, "fsdp_pre_all_gather")
                    else ""
                )
            )
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"a hook is registered on '{info.name}', whose place a shard takes, so it would never be called: "
                "remove it before fully_shard(...); see gradients before they are reduced by "
                "scale_core.hooks.gradients.register_local_grad_hook(...), and after it by "
                "param.register_post_accumulate_grad_hook(...) on what model.parameters() then yields, or in param.grad"
            )


@on_local_tensors
def _init_shards(
    parts: Sequence[tuple[nn.Module, Sequence[ParamModuleInfo]]],
    slots: Sequence[ParamSlot],
    options: UnitOptions,
    init: Init,
    *,
    fill: bool,
    sync: bool,
) -> None:
    """Copies the values into the shards: those that there are, of an initialization, or of rank 0."""
    owned = [info for _, infos in parts for info in infos]
    values: dict[nn.Parameter, Tensor] = {info.param: info.param for info in owned}
    for module, infos in parts:
        values |= materialize(module, infos, options.device_for(torch.device("meta")), init, fill=fill)
    if sync:
        managed = [child for module, _ in parts for _, child in managed_modules(module)]
        buffers = [b for child in managed for b in child._buffers.values() if b is not None]
        local = [tensor for buffer in buffers for tensor in compat.inner_tensors(buffer)]
        options.mesh_info.broadcast_from_rank_0((*values.values(), *local))
    for info, slot in zip(owned, slots, strict=True):
        if info.param in values:  # A tied parameter comes again. Memory made for it alone is freed here.
            slot.buffer.load(slot.number, values.pop(info.param))


@on_local_tensors
def _make_buffers(
    own: Sequence[ParamModuleInfo],
    dtypes_of_params: Sequence[DtypePolicy],
    groups: ShardGroups,
    options: UnitOptions,
    float8: Mapping[nn.Parameter, Float8Weight],
    *,
    on_meta: bool = False,
) -> tuple[list[FlatBuffer], list[ParamSlot]]:
    """Makes empty buffers: one per device, kind, dtype, and dtypes of computation and reduction.

    Kinds are trained or frozen, so that the frozen is never reduced, quantized on the wire or not, gathered in fp8 for
    torchao or not.
    """
    members: dict[tuple[torch.dtype, torch.device, bool, bool, bool, DtypePolicy], dict[nn.Parameter, str]] = {}
    unquantized = unquantized_params(((info.module, info.param) for info in own), options.communication)
    for info, dtypes in zip(own, dtypes_of_params, strict=True):
        param = info.param
        device = param.device if on_meta else options.device_for(param.device)
        kind = param.dtype, device, param.requires_grad, param in unquantized, param in float8, dtypes
        members.setdefault(kind, {}).setdefault(param, info.name)
    buffers, where = [], {}
    for (dtype, device, _, is_unquantized, is_float8, dtypes), named in members.items():
        # Only their shapes: the values are copied when the views of the full buffer are made, and it is freed again.
        params = [_on_meta(param) for param in named]
        names = list(named.values())
        alignment = flat_alignment(dtype, gathered_bytes=1 if is_float8 else None)
        shapes = [tuple(param.shape) for param in params]
        layout = FlatLayout.plan(names, shapes, groups.shard.size, options.atom, alignment=alignment)
        devices = DevicePolicy() if on_meta else options.placement.devices_for(device)
        formats = None if is_unquantized or options.communication is None else options.communication.wire
        weights = [float8[param] for param in named] if is_float8 else []
        if formats is not None and weights:
            formats = replace(formats, gather=None)  # As torchao casts them, they have a byte each already.
        policy = WirePolicy(formats, tuple(weights)) if weights or formats is not None else None
        buffer = FlatBuffer(names, params, layout, groups, dtypes, options.flatten_parameters, devices, policy)
        buffers.append(buffer)
        where.update({param: (buffer, index) for index, param in enumerate(named)})
    slots = [ParamSlot(info.module, info.attribute, *where[info.param]) for info in own]
    return buffers, slots


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """A parameter of its shape on meta, with the attributes that the user has set."""
    like = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    copy_attributes(param, like)
    if (shard := shard_of(param)) is not None:
        set_shard(like, shard)
    return like


def _install(unit: Unit) -> None:
    """Sets the modules' classes, and the unit's hooks."""
    if unit.options.flatten_parameters:
        for number, buffer in enumerate(unit.buffers):
            unit.module.register_parameter(flat_param_name(number), buffer.sharded_params[0])
    for module in unit.modules:
        object.__setattr__(module, "__class__", sharded_class(cast(Hashable, type(module))))
        module.register_forward_pre_hook(functools.partial(pre_forward, unit), prepend=True, with_kwargs=True)
        module.register_forward_hook(functools.partial(post_forward, unit), with_kwargs=True, always_call=True)
    for inner in {id(slot.module): slot.module for slot in unit.slots if slot.module not in unit.modules}.values():
        inner.register_forward_pre_hook(ShardGuard(unit), prepend=True)
    register_state_dict_hooks(unit)


def _name_units(outermost: nn.Module) -> None:
    """Sets the qualified names of all units inside and of their parameters, from here."""
    paths = module_names(outermost)
    position_of = {id(module): number for number, module in enumerate(outermost.modules())}
    units = [unit for unit in units_in(outermost) if all(id(module) in paths for module in unit.modules)]
    slots = sorted((s for unit in units for s in unit.slots), key=lambda slot: position_of[id(slot.module)])
    names: dict[tuple[int, int], str] = {}
    for slot in slots:  # A tied parameter has the plain model's first name, whichever unit owns it.
        name = f"{paths[id(slot.module)]}.{slot.attribute}".lstrip(".")
        names.setdefault((id(slot.buffer), slot.number), name)
    apart, root_unit = units_on_other_ranks(outermost), unit_of(outermost)
    model = None if root_unit is None else root_unit.options.mesh_info.whole
    for unit in units:
        unit.name = paths[id(unit.module)]
        unit.root = None  # The first forward of the new outermost module makes a new root.
        ranks = "-".join(map(str, unit.options.mesh_info.whole.ranks))
        unit.rank_suffix = f"@{ranks}" if unit in apart else ""  # Other ranks have other parameters of its names.
        for number, buffer in enumerate(unit.buffers):
            flat_name = f"{unit.name}.{flat_param_name(number)}".lstrip(".")
            unit_names = [f"{names[id(buffer), index]}{unit.rank_suffix}" for index in range(len(buffer.names))]
            buffer.rename(unit_names, unit.name, flat_name, model if unit in apart else None)
