"""Updated parameters on their way from the other ranks are waited for where they are first used.

A module that is about to run needs its own parameters. What a module's parent reads past it, it would read too early:
torch's attention does so with the weights of its projection, and a `ParameterList` never runs. So modules of torch.nn
that are more than containers wait for all that is in them, and what has never been seen to run is waited for at the
very beginning.
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
    """What one module waits for.

    Args:
        buckets: Those that hold its parameters.
        contract: What the ranks have promised each other; None waits for nothing.
        has_run: Its forward is known to be called, or another module waits in its place.
    """

    def __init__(self, buckets: Sequence[Bucket], contract: Contract | None, *, has_run: bool = False) -> None:
        self._buckets, self._contract = buckets, contract
        self.has_run = has_run

    def pre_forward(self, *_: Any) -> None:
        """A hook of the module."""
        self.has_run = True
        for bucket in self._buckets:
            if bucket.is_gathering:
                self.wait()
                return

    def wait(self, *_: Any) -> None:
        """Returns when these parameters are whole; a hook, too.

        Raises:
            ScaleDistributedError: The ranks have lost each other.
        """
        for bucket in self._buckets:
            if bucket.is_gathering and self._contract is not None:
                with self._contract.waiting(bucket.gather_event):
                    bucket.wait(self._contract.limit_seconds)

    def __reduce__(self) -> Any:
        """A copy of the module has parameters of its own, for which nobody waits; they are copied before its hooks.

        Raises:
            RuntimeError: They had not arrived when they were copied.
        """
        if any(bucket.is_gathering for bucket in self._buckets):
            raise RuntimeError(
                "a module was copied or pickled while its parameters were still on their way from the other ranks: "
                "call optimizer.wait() before, on all ranks, or build ShardedDataParallel(..., overlap_gather=False)"
            )
        return GatherWait, ((), None)


class RootGatherWait:
    """What is waited for before the whole model runs: whatever has not been seen to run by itself.

    Attributes:
        waits: Of all modules.
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
    """Lets each module of a model wait for its parameters, before its forward and before its state is read or loaded.

    Args:
        model: All of it.
        buckets: Those that hold the parameters.
        contract: What the ranks have promised each other.

    Returns:
        What each of the modules waits for, for `RootGatherWait`.
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
            # What is loaded would be overwritten by what is still on its way.
            module.register_load_state_dict_pre_hook(waiting.wait)
            waits.append(waiting)
    return waits


def _may_read_children(module: nn.Module) -> bool:
    """Whether this is one of torch's own that is more than a container, or made of one."""
    return any(base.__module__.startswith("torch.nn.") and base not in _CONTAINERS for base in type(module).__mro__)


def _numbers_in(members: Sequence[nn.Module], places: Mapping[int, int]) -> list[int]:
    params = (param for member in members for param in member._parameters.values())
    return sorted({places[id(param)] for param in params if id(param) in places})
