"""Groups of ranks, collectives over them, and the handles of transfers under way.

Begin with `collectives`; `work` has the handles, `group` the ranks, `mesh` their axes, `context_parallel_group` those
that divide samples.
"""
