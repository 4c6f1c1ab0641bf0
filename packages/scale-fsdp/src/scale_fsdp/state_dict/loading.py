"""Loading a state dict: full tensors, from which each rank keeps its elements, or its own shards as they are.

torch loads module by module and reports mismatches in the end. Here all that can be compared is compared before,
on all ranks together, so that a state of another model changes nothing, and nothing on any rank if one rank has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from scale_core.consistency.all_ranks import all_gather_json, raise_on_all_ranks
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, unit_title
from scale_core.dtensor import full_value, is_dtensor
from scale_core.flat.buffer import FlatBuffer
from scale_core.shard import elements_of, on_local_tensors, shard_of, wait_for
from scale_core.sharded_tensor.tensor import mark_sharded
from scale_core.state.gathered_tensor import plain_tensor
from scale_fsdp.runtime.checks import check_not_in_use
from scale_fsdp.runtime.flattened_parameter import flat_param_name
from scale_fsdp.runtime.unit import ParamSlot, Unit, unit_of, units_in
from scale_fsdp.state_dict.naming import all_names, param_names, persistent_buffers, plain_order

LOCAL_METADATA = "scale_fsdp.local"  # the key in torch's `_metadata` of a local state dict

_IS_LOCAL = "_scale_is_local"  # Attribute of a local tensor that has replaced a full one in a state dict that is loaded


@on_local_tensors
def load_full_state_dict(
    module: nn.Module, plain: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """Loads full tensors by `plain`, the `load_state_dict` of `nn.Module`; raises before anything is written."""
    wait_for(*module.parameters())
    refusal = None
    try:
        _check_state(module, state_dict, strict, assign)
    except (RuntimeError, ValueError) as error:
        refusal = error
    units = units_in(module)
    contract, event = _contract_of(units), Event("load_state_dict", units[0].name)
    contract.sync_point(event, always=True)  # A rank that loads alone would have the shards of another model.
    raise_on_all_ranks(refusal, str(event), contract, RuntimeError)
    buffers = {b for unit in units if unit.options.mesh_info.whole == contract.group for b in unit.buffers}
    named = {name: slot for name, slot in all_names(module).items() if slot.buffer in buffers}
    _check_same_dtensors(named, state_dict, contract)
    loads_as_given = all(_loads_as_given(child) for child in module.modules())
    is_compared = all(all_gather_json(loads_as_given, contract, event))  # Only some ranks may have a hook.
    for unit in units:
        unit.load_is_compared = is_compared
    try:
        return plain(state_dict, strict, assign)
    finally:
        for unit in units:
            unit.load_is_compared = False


def _check_state(module: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> None:
    """Raises where a state can't be loaded: the parameters are in use, or it belongs to one rank, or another model."""
    check_loadable(module, "load_state_dict")
    if LOCAL_METADATA in getattr(state_dict, "_metadata", {}).get("", {}):
        raise ValueError(
            "load_state_dict: expected full tensors, got what local_state_dict() gives of one rank alone: call "
            "load_local_state_dict(state_dict), or consolidate_local_state_dicts(states) of all ranks before"
        )
    if problems := _mismatches(module, state_dict, strict, assign):
        lines = "".join(f"\n\t{problem}" for problem in problems)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}, of which nothing was loaded:{lines}"
        )


def _contract_of(units: Sequence[Unit]) -> Contract:
    """The comparison between all ranks of a unit and those inside."""
    unit = max(units, key=lambda unit: unit.options.mesh_info.whole.size)
    group = unit.options.mesh_info.whole
    if unit.root is not None and not unit.root.stale and unit.root.contract.group == group:
        return unit.root.contract
    return Contract(group, unit.options.limit_seconds, of=unit.origin)


def _check_same_dtensors(named: Mapping[str, ParamSlot], state: Mapping[str, Any], contract: Contract) -> None:
    """Raises ContractError where ranks have DTensors under different names, which they would gather together."""
    lines = [f"'{name}'" for name, slot in named.items() if name in state and is_dtensor(state[name])]
    contract.check_equal("the DTensors of a state dict", lines, "load a state dict with the same DTensors on all")


@contextmanager
def loading_local(module: nn.Module) -> Iterator[None]:
    """Inside, the module's `load_state_dict` takes this rank's shards."""
    units = units_in(module)
    for unit in units:
        unit.loads_local = True
    try:
        yield
    finally:
        for unit in units:
            unit.loads_local = False


@on_local_tensors
def shard_pre_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
    *,
    unit: Unit | None = None,
) -> None:
    """The pre hook of `load_state_dict`: puts this rank's elements in the place of full tensors.

    `unit` is given for a module inside a unit, which may be loaded by itself.
    """
    own_unit = unit_of(module)
    owner = unit or own_unit
    assert owner is not None
    assign = local_metadata.get("assign_to_params_buffers", False)
    if assign:
        sharded = [slot.attribute for slot in owner.slots if slot.module is module]
        _copy_unsharded(module, sharded, state_dict, prefix, local_metadata, error_msgs)
        if sharded:  # torch would put the values in the place of the shards.
            local_metadata["assign_to_params_buffers"] = False
    if unit is not None:
        slots = [(prefix + slot.attribute, slot) for slot in unit.slots if slot.module is module]
        named = [
            (name, slot)
            for name, slot in slots
            if name in state_dict and not getattr(state_dict[name], _IS_LOCAL, False)
        ]
        if not named or unit.loads_local:
            return
    else:
        unit = owner
        named = param_names(module, unit, prefix)
    check_loadable(unit.module, "load_state_dict")
    for buffer in dict.fromkeys([*unit.buffers, *(slot.buffer for _, slot in named)]):
        buffer.release()
    if unit.loads_local:
        return
    problems = _problems_of(named, state_dict, assign=assign)
    if not unit.load_is_compared:
        problems = _problems_of_all_ranks(unit, named, state_dict, problems)
    error_msgs += problems
    for name, slot in named:
        _replace_by_shard(state_dict, name, slot, missing_keys, has_problem=bool(problems))
    for number, buffer in enumerate(unit.buffers if unit is own_unit and unit.module is module else ()):
        if buffer.flatten:
            state_dict[prefix + flat_param_name(number)] = buffer.sharded_params[0]  # loaded already


@on_local_tensors
def copying_pre_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """The pre hook of a module inside a unit that has none of its parameters; see `_copy_unsharded`."""
    if local_metadata.get("assign_to_params_buffers", False):
        _copy_unsharded(module, (), state_dict, prefix, local_metadata, error_msgs)


def _copy_unsharded(
    module: nn.Module,
    sharded: Collection[str],
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    error_msgs: list[str],
) -> None:
    """With `assign`, makes torch copy values to buffers and ignored parameters, as to shards; on meta it assigns.

    So `assign` has one meaning in all modules of a unit: each tensor stays the model's own, on its device.
    """
    unassigned = module._non_persistent_buffers_set.union(sharded)
    named = {n: tensor for n, tensor in (*module._buffers.items(), *module._parameters.items()) if n not in unassigned}
    targets = {prefix + name: tensor for name, tensor in named.items() if tensor is not None}
    if any(tensor.is_meta for tensor in targets.values()):
        return
    local_metadata["assign_to_params_buffers"] = False
    values = {name: value for name in targets if isinstance(value := state_dict.get(name), Tensor)}
    error_msgs += filter(None, [_dtype_error(name, value, targets[name]) for name, value in values.items()])


def _problems_of(named: Sequence[tuple[str, ParamSlot]], state_dict: Mapping[str, Any], *, assign: bool) -> list[str]:
    """The mistakes in the values that a state has for parameters."""
    values = [(name, state_dict[name], slot) for name, slot in named if name in state_dict]
    problems = [
        _shape_error(name, value, slot) or (_dtype_error(name, value, slot) if assign else "")
        for name, value, slot in values
        if not _is_own(slot, value)
    ]
    return [problem for problem in problems if problem]


def _problems_of_all_ranks(
    unit: Unit, named: Sequence[tuple[str, ParamSlot]], state_dict: Mapping[str, Any], problems: list[str]
) -> list[str]:
    """This rank's mistakes, or the first mistaken rank's if it has none. A plain module around a unit is loaded.

    Raises:
        ContractError: The ranks have DTensors under different names.
    """
    contract = _contract_of([unit])
    event = Event("load_state_dict", unit.name)
    contract.sync_point(event, always=True)
    by_rank = all_gather_json(problems, contract, event)
    if not any(by_rank):
        _check_same_dtensors(dict(named), state_dict, contract)
    if problems:  # Mostly the same on all ranks
        return problems
    rank, of_rank = next(((rank, of_rank) for rank, of_rank in enumerate(by_rank) if of_rank), (0, []))
    return [f"{problem} (on rank {rank})" for problem in of_rank]


def _replace_by_shard(
    state_dict: dict[str, Any],
    name: str,
    slot: ParamSlot,
    missing_keys: list[str],
    *,
    has_problem: bool,
) -> None:
    """Puts this rank's elements of one parameter in the place of its full tensor; a flat one is loaded at once."""
    buffer, number = slot.buffer, slot.number
    full = state_dict.get(name)
    if full is buffer.sharded_param(number):  # torch.distributed.checkpoint has filled in missing values.
        del state_dict[name]
        full = None
    if full is None:
        if buffer.flatten:
            missing_keys.append(name)
        return
    if not has_problem:
        full = full_value(full)
    if buffer.flatten:
        del state_dict[name]
        if not has_problem:
            buffer.load(number, full)
        return
    local = buffer.pieces[number].detach() if has_problem else local_elements(buffer, number, full)
    if (shard := shard_of(buffer.sharded_params[number])) is not None:
        mark_sharded(local, shard)  # torch compares its shape with the parameter's shape.
    setattr(local, _IS_LOCAL, True)
    state_dict[name] = local


def local_elements(buffer: FlatBuffer, number: int, full: Tensor) -> Tensor:
    """This rank's elements of a full tensor, or of the part that the parameter's layer has on this rank."""
    full, span = plain_tensor(full).detach(), buffer.spans[number]
    shard = None if buffer.flatten else shard_of(buffer.sharded_params[number])
    if shard is not None and tuple(full.shape) == shard.shape:
        return elements_of(full, shard.start, shard.stop, shard.ranges).view(span.shape)
    return full.reshape(-1)[span.start : span.stop].view(span.shape)


def check_loadable(module: nn.Module, what: str) -> None:
    """Raises RuntimeError where parameters are in use, or on the meta device."""
    units = units_in(module)
    check_not_in_use(units, what)
    for unit in units:
        if any(buffer.is_meta for buffer in unit.buffers):
            raise RuntimeError(
                f"{what}: the parameters of {unit_title(unit.name)} are on the meta device and have no memory yet: "
                "call model.to_empty(device=...) before"
            )


def _mismatches(module: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> list[str]:
    """The mismatches, in torch's words; nothing where a module may change the state before it loads it."""
    if not all(_loads_as_given(child) for child in module.modules()):
        return []
    named = all_names(module)
    problems = []
    if strict:  # Missing buffers are left to torch: a state of an old version lacks some by right.
        # torch.distributed.checkpoint fills in missing values from the model.
        if missing := [n for n, slot in named.items() if n not in state_dict or _is_own(slot, state_dict[n])]:
            hidden = any(named[name].buffer.flatten for name in missing)
            hint = " Where flatten_parameters=True hides names, load the full tensors on every rank." if hidden else ""
            problems.append(f"Missing key(s) in state_dict: {_quoted(missing)}.{hint}")
        expected_names = named.keys() | plain_order(module).keys()
        if unexpected := [name for name in state_dict if name not in expected_names and not _is_flat(name)]:
            problems.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    targets: dict[str, ParamSlot | Tensor] = {**named, **persistent_buffers(module)}
    problems += [
        _shape_error(name, state_dict[name], target) or (_dtype_error(name, state_dict[name], target) if assign else "")
        for name, target in targets.items()
        if name in state_dict and not _is_own(named.get(name), state_dict[name])
    ]
    return [problem for problem in problems if problem]


def _loads_as_given(module: nn.Module) -> bool:
    """Whether a module loads the state unchanged: no foreign hook, and no `_load_from_state_dict` of its own."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    has_our_hooks = all(getattr(hook, "func", hook).__module__.startswith("scale_fsdp.") for hook in hooks)
    return has_our_hooks and type(module)._load_from_state_dict.__module__.startswith("torch.")


def _is_own(slot: ParamSlot | None, value: Any) -> bool:
    return slot is not None and value is slot.buffer.sharded_param(slot.number)


def _is_flat(name: str) -> bool:
    return name.rpartition(".")[2].startswith("flat_param_")


def _shape_error(name: str, value: Any, target: ParamSlot | Tensor) -> str:
    """The mistake in a value for a parameter or a buffer; "" if there is none."""
    if isinstance(target, Tensor):
        shape, shard = tuple(target.shape), None
    else:
        buffer, shape = target.buffer, target.buffer.layout.entries[target.number].shape
        shard = None if buffer.flatten else shard_of(buffer.sharded_params[target.number])
    if not isinstance(value, Tensor):
        return f"'{name}': expected a tensor of shape {shape}, got {type(value).__name__}"
    if tuple(value.shape) == shape or (shard is not None and tuple(value.shape) == shard.shape):
        return ""  # The second is the shape of all that the layer divides along another axis.
    return f"size mismatch for {name}: expected the full shape {shape}, got {tuple(value.shape)}"


def _dtype_error(name: str, value: Tensor, target: ParamSlot | Tensor) -> str:
    """The mistake in a value that is to be assigned; "" if a copy of it has the same result."""
    dtype = target.dtype if isinstance(target, Tensor) else target.buffer.shard.dtype
    if value.dtype == dtype:
        return ""
    return (
        f"dtype mismatch for {name}: the model's is {dtype}, and assign=True would make it {value.dtype}. Convert "
        "the model first by model.to(dtype), or leave out assign=True, which converts the values"
    )


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
