"""`parallelize_experts`: divides the experts of a model that exists, in place.

Experts of transformers are one module for each layer: parameters [E, ...] for all E experts, and a forward of tokens,
the indices of their experts, and weights. Each rank keeps the parameters of some experts. The module's forward becomes:
dispatch, the module's own forward on the received rows, combine. So whatever the module computes inside stays its own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_core.consistency.same_call import check_same_call
from scale_core.device.streams import tensor_on
from scale_core.optim.step_checks import register_replaced
from scale_core.parameters import check_memory_unshared, copy_attributes
from scale_core.shard import shard_of
from scale_core.sharded_module import ShardedModule, mixed_class
from scale_moe.experts import (
    ExpertSharding,
    ParamByName,
    check_hidden_dim,
    compute_experts,
    with_order_of_rows,
)
from scale_moe.mappings import copy_to_expert_tensor_parallel_region, reduce_from_expert_tensor_parallel_region
from scale_moe.mesh_info import ExpertMesh, resolve_expert_mesh
from scale_moe.token_dispatcher import combine, dispatch, plan_dispatch

_logger = logging.getLogger(__name__)


@checked_arguments
def parallelize_experts(model: nn.Module, process_group: GroupLike = None) -> nn.Module:
    """Divides the experts of a model between ranks, in place; each rank has its own tokens.

    It finds modules by their structure: an attribute `num_experts`, parameters [num_experts, ...], and a forward of
    hidden states [T, dim], expert indices [T, k] and weights [T, k]. All mixtures of transformers 5 have it, for
    example Mixtral, Qwen-MoE, DeepSeek, OLMoE and GPT-OSS. Routers, shared experts and all else stay complete on each
    rank. Outputs and gradients are the same as in the undivided model, as `MoE` says.

    Each rank takes its experts out of its own copy. So all copies must have the same values, for example from one seed
    or file. On the meta device nothing is copied: load weights afterwards with `scale_snapshot.load_pretrained`.

    Args:
        model: On the host, a device or meta. Before it is wrapped and before an optimizer is built.
        process_group: The ranks that divide the experts, `ep` of a ParallelDims; None is the default group. With a mesh
            (expert, tensor), the ranks of its second dimension, `tp` of a ParallelDims, divide the hidden features of
            each expert, and have the same tokens.

    Returns:
        The same model.

    Raises:
        ValueError: The model has no such modules, or one that is divided already, or hidden features that can't be
            divided; or the modules differ between ranks. The model is unchanged then.

    Example:
        model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
        parallelize_experts(model, mesh["expert"])

    Examples:
        >>> from scale_moe import parallelize_experts
        >>> from transformers import MixtralConfig, MixtralForCausalLM  # doctest: +SKIP
        >>> model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))  # doctest: +SKIP
        >>> model = parallelize_experts(model)  # doctest: +SKIP

    See also: [the guide to experts](../guides/experts.md).
    """
    mesh = resolve_expert_mesh(process_group)
    expert_modules = {path: module for path, module in model.named_modules() if _holds_experts(module)}
    _check(model, expert_modules)
    plans = [_plan(path, module, mesh) for path, module in expert_modules.items()]
    check_same_call("parallelize_experts", "; ".join(map(str, plans)), mesh.whole, each_time=True)
    if mesh.whole.size > 1:
        for plan in plans:
            _divide(expert_modules[plan.path], plan, mesh)
            parent = model.get_submodule(plan.path.rpartition(".")[0])
            object.__setattr__(expert_modules[plan.path], "parent", ref(parent))
    if mesh.whole.rank == 0:
        sizes = sorted({plan.num_experts for plan in plans})
        words = (type(model).__name__, len(plans), ", ".join(map(str, sizes)), mesh.shape)
        _logger.info("parallelize_experts of %s: %d modules of %s experts over %s ranks", *words)
    return model


class ParallelExperts(ShardedModule):
    """The methods added to the class of a module of experts."""

    num_experts: int
    path: str
    mesh: ExpertMesh
    shardings: dict[str, ExpertSharding]
    parent: ReferenceType[nn.Module] | None  # The module with the router; a copy has none.

    @compat.untraced
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns [T, dim] for tokens [T, dim] of this rank, whose experts and weights are [T, k]."""
        tensor, name = self.mesh.tensor, f"the experts '{self.path}'"
        where: Any = (self.num_experts, self.mesh.expert, name)
        checks: Any = {"router": self._router_weight(), "tensor_parallel_group": tensor}
        plan = plan_dispatch(hidden_states, top_k_index, top_k_weights, *where, **checks)
        tokens, weights = (
            copy_to_expert_tensor_parallel_region(value, tensor, name) for value in (hidden_states, top_k_weights)
        )
        plan, received_counts = with_order_of_rows(plan)
        rows, compute = dispatch(tokens, plan), partial(self._compute, weights.dtype)
        output = compute_experts(self, compute, rows, plan.counts, self.mesh.expert.size, received_counts)
        return reduce_from_expert_tensor_parallel_region(combine(output, weights, plan), tensor, name)

    def _compute(self, dtype: torch.dtype, rows: Tensor, counts: Sequence[int], param: ParamByName) -> Tensor:
        """The module's own forward on rows [R, dim] that are sorted by expert, each with a weight of 1 in `dtype`."""
        params = {name: param(name) for name in self.shardings}
        if not len(rows):  # Experts without tokens may be left out; other ranks' backward passes wait.
            return rows + sum(param[:0].sum() for param in params.values())
        number = tensor_on(rows.device, counts)
        index = torch.arange(len(counts), device=rows.device).repeat_interleave(number, output_size=len(rows))
        ones = torch.ones(len(rows), 1, dtype=dtype, device=rows.device)
        with self._as_local(params):
            output: Tensor = super().forward(rows, index[:, None], ones)  # of the module's own class
        return output

    def _router_weight(self) -> Tensor | None:
        """The weight [E, ...] of a module next to this one, as of all routers of transformers; None where none is."""
        parent = None if self.parent is None else self.parent()
        for module in () if parent is None else parent.children():
            weight = getattr(module, "weight", None)
            if module is not self and isinstance(weight, Tensor) and weight.shape[:1] == (self.num_experts,):
                return weight
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "parent": None}

    @contextmanager
    def _as_local(self, params: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the module is one of this rank's experts alone, and computes with these parameters."""
        num_experts = next(iter(self.shardings.values())).sizes[self.mesh.expert.rank]
        local: dict[str, Any] = {**params, "num_experts": num_experts}
        before = {name: self.__dict__[name] for name in local if name in self.__dict__}
        self.__dict__.update(local)  # They are found before parameters are.
        try:
            yield
        finally:
            for name in local:
                del self.__dict__[name]
            self.__dict__.update(before)

    def extra_repr(self) -> str:
        sizes, (_, tensor, _) = next(iter(self.shardings.values())).sizes, self.mesh
        part = f", part {tensor.rank} of {tensor.size} of their features" if tensor.size > 1 else ""
        return f"{super().extra_repr()}{sizes[self.mesh.expert.rank]} of {self.num_experts} experts{part}"


class _Plan(NamedTuple):
    """The conversion of a module."""

    path: str
    num_experts: int
    shardings: dict[str, ExpertSharding]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class _ReplacedParameter:
    """A full parameter that is no longer the model's, by its name: an optimizer that was built before still has it."""

    names: list[str]


def _holds_experts(module: nn.Module) -> bool:
    number = getattr(module, "num_experts", None)
    params = list(module.parameters(recurse=False))
    if not isinstance(number, int) or not params or isinstance(module, ShardedModule):
        return False
    names = list(inspect.signature(type(module).forward).parameters)[1:4]
    return (
        len(names) == 3
        and names[0] == "hidden_states"
        and "ind" in names[1]
        and "weight" in names[2]
        and all(param.dim() > 1 and param.shape[0] == number for param in params)
    )


def _check(model: nn.Module, found: dict[str, nn.Module]) -> None:
    divided = [path for path, module in model.named_modules() if isinstance(module, ParallelExperts)]
    if divided:
        raise ValueError(f"parallelize_experts: '{divided[0]}' is divided already: call it once, with one group")
    if not found:
        raise ValueError(
            f"parallelize_experts: {type(model).__name__} has no modules of experts, with num_experts, parameters "
            "[num_experts, ...] and a forward of (hidden_states, indices, weights): build layers with scale_moe.MoE, "
            "or divide experts that compute with rows of tokens by scale_moe.token_dispatcher.dispatch and combine"
        )
    for path, module in found.items():
        for name, param in module.named_parameters(recurse=False):
            shard = shard_of(param)
            if shard is not None:
                raise ValueError(
                    f"parallelize_experts: '{path}.{name}' is a shard of {list(shard.shape)} already: divide experts "
                    "before fully_shard and other wrappers"
                )
        inner = next((name for name, _ in module.named_parameters() if "." in name), None)
        if inner is not None:
            raise ValueError(
                f"parallelize_experts: '{path}' has a parameter '{inner}' in a module inside of it, as an adapter, and "
                "it can't be told which experts it belongs to: divide the experts before adapters are added"
            )
    owners: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            first = owners.setdefault(param, f"{path}.{name}")
            if first != f"{path}.{name}" and (path in found or first.rpartition(".")[0] in found):
                raise ValueError(f"parallelize_experts: '{path}.{name}' is tied to '{first}': untie them first")
    experts = {id(param) for module in found.values() for param in module.parameters(recurse=False)}
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    others = [(name, tensor) for name, tensor in tensors if id(tensor) not in experts]
    check_memory_unshared("parallelize_experts", ((name, t) for name, t in tensors if id(t) in experts), others)


def _plan(path: str, module: nn.Module, mesh: ExpertMesh) -> _Plan:
    number = cast(int, module.num_experts)
    params = dict(module.named_parameters(recurse=False))
    dims = dict.fromkeys(params, (1, 1)) if mesh.tensor.size == 1 else _hidden_features(path, module, mesh)
    shardings = {
        name: ExpertSharding.over(mesh, param.shape, dims[name][0], stacked=dims[name][1])
        for name, param in params.items()
    }
    return _Plan(path, number, shardings, tuple(param.dtype for param in params.values()))


def _hidden_features(path: str, module: nn.Module, mesh: ExpertMesh) -> dict[str, tuple[int, int]]:
    """In which dimension of each parameter the hidden features stand, and of how many matrices one behind another.

    Modules of transformers say how their parameters stand; all of its own kernels know no more of them.
    """
    up, stacked = ("gate_up_proj", 2) if getattr(module, "has_gate", True) else ("up_proj", 1)
    supported = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_post_expert_norm": False}
    actual = {name: getattr(module, name, None) for name in supported}
    shapes = {name: list(param.shape) for name, param in module.named_parameters(recurse=False)}
    down = shapes.get("down_proj", [])
    number, dim, width = down if len(down) == 3 else (0, 0, 0)
    if actual != supported or shapes != {up: [number, stacked * width, dim], "down_proj": [number, dim, width]}:
        differences = ", ".join(f"{name}={value}" for name, value in actual.items() if value != supported[name])
        raise ValueError(
            f"parallelize_experts: '{path}' ({type(module).__name__}) has "
            f"{shapes}{f' and {differences}' if differences else ''}, and hidden features can be divided where there "
            f"are {up} [experts, {stacked} * hidden, dim] and down_proj [experts, dim, hidden] alone, stacked one "
            "behind the other and without biases: give a mesh of one "
            'dimension, mesh["expert"], which divides whole experts'
        )
    check_hidden_dim(f"parallelize_experts: '{path}'", width, mesh)
    return {up: (1, stacked), "down_proj": (2, 1)}


def _divide(module: nn.Module, plan: _Plan, mesh: ExpertMesh) -> None:
    """Makes a module one of this rank's experts, in place; it keeps its object, names and hooks."""
    module.__class__ = mixed_class(ParallelExperts, type(module))
    added = {"group": mesh.whole, "mesh": mesh, "shardings": plan.shardings, "path": plan.path}
    for name, value in added.items():
        object.__setattr__(module, name, value)
    for name, sharding in plan.shardings.items():
        full = module.get_parameter(name)
        register_replaced(full, _ReplacedParameter([f"{plan.path}.{name}"]), 0)
        part = sharding.local_part(full.detach(), mesh.whole.rank).clone(memory_format=torch.contiguous_format)
        param = nn.Parameter(part, requires_grad=full.requires_grad)
        copy_attributes(full, param)
        module.register_parameter(name, param)
