"""The rates of a machine, from the options, and the cost of a step on it.

A plan has no stragglers, no latency of small messages and no slower start of a link. It compares ways of training and
promises no time. All rates are the rates that a machine reaches, not the ones of its data sheet.
"""

from __future__ import annotations

from scale_check.simulate.durations import Rates
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.strategies import ranks_per_host


def attention_tflops(options: PlanOptions) -> float:
    """Returns the TFLOP/s of attention; on an H100, FlashAttention-2 reaches about half the rate of products."""
    return options.tflops / 2 if options.attention_tflops is None else options.attention_tflops


def rates_of(options: PlanOptions, ranks: int) -> Rates:
    """Returns the rates of one rank, if there are `ranks` in all."""
    return Rates(
        options.tflops * 1e12,
        options.memory_bandwidth * 1e9,
        options.host_link * 1e9,
        options.host_bandwidth * 1e9 / ranks_per_host(options, ranks),
        options.link * 1e9,
        attention_flops_per_second=attention_tflops(options) * 1e12,
    )


def device_seconds(ranks: int, seconds: float, options: PlanOptions) -> float:
    """Returns the device-seconds that a million tokens cost on `ranks` devices, if a step takes `seconds`.

    >>> device_seconds(8, 0.5, PlanOptions(batch=1, sequence=1000))
    4000.0
    """
    return ranks * seconds / (options.batch * options.sequence) * 1e6
