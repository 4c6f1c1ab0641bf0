"""Ranks that hold parts are no replicas: DistributedDataParallel over them would send one rank's parts to the others.

It does so where it is built, so it is looked at then: torch calls a hook where a module is put into another one.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from scale_core.group import group_of
from scale_core.shard import check_undivided


@functools.cache
def refuse_replicas() -> None:
    """From now on, refuses DistributedDataParallel over ranks that divide a layer between them."""
    register_module_module_registration_hook(_check)


def _check(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    if isinstance(outer, DistributedDataParallel) and inner is not None:
        check_undivided(inner.named_parameters(), group_of(outer.process_group), "DistributedDataParallel")
