"""Full state dicts of a divided model, under the plain model's names.

In pieces it is saved by `scale_core.state.sharded_state_dict`, which knows each rank's shard from `shard_of`:
`torch.distributed.checkpoint` and `scale_snapshot` write it and read it at any number of ranks. Here are full
tensors, for other programs and for a plain model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group
from scale_core.shard import unit_shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.layers.base import ParallelModule, ParamSharding


@checked_arguments
@torch.no_grad()
def full_state_dict(model: nn.Module, *, on_host: bool = False) -> dict[str, Tensor]:
    """Returns the state dict of the plain model, with full tensors; all ranks that divide the model call it together.

    It is `model.state_dict()` with copies of all tensors, also of parameters that are not divided. They are on the host
    if you ask for it. It gathers one tensor at a time, on the device where its shards are. Tensors that are not divided
    are copied.

    Args:
        model: A model that holds divided modules, wherever; or none.
        on_host: Whether each tensor is brought to the host before the next one is gathered.

    Raises:
        ScaleDistributedError: A rank did not take part.

    Examples:
        >>> import torch, scale_tp
        >>> model = scale_tp.parallelize(torch.nn.Sequential(torch.nn.Linear(8, 4)), {"0": "colwise"})
        >>> scale_tp.full_state_dict(model)["0.weight"].shape  # on any number of ranks
        torch.Size([4, 8])

    See also: [the guide to existing models](../guides/tensor-parallel.md#existing-models-parallelize).
    """
    placed = dict(_param_shardings(model))
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():  # Parts: one full tensor at a time.
        if not isinstance(value, Tensor):  # The result of a module's get_extra_state.
            state[name] = value
            continue
        part = local_tensor(value)
        group, placement = placed.get(name, (Group(), ParamSharding(tuple(part.shape))))
        full = placement.full_tensor(part, group, name)
        state[name] = full.to("cpu") if on_host else full
    return state


@checked_arguments
@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, strict: bool = True
) -> None:
    """Loads full tensors into a divided model, each rank its shards; nothing is sent.

    The tensors may come one at a time, as from `iterate_consolidated`, so that at most one is unsharded. (A state
    dict of full tensors may as well be given to `model.load_state_dict`.)

    Args:
        model: A model that holds divided modules, wherever; or none.
        tensors: Full tensors by the names of the plain model.
        strict: Whether every parameter and buffer of the model must be given, and nothing else.

    Raises:
        ValueError: A tensor does not have the shape of the full parameter. Tensors before it have been loaded. With
            `strict` also: a key is missing or unknown. Or parameters are sharded along a different axis.

    Examples:
        >>> import torch, scale_tp
        >>> plain = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> model = scale_tp.parallelize(torch.nn.Sequential(torch.nn.Linear(8, 4)), {"0": "colwise"})
        >>> scale_tp.load_full_state_dict(model, plain.state_dict())

    See also: [the guide to existing models](../guides/tensor-parallel.md#existing-models-parallelize).
    """
    if sharded := next((name for name, param in model.named_parameters() if unit_shard_of(param) is not None), None):
        raise ValueError(
            f"load_full_state_dict: '{sharded}' is sharded along another axis: call model.load_state_dict(tensors), "
            "which takes full tensors as well; or give the layers their values before the model is sharded"
        )
    placed = dict(_param_shardings(model))
    values = model.state_dict(keep_vars=True)
    local_tensors = {name: local_tensor(value) for name, value in values.items() if isinstance(value, Tensor)}
    missing = set(local_tensors)
    for name, full in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name not in local_tensors:
            if strict:
                raise ValueError(
                    f"'{name}' is not a parameter or buffer of {type(model).__name__}: rename it, or pass "
                    "strict=False to leave it out"
                )
            continue
        group, placement = placed.get(name, (Group(), ParamSharding(tuple(local_tensors[name].shape))))
        if tuple(full.shape) != placement.shape:
            raise ValueError(f"'{name}': expected a full tensor of shape {placement.shape}, got {tuple(full.shape)}")
        local_tensors[name].detach().copy_(placement.local_part(full, group.rank))
        missing.discard(name)
    if strict and missing:
        raise ValueError(
            f"{len(missing)} tensors of {type(model).__name__} were not given, such as '{min(missing)}': pass "
            "strict=False to keep what they have"
        )


def _param_shardings(model: nn.Module) -> Iterator[tuple[str, tuple[Group, ParamSharding]]]:
    """Yields how each parameter of a divided module is sharded, by its name in the model."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParallelModule):
            for name, placement in module.shardings.items():
                param = module._parameters.get(name)
                if param is None or unit_shard_of(param) is None:  # Else the package that sharded it gathers it.
                    yield f"{path}.{name}".lstrip("."), (module.group, placement)
