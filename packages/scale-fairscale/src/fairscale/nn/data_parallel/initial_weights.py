"""Compares what all ranks were built with, once, before the model first runs.

As in FairScale nothing is sent while a model is wrapped, so that ranks may wrap its parts in different orders, as Tango
does. There, ranks that were seeded differently trained on parts of different weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import digests_of
from scale_core.shard import unit_shard_of
from scale_fsdp.api import UnitOptions
from scale_fsdp.runtime.param_registry import managed_params
from scale_fsdp.runtime.unit import Unit


@dataclass
class InitialWeights:
    """What a wrapper was given, to be compared between the ranks.

    Attributes:
        digests: A name and a number for each parameter's values.
        versions: Of the shards, as they were made.
    """

    digests: list[str]
    versions: list[int]

    @classmethod
    def of(cls, digests: list[str], unit: Unit) -> InitialWeights:
        """As they are now."""
        return cls(digests, unit.shard_versions)

    def lines(self, unit: Unit) -> list[str]:
        """What must be equal; weights that were written to since, as by loading, are equal on all ranks already."""
        return self.digests if unit.shard_versions == self.versions else ["written to since"]


def digests_of_params(module: nn.Module) -> list[str]:
    """A line for each parameter that is about to be sharded, equal where its values are; none in one process."""
    named_params = [
        (managed.name, managed.param)
        for managed in (managed_params(module) if dist.is_initialized() else ())
        if not managed.param.is_meta and unit_shard_of(managed.param) is None
    ]
    digests = digests_of([param for _, param in named_params])
    return [f"{name}: {digest}" for (name, _), digest in zip(named_params, digests, strict=True)]


def compare_weights(lines: Iterable[str], options: UnitOptions) -> None:
    """Compares the lines of all wrappers of a model, given the options of the outermost one.

    Raises:
        ContractError: They differ between ranks.
    """
    Contract(options.mesh_info.whole, options.limit_seconds).check_equal(
        "the weights that ranks were built with (write torch.manual_seed(seed), with one seed on all ranks, before "
        "the model is built; scale_fsdp.fully_shard sends rank 0's)",
        list(lines),
    )
