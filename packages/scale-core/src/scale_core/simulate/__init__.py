"""One process that plays one rank of a large world, on tensors without data: memory, bytes, order of collectives.

Begin with `simulation`; `fake_device` is the accelerator that is not there, `memory` and `traffic` keep the books.
"""

from scale_core.simulate.simulation import Simulation, UseAfterReleaseError, simulate

__all__ = ["Simulation", "UseAfterReleaseError", "simulate"]
