"""Compares what must be equal on several ranks before training passes: copies of shards, and module buffers.

See `ShardOptions.check_replicas_every`. A model without an interval has no `ReplicaChecks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import check_interval, compare_replicas, named_buffers
from scale_core.consistency.equal_values import FIRST_PASSES, EqualValues
from scale_fsdp.runtime.unit import Unit


class ReplicaChecks:
    """The comparisons of one model; `interval` is the number of training passes between two of them.

    Attributes:
        next_pass: The number of the training pass before which they compare next.
    """

    def __init__(self, units: Sequence[Unit], contract: Contract, interval: int) -> None:
        self.next_pass = 0
        self._module, self._contract, self._interval = units[0].module, contract, interval
        self._has_replicas = any(unit.options.mesh_info.replicas.size > 1 for unit in units)
        self._equal_buffers = EqualValues()

    @classmethod
    def of(cls, units: Sequence[Unit], contract: Contract) -> ReplicaChecks | None:
        """Returns the checks that the options of the outermost unit ask for."""
        interval = check_interval(units[0].options.check_replicas_every)
        return cls(units, contract, interval) if interval else None

    def compare(self, number: int) -> None:
        """Compares buffers and, at the interval, copies of shards, before training pass `number`."""
        after = number + 1
        self.next_pass = after if after < FIRST_PASSES else after + -after % self._interval
        if self._contract.is_broken:
            return
        step = self._contract.step + 1
        if self._has_replicas and number % self._interval == 0:
            compare_replicas(list(self._module.named_parameters()), self._contract, step)
        self._equal_buffers.compare(named_buffers(self._module), self._contract, step)
