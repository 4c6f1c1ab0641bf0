"""One process that simulates one rank of many, on tensors without data: memory, bytes, order of collectives.

Begin with `simulation`; `fake_device` is the simulated accelerator, `memory` and `traffic` do the accounting, `races`
looks for missing waits by the clocks of `happens_before`.
"""

from scale_check.simulate.races import Race, RaceError
from scale_check.simulate.simulation import Simulation, UseAfterReleaseError, simulate

__all__ = ["Race", "RaceError", "Simulation", "UseAfterReleaseError", "simulate"]
