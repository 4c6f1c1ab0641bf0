"""A model of the time of one step where streams are not simulated, from what one rank computes, sends and copies.

    step = max(compute / (1 - bubble), exchange, copies) + inside layers + after the step + optimizer
    cost = devices * step / tokens of the step, in device-seconds for a million tokens

    compute       floating point operations / what the device reaches in matrix products, and the bytes that all other
                  operators read and write at the bandwidth of its memory
    bubble        the share of a pipeline's step in which a rank waits for others; 0 without one
    exchange      bytes that overlap with computing: gathers and reductions of gradients and of sharded parameters,
                  keys and values that go round a ring, activations between stages
    copies        bytes between device and host, which overlap as well: offloaded shards, gradients and activations
    inside layers bytes that layers wait for: tensor parallelism, tokens on the way to experts and back
    after         bytes that are sent after the optimizer's step, such as the parameters that OSS has updated
    optimizer     bytes that AdamW reads and writes, 28 for each fp32 parameter that it updates, at the bandwidth of the
                  memory where its state is

It knows no stragglers, no latency of small messages and no slower start of a link: it ranks ways of training, and
promises nothing. All rates are what is reached, not what a data sheet says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from scale_check.simulate import durations
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.strategies import ranks_per_host

ADAM_BYTES = 28
"""AdamW reads parameter, gradient and two moments of four bytes each, and writes all but the gradient."""


@dataclass(frozen=True)
class MachineRates:
    """What a machine reaches: operations and bytes in a second, of one rank.

    Attributes:
        compute: Floating point operations of matrix products.
        link: Bytes sent to other ranks.
        host_link: Bytes between device and host, in one direction.
        memory: Bytes of the device's memory.
        host_memory: Bytes of the host's memory, this rank's part of it.
        attention: Floating point operations of attention; None is the rate of products.
    """

    compute: float
    link: float
    host_link: float
    memory: float
    host_memory: float
    attention: float | None = None

    def of_streams(self) -> durations.Rates:
        """The same for simulated streams."""
        rates = durations.Rates(self.compute, self.memory, self.host_link, self.host_memory, self.link)
        return replace(rates, attention_flops_per_second=self.attention)


def attention_tflops(options: PlanOptions) -> float:
    """Returns the TFLOP/s of attention; on an H100, FlashAttention-2 reaches about half the rate of products."""
    return options.tflops / 2 if options.attention_tflops is None else options.attention_tflops


def rates_of(options: PlanOptions, ranks: int) -> MachineRates:
    """Returns what the options say of the machine, with so many ranks in all."""
    return MachineRates(
        compute=options.tflops * 1e12,
        link=options.link * 1e9,
        host_link=options.host_link * 1e9,
        memory=options.memory_bandwidth * 1e9,
        host_memory=options.host_bandwidth * 1e9 / ranks_per_host(options, ranks),
        attention=attention_tflops(options) * 1e12,
    )


class StepWork(NamedTuple):
    """What one rank does in a step: operations, and bytes."""

    flops: int
    overlapped_bytes: int
    layer_bytes: int
    after_step_bytes: int
    copied_bytes: int
    updated_params: int
    updates_on_host: bool
    bubble: float
    operator_bytes: int = 0


def step_seconds(work: StepWork, rates: MachineRates) -> float:
    """Returns the seconds of one step.

    >>> rates = MachineRates(compute=1e12, link=1e9, host_link=1e9, memory=1e12, host_memory=1e11)
    >>> work = StepWork(2 * 10**12, 10**9, 0, 0, 0, 0, updates_on_host=False, bubble=0.0)
    >>> step_seconds(work, rates), step_seconds(work._replace(bubble=0.5, layer_bytes=10**9), rates)
    (2.0, 5.0)
    """
    compute = (work.flops / rates.compute + work.operator_bytes / rates.memory) / (1 - work.bubble)
    overlapped = max(compute, work.overlapped_bytes / rates.link, work.copied_bytes / rates.host_link)
    sent = (work.layer_bytes + work.after_step_bytes) / rates.link
    memory = rates.host_memory if work.updates_on_host else rates.memory
    return overlapped + sent + ADAM_BYTES * work.updated_params / memory


def device_seconds(ranks: int, seconds: float, options: PlanOptions) -> float:
    """Returns what a million tokens cost: device-seconds of `ranks` devices whose step takes so many seconds.

    >>> device_seconds(8, 0.5, PlanOptions(batch=1, sequence=1000))
    4000.0
    """
    return ranks * seconds / (options.batch * options.sequence) * 1e6
