"""What is done with a module's activations between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass

from scale_checkpoint.offload import MIN_BYTES
from scale_checkpoint.operators import OperatorPolicy
from scale_checkpoint.places import Target


@dataclass(frozen=True)
class Treatment:
    """The settings of one module.

    Attributes:
        recompute: They are computed again; what is kept are the inputs.
        keep: Of a recomputed module, the operators whose results are kept as well.
        offload_to: Where what is kept goes to; None leaves it where it is.
        min_bytes: Smaller storages are not offloaded.
        preserve_random_state: The recomputation draws the random numbers of the forward.
    """

    recompute: bool = True
    keep: OperatorPolicy | None = None
    offload_to: Target | None = None
    min_bytes: int = MIN_BYTES
    preserve_random_state: bool = True
