"""One simulated rank: on the simulated GPU, which gives memory and time in one run, or on the host, which gives memory.

The device's memory, the bytes sent and the time are of one step. The steps before it make the state of AdamW and
the order in which units are prefetched.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from scale_check.simulate import Simulation, simulate
from scale_check.simulate.durations import Clocks, durations
from scale_check.simulate.memory import Memory
from scale_core import compat
from scale_core.comm.mesh import ParallelDims
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.parallelize import dims_of
from scale_tools.plan.rates import rates_of
from scale_tools.plan.strategies import Strategy
from scale_train.configuration.resolve import parse_bytes

Device = Literal["sim", "cpu"]
PINNED_ROUNDING = "rounding of pinned memory"
"""The kind of host memory that torch adds to pinned tensors."""


@dataclass(frozen=True)
class Estimate:
    """What one rank needs with a strategy.

    Attributes:
        strategy: The way to train.
        peak_by_kind: Bytes of the device at its peak, by what they are for.
        host_peak_by_kind: Likewise of the host, where something is kept there.
        bytes_sent: Bytes that the rank sends in a step, by collective.
        seconds: The time of a step on simulated streams; None where the model does not run there.
        reserved_bytes: The bytes that torch's caching allocator reserves, more than the tensors take; None likewise.
        num_alloc_retries: How often the allocator frees cached segments in a step, because the device is full.
        no_time_reason: Why there is no time, where the model runs on the host only.
        at_least_bytes: What parameters, gradients and optimizer state take, where that is too much by itself and
            nothing more was looked at.
        problem: Why the model can't be trained so; "" where it can.
    """

    strategy: Strategy
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    host_peak_by_kind: dict[str, int] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None
    reserved_bytes: int | None = None
    num_alloc_retries: int = 0
    no_time_reason: str = ""
    at_least_bytes: int = 0
    problem: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the device, or what is known to be needed at least."""
        return sum(self.peak_by_kind.values()) or self.at_least_bytes

    @property
    def is_lower_bound(self) -> bool:
        """Whether no step was run, because the state is too large by itself."""
        return not self.peak_by_kind and not self.problem

    @property
    def host_bytes(self) -> int:
        """The most bytes of the host, for one rank."""
        return sum(self.host_peak_by_kind.values())


class SimulatedRank(NamedTuple):
    """A rank, with the axes of its ranks; `clocks` is None on the host, which has no streams."""

    simulation: Simulation
    dims: ParallelDims
    clocks: Clocks | None

    def estimate(self, strategy: Strategy, steps: Sequence[Callable[[], None]]) -> Estimate:
        """Runs steps and returns what the last one takes; what the allocator reserves is the most of all steps."""
        simulation, clocks = self.simulation, self.clocks
        *before, step = steps
        reserved_before = 0
        if clocks is not None:
            if strategy.tensor_ranks == 1:
                simulation.compact()  # Training builds the model unit by unit: no segment was for full parameters.
            else:
                simulation.empty_cache()
            simulation.restart()
        for earlier in before:
            earlier()
        if clocks is not None:
            reserved_before = simulation.peak_reserved_bytes
        simulation.restart()
        if clocks is None:
            step()
            return Estimate(strategy, simulation.peak_by_kind, {}, simulation.bytes_sent)
        clocks.host = begin = clocks.now
        step()
        seconds = clocks.now - begin
        host = _host_peak(simulation.on("cpu")) if strategy.has_host_memory else {}
        reserved_bytes = max(reserved_before, simulation.peak_reserved_bytes)
        peak_by_kind, retries = simulation.peak_by_kind, simulation.num_alloc_retries
        return Estimate(strategy, peak_by_kind, host, simulation.bytes_sent, seconds, reserved_bytes, retries)


@contextmanager
def simulated_rank(strategy: Strategy, options: PlanOptions, device: Device = "sim") -> Iterator[SimulatedRank]:
    """A context in which this process is the first rank of a strategy."""
    device_memory = parse_bytes("--device-memory", options.device_memory) if device == "sim" else None
    with simulate(world_size=strategy.ranks, device=device, device_memory=device_memory) as simulation:
        with simulation.aside():
            dims = dims_of(strategy.parallel_options(options.precision))
        if device == "cpu":
            yield SimulatedRank(simulation, dims, None)
            return
        with durations(simulation, rates_of(options, strategy.ranks)) as clocks:
            yield SimulatedRank(simulation, dims, clocks)


def _host_peak(memory: Memory) -> dict[str, int]:
    """The peak of the host by kind, with what torch adds to pinned memory: it rounds each piece to a power of two."""
    # The optimizer's state is updated where it is. All else is pinned, so that it is copied while the device computes.
    threshold = _pinned_max_round_threshold()
    rounded = [
        item for item in memory.largest_at_peak if item.kind != "optimizer state" and item.num_bytes <= threshold
    ]
    added = sum(item.copies * ((1 << (item.num_bytes - 1).bit_length()) - item.num_bytes) for item in rounded)
    return memory.peak_by_kind | ({PINNED_ROUNDING: added} if added else {})


def _pinned_max_round_threshold() -> float:
    """The most bytes that torch rounds up, by the environment; unlimited by default, and before torch 2.13."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    setting = re.search(r"pinned_max_round_threshold_mb\s*:\s*(\d+)", settings)
    return math.inf if setting is None or compat.torch_version() < (2, 13) else int(setting[1]) * 2**20
