"""All-gather overlap: each module waits for its updated parameters when it is first used.

A module waits in its forward pre-hook. A parent may read a child's parameters without calling the child: torch's
attention reads the weights of its projection, and a `ParameterList` never runs. So modules of torch.nn other than
containers wait for all parameters inside, and those of modules that were never seen to run are waited for before the
whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from scale_core.consistency.contract import Contract
from scale_oss.bucket import Bucket

_CONTAINERS = (
    nn.Module,
    nn.ModuleDict,
    nn.ModuleList,
    nn.Sequential,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerEncoder,
)


class GatherWait:
    """The wait of one module.

    Args:
        buckets: They hold its parameters.
        contract: Explains a failed wait; None for a copy, which has nothing to wait for.
        has_run: Its forward is known to be called, or another module waits in its place.
    """

    def __init__(self, buckets: Sequence[Bucket], contract: Contract | None, *, has_run: bool = False) -> None:
        self._buckets, self._contract = buckets, contract
        self.has_run = has_run

    def pre_forward(self, *_: Any) -> None:
        """Forward pre-hook."""
        self.has_run = True
        for bucket in self._buckets:
            if bucket.is_gathering:
                self.wait()
                return

    def wait(self, *_: Any) -> None:
        """Returns when the parameters have arrived; also a hook.

        Raises:
            ScaleDistributedError: A rank can't be reached.
        """
        for bucket in self._buckets:
            if bucket.is_gathering and self._contract is not None:
                with self._contract.waiting(bucket.gather_event):
                    bucket.wait(self._contract.limit_seconds)

    def __reduce__(self) -> Any:
        """A copy has parameters of its own and waits for nothing; torch copies parameters before hooks.

        Raises:
            RuntimeError: The parameters had not arrived when they were copied.
        """
        if any(bucket.is_gathering for bucket in self._buckets):
            raise RuntimeError(
                "a module was copied or pickled while its parameters were still on their way from the other ranks: "
                "call optimizer.wait() before, on all ranks, or build ShardedDataParallel(..., overlap_gather=False)"
            )
        return GatherWait, ((), None)


class RootGatherWait:
    """The wait before the whole model, for modules that were not seen to run.

    Attributes:
        waits: Those of all modules.
    """

    def __init__(self, waits: Iterable[GatherWait] = ()) -> None:
        self.waits = list(waits)

    def __call__(self, *_: Any) -> None:
        for waiting in self.waits:
            if not waiting.has_run:
                waiting.wait()

    def __reduce__(self) -> Any:
        return RootGatherWait, ()


def register_gather_waits(model: nn.Module, buckets: Sequence[Bucket], contract: Contract) -> list[GatherWait]:
    """Registers the waits of a model's modules, before their forward and before their state is read or loaded.

    Args:
        model: All of it.
        buckets: They hold the parameters.
        contract: Explains a failed wait.

    Returns:
        The waits, for `RootGatherWait`.
    """
    places = {id(param): number for number, bucket in enumerate(buckets) for param in bucket.params}
    inside: set[nn.Module] = set()  # Others read their parameters, or may do so.
    waits = []
    for module in model.modules():  # The outer ones first.
        members = list(module.modules()) if _may_read_children(module) else [module]
        inside.update(members[1:])
        numbers = _numbers_in(members, places)
        if numbers:
            waiting = GatherWait([buckets[number] for number in numbers], contract, has_run=module in inside)
            # Before hooks that were there already: those of weight and spectral norm compute with parameters.
            module.register_forward_pre_hook(waiting.pre_forward, prepend=True)
            module.register_state_dict_pre_hook(waiting.wait)
            # The all-gather would overwrite what is loaded.
            module.register_load_state_dict_pre_hook(waiting.wait)
            waits.append(waiting)
    return waits


def _may_read_children(module: nn.Module) -> bool:
    """Whether this is a module of torch's own that is no mere container, or derived from one."""
    return any(base.__module__.startswith("torch.nn.") and base not in _CONTAINERS for base in type(module).__mro__)


def _numbers_in(members: Sequence[nn.Module], places: Mapping[int, int]) -> list[int]:
    params = (param for member in members for param in member._parameters.values())
    return sorted({places[id(param)] for param in params if id(param) in places})
