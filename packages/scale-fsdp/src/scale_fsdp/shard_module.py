"""`fully_shard`: makes a unit of a module, in place.

The module keeps its class (a dynamic subclass adds the methods of `ShardedModule`), its names and its methods; what
`parameters()` yields are the local shards under the original names.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scale_core import compat
from scale_core.comm.group import Group, GroupLike
from scale_core.consistency.contract import Contract
from scale_core.flat.buffer import Devices, Dtypes, FlatBuffer, Groups
from scale_core.flat.layout import FlatLayout
from scale_core.flat.shard_storage import give_attributes
from scale_core.optim.step_checks import mark_replaced
from scale_core.shard import check_undivided, mark, shard_of
from scale_fsdp.api import AtomChoice, MixedPrecision, UnitOptions
from scale_fsdp.fsdp_module import sharded_class
from scale_fsdp.guards import guard_modules
from scale_fsdp.param_registry import ParamPlace, modules_of_unit, own_and_borrowed, param_places, remember
from scale_fsdp.reshard.convert import convert_buffers
from scale_fsdp.reshard.meta_init import Init, check_init, materialise, who_initialises
from scale_fsdp.state_dict.full import hook_state_dict
from scale_fsdp.state_dict.naming import units_apart
from scale_fsdp.step import post_forward, pre_forward
from scale_fsdp.unit import Slot, Unit, flat_name_of, paths_in, unit_of, units_in

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    process_group: GroupLike = None,
    *,
    reshard_after_forward: bool | int = True,
    mixed_precision: bool | MixedPrecision = False,
    flatten_parameters: bool = False,
    atom: AtomChoice = "auto",
    move_params_to_cpu: bool = False,
    move_grads_to_cpu: bool | None = None,
    compute_device: torch.device | str | None = None,
    init: Init = None,
    sync_module_states: bool = True,
    limit_seconds: float | None = None,
    state_dict_device: torch.device | str | None = None,
    state_dict_on_rank_0_only: bool = False,
    compute_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    fp32_reduce_scatter: bool | None = None,
    error_if_nonfinite: bool = False,
) -> M:
    """Shards a module's parameters over the ranks, in place, as one unit; returns the same module.

    Modules inside it that are units already keep their own parameters: shard the children first, then the whole. Each
    unit is gathered as a whole before its forward and its backward and released after, so a unit is what must fit
    beside the shards: a transformer block is a good one. Build the optimizer afterwards.

        >>> import torch
        >>> from scale_fsdp import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> for layer in model:
        ...     _ = fully_shard(layer)
        >>> model = fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(3, 4)).sum().backward()
        >>> optimizer.step()

    Args:
        module: The module; must not be a unit yet.
        process_group: The ranks to shard over: a process group or a one-dimensional DeviceMesh. None is the default
            group, or a world of one where torch.distributed is not initialised. A DeviceMesh of two dimensions is
            hybrid sharding: the ranks along the second share one copy of the model, those along the first hold copies.
        reshard_after_forward: Release the parameters between forward and backward: less memory, half as much again
            to send. The unit by which the model is entered stays gathered, since its backward comes first. An integer
            leaves them cut among that many neighbouring ranks, as those of one node, between which the backward then
            gathers.
        mixed_precision: A policy; True is fp16 parameters and reduction.
        flatten_parameters: Show the optimizer one flat tensor per dtype and kind (trained or frozen) in place of
            one local shard per parameter.
        atom: What must not be cut between two ranks: "auto", "element", "row", "parameter", `Block(k)`, or a
            function from a parameter's name and shape to one of them.
        move_params_to_cpu: Keep the shards, and so the optimizer's state and its step, on the host: `torch.optim.Adam`
            with `fused=True` is quick there.
        move_grads_to_cpu: Bring each reduced gradient to the host at once, beside the backward pass; False lets all
            wait on the device until the pass is over. None is as for the parameters. Either way `param.grad` stands
            where the parameter is when `backward()` returns.
        compute_device: Where to compute. None is where the parameters are or, for shards on the host, this rank's
            accelerator.
        init: What gives values to parameters and buffers on the meta device. They get memory where the unit computes,
            values, and are freed again once they are sharded. None is each module's own `reset_parameters`; a function
            is called with each module that directly has such parameters or buffers. False leaves the shards on meta
            and sends nothing: then `model.to_empty(device=...)` gives them memory, and a checkpoint their values.
        sync_module_states: Begin with rank 0's parameters and buffers on all ranks. Where it is off, all ranks must
            have built equal ones.
        limit_seconds: The longest that a rank waits for another one before all of them raise. None is the process
            group's own time limit, at most ten minutes. The outermost unit's counts.
        state_dict_device: Where the tensors of this module's `state_dict()` are to be; None is where the shards are.
        state_dict_on_rank_0_only: Its `state_dict()` gives the tensors to rank 0 alone, and the others an empty dict.
        compute_dtype: FairScale's spelling of `MixedPrecision(param_dtype=...)`.
        buffer_dtype: FairScale's spelling of `MixedPrecision(buffer_dtype=...)`.
        fp32_reduce_scatter: FairScale's spelling of `MixedPrecision(reduce_dtype=torch.float32)`.
        error_if_nonfinite: Give a training step up, on all ranks, in which an output of a unit or a local gradient is
            infinite or NaN on one of them; the error there, a FloatingPointError, names rank, unit and parameter. One
            more read of all of these, and two waits for the device per step. Not together with a gradient scaler,
            which needs infinite gradients to find its scale. The outermost unit's counts.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: The module is a unit already, or a container that is never called; arguments that contradict
            each other; nothing gives values to a parameter or buffer on meta.
        ContractError: The ranks are about to shard different modules.
    """
    _check_module(module, flatten_parameters)
    options = UnitOptions.from_arguments(
        process_group,
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        flatten_parameters=flatten_parameters,
        atom=atom,
        move_params_to_cpu=move_params_to_cpu,
        move_grads_to_cpu=move_grads_to_cpu,
        compute_device=compute_device,
        limit_seconds=limit_seconds,
        state_dict_device=state_dict_device,
        state_dict_on_rank_0_only=state_dict_on_rank_0_only,
        compute_dtype=compute_dtype,
        buffer_dtype=buffer_dtype,
        fp32_reduce_scatter=fp32_reduce_scatter,
        error_if_nonfinite=error_if_nonfinite,
    )
    check_init(init)
    return _shard(module, options, init, sync=sync_module_states)


def _check_module(module: nn.Module, flatten_parameters: bool) -> None:
    """Whether this module can become a unit."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: expected an nn.Module, got {type(module).__name__}")
    if unit_of(module) is not None:
        raise ValueError(f"this {type(module).__name__} is sharded already: call fully_shard once per module")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"an {type(module).__name__} is never called, so it can't be gathered before it runs: "
            "shard its members, for member in container: fully_shard(member)"
        )
    if flatten_parameters and flat_name_of(0) in module._parameters:
        raise ValueError(
            f"this {type(module).__name__} has a parameter named {flat_name_of(0)}, a name that "
            "flatten_parameters=True needs for its own: rename it, or leave flatten_parameters out"
        )


def _shard(module: M, options: UnitOptions, init: Init, *, sync: bool) -> M:
    """Takes the parameters out of the module and puts their shards into it; all that can be refused has been."""
    ranks = options.ranks
    own, borrowed = own_and_borrowed(list(param_places(module)))
    check_parameters(own)
    check_undivided(((place.name, place.param) for place in own), ranks.whole, "fully_shard")
    if init is False:
        _check_meta(own)
        buffers, slots = _make_buffers(own, Groups(ranks.shard, ranks.replicas), options, on_meta=True)
    else:
        if ranks.whole.size > 1:
            _agree(module, ranks.whole, own, options.limit_seconds)
        fill = who_initialises([(module, own)], init, ranks.whole, options.limit_seconds, sync=sync)
        buffers, slots = _make_buffers(own, ranks.with_part(options.reshard_after_forward), options)
        _load(module, own, slots, options, init, fill=fill, sync=sync)
    lenders = list(dict.fromkeys(home.unit for _, home in borrowed))
    slots += [Slot(p.module, p.attribute, home.unit.buffers[home.buffer], home.number) for p, home in borrowed]
    unit = Unit(module, slots, buffers, lenders, options)
    unit.number = _next_number(ranks.whole)
    for lender in lenders:
        lender.is_shared = True
    for place, slot in zip(own, unit.slots, strict=False):
        mark_replaced(place.param, slot.buffer, slot.number)
    convert_buffers(unit)
    _install(unit)
    remember(unit, own)
    _name_units(module)
    return module


def check_parameters(own: Sequence[ParamPlace]) -> None:
    """Only what is one piece of memory can stand in a flat buffer, and what is bound to a parameter must go with it.

    Raises:
        TypeError: A parameter is made of other tensors.
        ValueError: One has no shape yet, or a hook, which would never be called again.
    """
    for place in own:
        param = place.param
        if is_lazy(param):
            raise ValueError(
                f"'{place.name}' has no shape yet, as that of a lazy module: run the model once, model(batch), before "
                "fully_shard(...)"
            )
        kind = type(param.data)
        if kind not in compat.plain_tensor_types():
            hint = (
                "shard the modules beside the one that holds it, and none around that, or leave out "
                "parallelize_module(...)"
                if kind.__name__ == "DTensor"
                else "leave the module that holds it out, or convert the parameter to a plain tensor first"
            )
            raise TypeError(f"'{place.name}' is a {kind.__name__}, which can't be cut into shards here: {hint}")
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"a hook is registered on '{place.name}', whose place a shard takes, so it would never be called: "
                "remove it before fully_shard(...), or build what has registered it afterwards; see gradients before "
                "they are reduced by scale_core.on_local_grads(...), and change those after it, in param.grad when "
                "backward() has returned"
            )


def _check_meta(own: Sequence[ParamPlace]) -> None:
    for place in own:
        if not place.param.is_meta:
            raise ValueError(
                f"init=False waits for a checkpoint, but '{place.name}' has values already: leave init out, or build "
                "the model under torch.device('meta')"
            )


def _agree(module: nn.Module, group: Group, own: Sequence[ParamPlace], limit_seconds: float | None) -> None:
    lines = [type(module).__name__]
    lines += [f"{p.name} {tuple(p.param.shape)} {p.param.dtype} trains={p.param.requires_grad}" for p in own]
    Contract(group, limit_seconds).agree(f"the module given to fully_shard ({type(module).__name__})", lines)


_num_units: Counter[tuple[str, tuple[int, ...]]] = Counter()  # that were made over these ranks by this backend


def _next_number(group: Group) -> int:
    """Counts the units of a group. All ranks make them together, so nothing has to be sent for it."""
    _num_units[group.backend, group.ranks] += 1
    return _num_units[group.backend, group.ranks]


def _load(
    module: nn.Module,
    own: Sequence[ParamPlace],
    slots: Sequence[Slot],
    options: UnitOptions,
    init: Init,
    *,
    fill: bool,
    sync: bool,
) -> None:
    """Brings the values into the shards: those that there are, those of an initialisation, or those of rank 0."""
    values: dict[nn.Parameter, Tensor] = {place.param: place.param for place in own}
    values |= materialise(module, own, options.device_for(torch.device("meta")), init, fill=fill)
    if sync:
        buffers = [b for _, child in modules_of_unit(module) for b in child._buffers.values() if b is not None]
        options.ranks.share((*values.values(), *buffers))
    for place, slot in zip(own, slots, strict=True):
        if place.param in values:  # One that is tied comes again. What was made for this alone is freed here.
            slot.buffer.load(slot.number, values.pop(place.param))


def _make_buffers(
    own: Sequence[ParamPlace], groups: Groups, options: UnitOptions, *, on_meta: bool = False
) -> tuple[list[FlatBuffer], list[Slot]]:
    """One buffer per dtype, device and kind (trained or frozen), so that what is frozen is never reduced; all empty."""
    members: dict[tuple[torch.dtype, torch.device, bool], dict[nn.Parameter, str]] = {}
    for place in own:
        param = place.param
        device = param.device if on_meta else options.device_for(param.device)
        members.setdefault((param.dtype, device, param.requires_grad), {}).setdefault(param, place.name)
    buffers, where = [], {}
    precision = options.precision
    for (dtype, device, _), named in members.items():
        # Only their shapes: the values come when the views of the full buffer are made, and it is free again.
        params = [_on_meta(param) for param in named]
        names = list(named.values())
        floating = dtype.is_floating_point
        dtypes = Dtypes(precision.param_dtype, precision.reduce_dtype) if floating else Dtypes()
        layout = FlatLayout.plan(names, [tuple(param.shape) for param in params], groups.shard.size, options.atom)
        devices = Devices() if on_meta else options.placement.devices_for(device)
        buffer = FlatBuffer(names, params, layout, groups, dtypes, options.flatten, devices)
        buffers.append(buffer)
        where.update({param: (buffer, index) for index, param in enumerate(named)})
    slots = [Slot(place.module, place.attribute, *where[place.param]) for place in own]
    return buffers, slots


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """A parameter of its shape, with whatever attributes the user has given it."""
    like = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    give_attributes(param, like)
    if (shard := shard_of(param)) is not None:
        mark(like, shard)
    return like


def _install(unit: Unit) -> None:
    """Gives the module its class, and makes torch call the unit."""
    module = unit.module
    if unit.options.flatten:
        for number, buffer in enumerate(unit.buffers):
            module.register_parameter(flat_name_of(number), buffer.exposed[0])
    object.__setattr__(module, "__class__", sharded_class(cast(Hashable, type(module))))
    module.register_forward_pre_hook(functools.partial(pre_forward, unit), prepend=True, with_kwargs=True)
    module.register_forward_hook(functools.partial(post_forward, unit), with_kwargs=True, always_call=True)
    guard_modules(unit)
    hook_state_dict(module)


def _name_units(outermost: nn.Module) -> None:
    """Gives every unit inside, and each of its parameters, the qualified name that it has from here."""
    paths = paths_in(outermost)
    place = {id(module): number for number, module in enumerate(outermost.modules())}
    slots = sorted((s for unit in units_in(outermost) for s in unit.slots), key=lambda slot: place[id(slot.module)])
    names: dict[tuple[int, int], str] = {}
    for slot in slots:  # Of a tied parameter the plain model's first name, whichever unit owns it.
        name = f"{paths[id(slot.module)]}.{slot.attribute}".lstrip(".")
        names.setdefault((id(slot.buffer), slot.number), name)
    apart, whole = units_apart(outermost), unit_of(outermost)
    model = None if whole is None else whole.options.ranks.whole
    for unit in units_in(outermost):
        unit.name = paths[id(unit.module)]
        unit.root = None  # A new outermost module: its first forward makes a new root.
        ranks = "-".join(map(str, unit.options.ranks.whole.ranks))
        unit.of_ranks = f"@{ranks}" if unit in apart else ""  # Other ranks have other parameters of its names.
        for number, buffer in enumerate(unit.buffers):
            flat_name = f"{unit.name}.{flat_name_of(number)}".lstrip(".")
            own = [f"{names[id(buffer), index]}{unit.of_ranks}" for index in range(len(buffer.names))]
            buffer.rename(own, unit.name, flat_name, model if unit in apart else None)
