"""Mixtures of experts, and experts divided between ranks.

Each line imports only from those above it.

- `routing`: which experts a token goes to, capacities, losses and bias; functions of tensors;
- `token_dispatcher`, `grouped_linear`: rows to the ranks of their experts and back; products with expert weights;
- `experts`, `moe`: the experts, and the layer of router, experts and balance;
- `parallelize`, `gradients`: experts of models that exist already, divided in place; gradients of what is not divided.
"""

import logging

from scale_moe.experts import Experts, divide_gradient
from scale_moe.gradients import average_replicated_gradients
from scale_moe.moe import Balance, ExpertChoice, MoE, TokenChoice
from scale_moe.parallelize import parallelize_experts
from scale_moe.routing import (
    Routing,
    batch_counts,
    expert_capacity,
    expert_choice_routing,
    load_balancing_loss,
    router_scores,
    router_z_loss,
    top_k_routing,
    updated_bias,
    with_capacity,
)
from scale_moe.token_dispatcher import DispatchPlan, combine, dispatch, experts_per_rank, plan_dispatch

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "Balance",
    "DispatchPlan",
    "ExpertChoice",
    "Experts",
    "MoE",
    "Routing",
    "TokenChoice",
    "average_replicated_gradients",
    "batch_counts",
    "combine",
    "dispatch",
    "divide_gradient",
    "expert_capacity",
    "expert_choice_routing",
    "experts_per_rank",
    "load_balancing_loss",
    "parallelize_experts",
    "plan_dispatch",
    "router_scores",
    "router_z_loss",
    "top_k_routing",
    "updated_bias",
    "with_capacity",
]

for _name in __all__:
    if hasattr(globals()[_name], "__qualname__"):  # Tracebacks and documentation show the path that people write.
        globals()[_name].__module__ = __name__
del _name
