"""Functions run on N ranks, and what each returned; faults at named points of the code.

Begin with `ranks`; `rank` is what runs inside of each process. `async_gloo` is a transport for them with NCCL's rules.
"""

from scale_core.testing import faults
from scale_core.testing.ranks import RankError, preload, run_ranks, scaled_by_load

__all__ = ["RankError", "faults", "preload", "run_ranks", "scaled_by_load"]
