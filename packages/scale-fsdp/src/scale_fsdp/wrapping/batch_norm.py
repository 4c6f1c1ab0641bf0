"""Batch norms in units of their own, in the dtype that they were built in.

A batch norm's statistics do not survive half precision, so it keeps its parameters and buffers as they are while the
model around it computes in fp16 or bf16; it takes such inputs as they come and returns their dtype. Its few parameters
stay gathered between forward and backward: to gather them again would cost a message and save nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from scale_core.group import GroupLike
from scale_core.shard import unit_shard_of
from scale_fsdp.config import FSDPConfig
from scale_fsdp.sharding import fully_shard
from scale_fsdp.unit import unit_of

M = TypeVar("M", bound=nn.Module)


def auto_wrap_bn(
    module: M,
    single_rank_pg: bool = False,
    process_group: GroupLike = None,
    fsdp_config: FSDPConfig | Mapping[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> M:
    """Makes a unit of each batch norm in a module, `nn.SyncBatchNorm` included; call it before the rest is sharded.

    Args:
        module: What holds them, or a batch norm itself; changed in place.
        single_rank_pg: FairScale's way to leave batch norms unsharded, which left their gradients unreduced as well;
            must be False.
        process_group: As for `fully_shard`.
        fsdp_config: Arguments of `fully_shard` for every batch norm, in place of the ones that keep its parameters in
            their dtype and gathered until their backward.
        wrap_it: False only records the arguments, as `wrapper_config` of each batch norm, for `auto_wrap` or
            `fully_shard_modules` with `config_auto_wrap_policy`.
        assert_on_collision: Refuse a batch norm that has a `wrapper_config` already; False replaces it.

    Returns:
        `module` itself.

    Raises:
        ValueError: `single_rank_pg`; a batch norm has a `wrapper_config`, or its parameters belong to a unit around it.
    """
    if single_rank_pg:
        raise ValueError(
            "auto_wrap_bn(single_rank_pg=True) would never average the gradients of batch norms, and the ranks would "
            "train different models: leave it out; their parameters are few, and sharding them costs one small message"
        )
    given = fsdp_config.as_kwargs() if isinstance(fsdp_config, FSDPConfig) else fsdp_config
    kwargs = {"reshard_after_forward": False} if given is None else dict(given)
    if process_group is not None:
        kwargs = {"process_group": process_group, **kwargs}
    norms = {name: part for name, part in module.named_modules() if _is_open(part)}
    for name, norm in norms.items():
        _check(name, norm, assert_on_collision)
    for norm in norms.values():
        if wrap_it:
            fully_shard(norm, **kwargs)
        else:
            norm.wrapper_config = kwargs
    return module


def _is_open(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and unit_of(module) is None


def _check(name: str, norm: nn.Module, refuses_config: bool) -> None:
    title = f"'{name}', a {type(norm).__name__}," if name else f"this {type(norm).__name__}"
    if refuses_config and hasattr(norm, "wrapper_config"):
        raise ValueError(
            f"auto_wrap_bn: {title} has a wrapper_config already, {norm.wrapper_config!r}: take it away, or let it be "
            "replaced by assert_on_collision=False"
        )
    for param in norm.parameters():
        shard = unit_shard_of(param)
        if shard is not None:
            raise ValueError(
                f"auto_wrap_bn: {title} belongs to a unit that was sharded before, as '{shard.name}': "
                "call auto_wrap_bn(model) first, then fully_shard what is around"
            )
