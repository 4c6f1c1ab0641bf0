"""Functions run on N ranks, and what each returned.

Begin with `ranks`; `rank` is what runs inside of each process.
"""

from scale_core.testing.ranks import RankError, preload, run_ranks, scaled_by_load

__all__ = ["RankError", "preload", "run_ranks", "scaled_by_load"]
