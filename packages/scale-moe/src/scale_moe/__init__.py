"""Mixtures of experts, and experts divided between ranks.

Each line imports only from those above it.

- `routing`: which experts a token goes to, capacities, losses and bias; functions of tensors;
- `token_dispatcher`, `grouped_linear`: rows to the ranks of their experts and back; products with expert weights;
- `mesh_info`, `mappings`: the ranks that divide experts and those that divide their features, and sums over the latter;
- `experts`, `moe`: the experts, and the layer of router, experts and balance;
- `parallelize`, `gradients`: experts of models that exist already, divided in place; gradients of what is not divided.
"""

import logging

from scale_moe.experts import Experts
from scale_moe.gradients import average_replicated_gradients
from scale_moe.moe import Balance, ExpertChoice, MoE, TokenChoice
from scale_moe.parallelize import parallelize_experts

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "Balance",
    "ExpertChoice",
    "Experts",
    "MoE",
    "TokenChoice",
    "average_replicated_gradients",
    "parallelize_experts",
]

for _name in __all__:
    if hasattr(globals()[_name], "__qualname__"):  # Tracebacks and documentation show the path that people write.
        globals()[_name].__module__ = __name__
del _name
